"""Two processes and a bucket: `init_from` reads the parts that are needed."""

import bucket_servers
from etils import epath
from flax import linen as nn
from flax import serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors import numpy as safetensors_numpy
import two_processes

import flaxshard as fs

pytestmark = pytest.mark.slow


def save_all(folder):
  """Saves parameters in several formats, and returns them."""
  state = fs.create_train_state(
    nn.Dense(8), jax.random.key(1), jnp.ones((1, 4)), optax.adam(0.1)
  )
  with fs.Checkpointer(f"{folder}/run/checkpoints") as checkpointer:
    checkpointer.save(1, state)
  params = jax.tree.map(np.asarray, state.params)
  write = lambda path, content: epath.Path(path).write_bytes(content)
  write(f"{folder}/a.safetensors", safetensors_numpy.save(params))
  write(f"{folder}/a.msgpack", serialization.to_bytes(params))
  return params


_SCRIPT = """
import numpy as np, optax, jax.numpy as jnp
from flax import linen as nn
import flaxshard as fs
folder = sys.argv[3]
strategy = fs.Strategy()
rules = (("kernel", jax.sharding.PartitionSpec(None, "replica")),)
wanted = np.load(folder + "/kernel.npy")
for lora in (None, fs.LoRA(rank=2)):
  for name in ("run", "a.safetensors", "a.msgpack"):
    state = fs.create_train_state(
        nn.Dense(8), jax.random.key(0), jnp.ones((1, 4)), optax.adam(0.1),
        strategy=strategy, rules=rules, lora=lora, wrappers=[fs.LossScale(8.0)])
    state, _ = fs.checkpoint.init_from(state, folder + "/" + name)
    kernel = (state.frozen if lora else state.params)["kernel"]
    shards = kernel.addressable_shards
    assert len(shards) == 2 and shards[0].data.shape == (4, 2)
    for shard in shards:
      np.testing.assert_array_equal(shard.data, wanted[shard.index])
  merged = fs.merge_lora(state)["params"]["kernel"]
  assert merged.sharding == kernel.sharding
try:
  fs.checkpoint.init_from(state, folder + f"/missing{rank}")
except ValueError as e:
  print("error", e)
"""


def test_two_processes(tmp_path):
  (tmp_path / "run").mkdir()
  np.save(tmp_path / "kernel.npy", save_all(tmp_path)["kernel"])
  for output, _ in two_processes.run(_SCRIPT, str(tmp_path)):
    assert "error" in output and "missing" in output


def test_bucket(servers):
  folder = f"gs://{bucket_servers.BUCKET}/pretrained"
  params = save_all(folder)
  for name in ("run", "a.safetensors", "a.msgpack"):
    zeros = jax.tree.map(jnp.zeros_like, params)
    read, report = fs.checkpoint.init_from(zeros, f"{folder}/{name}")
    jax.tree.map(np.testing.assert_array_equal, read, params)
    assert report.path.startswith(folder)
