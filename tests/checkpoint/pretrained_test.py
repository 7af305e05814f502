"""`init_from` reads parameters of any format into a new state."""

import json
import types

import bucket_servers
from etils import epath
from flax import linen as nn
from flax import nnx
from flax import serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from safetensors import numpy as safetensors_numpy
import two_processes

import flaxshard as fs
from flaxshard.core import trees

P = jax.sharding.PartitionSpec
MESH = jax.sharding.Mesh(
  np.array(jax.devices()).reshape(4, 2), ("replica", "model")
)
STRATEGY = types.SimpleNamespace(mesh=MESH)
RULES = (("body/kernel", P(None, "model")),)
X = np.ones((2, 8), np.float32)


class Net(nn.Module):
  """A body, a norm with statistics, and a head."""

  @nn.compact
  def __call__(self, x, train=False):
    x = nn.BatchNorm(use_running_average=not train, name="norm")(
      nn.Dense(16, name="body")(x)
    )
    return nn.Dense(4, name="head")(x)


NET = Net()


def make(seed=0, model=NET, **kwargs):
  return fs.create_train_state(
    model, jax.random.key(seed), X, optax.adam(0.1), **kwargs
  )


@pytest.fixture(scope="module")
def pretrained():
  """A state that differs from a new one in every array."""
  state = make(seed=1)
  return state.replace(
    step=jnp.int32(7),
    params=jax.tree.map(lambda x: x + 1, state.params),
    opt_state=jax.tree.map(lambda x: x + 1, state.opt_state),
    batch_stats=jax.tree.map(lambda x: x + 2, state.batch_stats),
  )


def variables_of(state):
  return {"params": state.params, "batch_stats": state.batch_stats}


def save_ours(path, state):
  with fs.Checkpointer(path / "checkpoints") as checkpointer:
    checkpointer.save(3, make())
    checkpointer.save(7, state)
  return path


def save_manager(path, state):
  with ocp.CheckpointManager(path) as manager:
    manager.save(7, args=ocp.args.StandardSave(state))
  return path


def save_bytes(path, state):
  file = path / "model.msgpack"
  file.write_bytes(serialization.to_bytes(variables_of(state)))
  return file


def save_safetensors(path, state):
  leaves = trees.leaves_by_path(variables_of(state)).items()
  tensors = {".".join(key): np.asarray(x) for key, x in leaves}
  index = {name: f"{name[0]}.safetensors" for name in tensors}
  for file in set(index.values()):
    part = {k: x for k, x in tensors.items() if index[k] == file}
    safetensors_numpy.save_file(part, path / file)
  (path / "model.safetensors.index.json").write_text(
    json.dumps({"metadata": {}, "weight_map": index})
  )
  return path


def assert_equal(tree, wanted):
  jax.tree.map(np.testing.assert_array_equal, tree, wanted)


@pytest.mark.parametrize(
  "save",
  [
    save_bytes,
    save_safetensors,
    pytest.param(save_ours, marks=pytest.mark.slow),
    pytest.param(save_manager, marks=pytest.mark.slow),
  ],
)
def test_formats(save, tmp_path, pretrained):
  path = save(tmp_path, pretrained)
  state = make(strategy=STRATEGY, rules=RULES, wrappers=[fs.LossScale(8.0)])
  new, report = fs.checkpoint.init_from(state, path)
  assert_equal(variables_of(new), variables_of(pretrained))
  # Everything else is that of a new state, in the same shardings.
  assert_equal((new.step, new.opt_state), (state.step, state.opt_state))
  assert jax.tree.map(lambda x: x.sharding, new) == jax.tree.map(
    lambda x: x.sharding, state
  )
  assert new.params["body"]["kernel"].sharding.spec == P(None, "model")
  assert len(report.loaded) == 8 and not report.kept
  groups = {path.partition("/")[0] for path in report.unused}
  has_state = save in (save_ours, save_manager)
  assert groups == ({"step", "opt_state"} if has_state else set())


def test_step_of_a_directory(tmp_path, pretrained):
  path = save_ours(tmp_path, pretrained)
  new, report = fs.checkpoint.init_from(make(seed=2), path, step=3)
  assert_equal(new.params, make().params)
  assert report.path.endswith("checkpoints/3")
  with pytest.raises(ValueError, match=r"\[3, 7\]"):
    fs.checkpoint.init_from(make(), path, step=4)


def save_tree(path, tree):
  (path / "tree").write_bytes(serialization.to_bytes(tree))
  return path / "tree"


def numbers(*shape, dtype=np.float32):
  return np.arange(1, np.prod(shape) + 1, dtype=dtype).reshape(shape)


W, V = numbers(8, 16), numbers(4, 4, 8)


@pytest.mark.parametrize(
  ("saved", "kwargs", "wanted", "unused"),
  [
    ({"a": W}, {"rename": [("a", "b"), ("b$", "x")]}, {"x": W}, ()),
    ({"a": W, "b": V}, {"ignore": ["b"]}, {"a": W}, ("b",)),
    # The kept path exists in the file too: it needs no `ignore`.
    ({"a": W, "b": V}, {"keep": ["b"]}, {"a": W, "b": 0 * W}, ("b",)),
    ({"a": {"b": {"c": W}}, "d": V}, {"subtree": "a/b"}, {"c": W}, ()),
    ({"a": {"b/c": {"d": W}}}, {"subtree": "/a/b/c"}, {"d": W}, ()),
    # No box of NNX.
    ({"params": {"value": W}}, {}, {"value": W}, ()),
    ({"a": W}, {"transpose": [("a", (1, 0))]}, {"a": W.T}, ()),
    # The first pattern counts.
    (
      {"a": W, "b": W},
      {"transpose": [("a", (0, 1)), (".", (1, 0))]},
      {"a": W, "b": W.T},
      (),
    ),
    ({"a": W}, {"reshape": ["a"]}, {"a": W.reshape(8, 4, 4)}, ()),
    (
      {"a": V},
      {"transpose": [("a", (1, 2, 0))], "reshape": ["a"]},
      {"a": V.transpose(1, 2, 0).reshape(32, 4)},
      (),
    ),
    ({"a": W.astype(np.float16)}, {}, {"a": W}, ()),
    (
      {"a": W + 1 / 256},
      {"cast": True},
      {"a": (W + 1 / 256).astype(jnp.bfloat16)},
      (),
    ),
  ],
)
def test_parameters_are_renamed_and_changed(
  saved, kwargs, wanted, unused, tmp_path
):
  axes = ("model", "replica")

  def zeros(x):
    spec = P(*axes[: x.ndim])
    return jax.device_put(0 * x, jax.sharding.NamedSharding(MESH, spec))

  params = jax.tree.map(zeros, wanted)
  new, report = fs.checkpoint.init_from(
    params, save_tree(tmp_path, saved), **kwargs
  )
  assert_equal(new, wanted)
  for x, y in zip(jax.tree.leaves(new), jax.tree.leaves(params), strict=True):
    assert (x.dtype, x.sharding) == (y.dtype, y.sharding)
  assert report.unused == unused
  assert report.kept == (("b",) if "keep" in kwargs else ())
  assert all(path in str(report) for path in (*report.kept, *unused))


def test_nnx_checkpoint(tmp_path):
  class Module(nnx.Module):
    def __init__(self, rngs):
      self.linear = nnx.Linear(8, 4, rngs=rngs)
      self.norm = nnx.BatchNorm(4, rngs=rngs)
      self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
      return self.dropout(self.norm(self.linear(x)))

  trained = Module(nnx.Rngs(1))
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(
      tmp_path / "a", nnx.state(trained, (nnx.Param, nnx.BatchStat))
    )
  state = make(model=lambda rngs: Module(rngs))
  new, report = fs.checkpoint.init_from(state, tmp_path / "a")
  np.testing.assert_array_equal(
    new.params["linear"]["kernel"], trained.linear.kernel[...]
  )
  assert len(report.loaded) == 6
  # A module's own state is a tree of parameters.
  params = nnx.state(Module(nnx.Rngs(2)), nnx.Param)
  params, _ = fs.checkpoint.init_from(
    params, tmp_path / "a", ignore=["mean", "var"]
  )
  np.testing.assert_array_equal(
    jax.tree.leaves(params["linear"])[0], trained.linear.bias[...]
  )


def test_copies_in_wrapper_states_are_those_of_the_new_parameters(
  tmp_path, pretrained
):
  state = make(strategy=STRATEGY, wrappers=[fs.AGN()])
  new, _ = fs.checkpoint.init_from(state, save_bytes(tmp_path, pretrained))
  wanted = fs.TrainState.create(
    apply_fn=None,
    params=new.params,
    tx=new.tx,
    wrappers=new.wrappers,
    strategy=STRATEGY,
    batch_stats=new.batch_stats,
  )
  assert_equal(new.wrapper_states, wanted.wrapper_states)


FILE = {"body": {"kernel": W}, "head": {"kernel": numbers(16, 4)}}


@pytest.mark.parametrize(
  ("kwargs", "error", "facts"),
  [
    ({"keep": ["hed/"]}, ValueError, ["keep[0]", "'head'"]),
    ({"ignore": ["bod/"]}, ValueError, ["ignore[0]", "'body'"]),
    ({"rename": [("bodi", "x")]}, ValueError, ["rename[0]", "'body'"]),
    (
      {"rename": [("^body/", "stem/")]},
      ValueError,
      ["lacks 1", "body/kernel (8, 16)", "stem/kernel"],
    ),
    ({"rename": [("body", "head")]}, ValueError, ["same path"]),
    ({"ignore": ["^head/"]}, ValueError, ["head/kernel (16, 4)"]),
    ({"keep": [".*"]}, ValueError, ["all parameters"]),
    ({"transpose": [("kernel", (0, 1, 2))]}, ValueError, ["(8, 16)"]),
    ({"transpose": [("kernel", (0, 2))]}, ValueError, ["transpose[0]"]),
    ({"transpose": [("kernel", ("a", 1))]}, ValueError, ["transpose[0]"]),
    ({"transpose": [("body", (1, 0))]}, ValueError, ["(16, 8)", "(8, 16)"]),
    ({"reshape": ["kernal"]}, ValueError, ["reshape[0]", "'kernel'"]),
    ({"keep": "head"}, TypeError, ["keep", "'head'"]),
    ({"keep": ["("]}, ValueError, ["keep[0]", "'('"]),
    ({"rename": ["a"]}, TypeError, ["rename", "pairs"]),
    ({"subtree": "a/c"}, ValueError, ["subtree='a/c'", "body, head"]),
    ({"path": "/tmp/no/such/path"}, ValueError, ["no such path"]),
    ({"path": None}, TypeError, ["NoneType"]),
    # As many dimensions in another order are a forgotten transposition.
    (
      {"state": {"body": {"kernel": W.T}}, "ignore": ["head"]}
      | {"reshape": ["body"]},
      ValueError,
      ["body/kernel ", "(8, 16)", "(16, 8)"],
    ),
    # Statistics that the model does not have are not dropped silently.
    (
      {"path": lambda path: save_bytes(path, make()), "state": make().params},
      ValueError,
      ["lacks 2", "batch_stats/norm"],
    ),
    (
      {"state": {"body": {"kernel": W.astype(jnp.bfloat16)}}}
      | {"ignore": ["head"]},
      ValueError,
      ["bfloat16", "float32", "cast=True"],
    ),
  ],
)
def test_mistakes(kwargs, error, facts, tmp_path):
  kwargs = {"state": FILE, "path": lambda path: save_tree(path, FILE), **kwargs}
  state = jax.tree.map(jnp.asarray, kwargs.pop("state"))
  path = kwargs.pop("path")
  with pytest.raises(error) as e:
    path = path(tmp_path) if callable(path) else path
    fs.checkpoint.init_from(state, path, **kwargs)
  for fact in facts:
    assert fact in str(e.value)


@pytest.mark.parametrize(
  ("name", "content", "facts"),
  [
    ("a.safetensors", {"a.b": np.ones(2), "a/b": np.ones(2)}, ["slashes"]),
    ("a.safetensors", {}, ["no arrays"]),
    ("pytorch_model.bin", b"PK", ["pytorch_model.bin", "Flax"]),
    (
      "a.safetensors.index.json",
      b'{"weight_map": {"a": "b.safetensors"}}',
      ["b.safetensors", "index"],
    ),
    ("a.safetensors.index.json", b'{"weight_map": 1}', ["index"]),
    ("c.safetensors", b"no tensors", ["c.safetensors"]),
  ],
)
def test_files_that_cannot_be_read(name, content, facts, tmp_path):
  if isinstance(content, dict):
    content = safetensors_numpy.save(content)
  (tmp_path / name).write_bytes(content)
  with pytest.raises(ValueError) as e:
    fs.checkpoint.init_from({"a": jnp.ones(2)}, tmp_path / name)
  for fact in facts:
    assert fact in str(e.value)


# Two processes, and a bucket.


def save_dense(folder):
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


@pytest.mark.slow
def test_two_processes_read_their_parts(tmp_path):
  (tmp_path / "run").mkdir()
  np.save(tmp_path / "kernel.npy", save_dense(tmp_path)["kernel"])
  for output, _ in two_processes.run(_SCRIPT, str(tmp_path)):
    assert "error" in output and "missing" in output


@pytest.mark.slow
def test_bucket(servers):
  folder = f"gs://{bucket_servers.BUCKET}/pretrained"
  params = save_dense(folder)
  for name in ("run", "a.safetensors", "a.msgpack"):
    zeros = jax.tree.map(jnp.zeros_like, params)
    read, report = fs.checkpoint.init_from(zeros, f"{folder}/{name}")
    assert_equal(read, params)
    assert report.path.startswith(folder)
