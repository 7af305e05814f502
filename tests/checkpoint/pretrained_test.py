"""`init_from` reads parameters of any format into a new state."""

import functools
import json

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
import plain_states
import pytest
from safetensors import numpy as safetensors_numpy
from tree_equality import assert_trees_equal
import two_processes

import flaxshard as fs
from flaxshard.core import trees

P = jax.sharding.PartitionSpec
STRATEGY = fs.Strategy(mesh_shape={"replica": 4, "model": 2})
MESH = STRATEGY.mesh
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


@functools.cache
def make(seed=0, model=NET, **kwargs):
  return fs.create_train_state(
    model, jax.random.key(seed), X, optax.adam(0.1), **kwargs
  )


@pytest.fixture(scope="module")
def pretrained():
  """A state that differs from a new one in every array."""
  return plain_states.changed(make(seed=1))


def variables_of(state):
  return {"params": state.params, "batch_stats": state.batch_stats}


def save_ours(path, state):
  with fs.Checkpointer(path / "checkpoints") as checkpointer:
    checkpointer.save(3, make())
    checkpointer.save(7, state)
  return path


def save_bytes(path, state):
  file = path / "model.msgpack"
  file.write_bytes(serialization.to_bytes(variables_of(state)))
  return file


def save_safetensors(path, state):
  file_of = {}
  for name, tree in variables_of(state).items():
    leaves = trees.leaves_by_path({name: tree}).items()
    tensors = {".".join(key): np.asarray(x) for key, x in leaves}
    safetensors_numpy.save_file(tensors, path / f"{name}.safetensors")
    file_of |= dict.fromkeys(tensors, f"{name}.safetensors")
  index = json.dumps({"metadata": {}, "weight_map": file_of})
  (path / "model.safetensors.index.json").write_text(index)
  return path


SLOW_BYTES = pytest.param(save_bytes, marks=pytest.mark.slow)


@pytest.mark.parametrize("save", [SLOW_BYTES, save_safetensors, save_ours])
def test_formats(save, tmp_path, pretrained):
  path = save(tmp_path, pretrained)
  state = make(strategy=STRATEGY, rules=RULES, wrappers=(fs.AGN(),))
  new, report = fs.checkpoint.init_from(state, path)
  assert_trees_equal(variables_of(new), variables_of(pretrained))
  # Everything else is that of a new state, in the same shardings: the copies in
  # states of wrappers are those of the new parameters.
  wanted = fs.TrainState.create(
    **{name: getattr(state, name) for name in ("apply_fn", "tx", "wrappers")},
    strategy=STRATEGY,
    **variables_of(new),
  )
  assert_trees_equal(new, wanted)
  shardings = lambda tree: jax.tree.map(lambda x: x.sharding, tree)
  assert shardings(new) == shardings(state)
  assert new.params["body"]["kernel"].sharding.spec == P(None, "model")
  assert len(report.loaded) == 8 and not report.kept
  groups = {path.partition("/")[0] for path in report.unused}
  assert groups == ({"step", "opt_state"} if save is save_ours else set())


def test_step_of_a_directory(tmp_path, pretrained):
  path = save_ours(tmp_path, pretrained)
  new, report = fs.checkpoint.init_from(make(seed=2), path, step=3)
  assert_trees_equal(new.params, make().params)
  assert report.path.endswith("checkpoints/3")


def save_tree(path, tree):
  (path / "tree").write_bytes(serialization.to_bytes(tree))
  return path / "tree"


def numbers(*shape, dtype=np.float32):
  return np.arange(1, np.prod(shape) + 1, dtype=dtype).reshape(shape)


W, V = numbers(8, 16), numbers(4, 4, 8)


RENAMED = {"rename": [("a/v$", "a/value")]}
# The first pattern counts.
TURNED = {"transpose": [("a", (0, 1)), (".", (1, 0))]}


@pytest.mark.parametrize(
  ("saved", "kwargs", "wanted"),
  [
    ({"a": W}, {"rename": [("a", "b"), ("b$", "x")]}, {"x": W}),
    ({"a": W, "b": V}, {"ignore": ["b"]}, {"a": W}),
    # The kept path exists in the file too: it needs no `ignore`.
    ({"a": W, "b": V}, {"keep": ["b"]}, {"a": W, "b": 0 * W}),
    ({"a": {"b": {"c": W}}, "d": V}, {"subtree": "a/b"}, {"c": W}),
    ({"a": {"b/c": {"d": W}}}, {"subtree": "/a/b/c"}, {"d": W}),
    # No box of NNX.
    ({"params": {"value": W}}, {}, {"value": W}),
    ({"a": {"v": W, "w": V}}, RENAMED, {"a": {"value": W, "w": V}}),
    ({"a": W}, {"transpose": [("a", (1, 0))]}, {"a": W.T}),
    ({"a": W, "b": W}, TURNED, {"a": W, "b": W.T}),
    ({"a": W}, {"reshape": ["a"]}, {"a": W.reshape(8, 4, 4)}),
    (
      {"a": V},
      {"transpose": [("a", (1, 2, 0))], "reshape": ["a"]},
      {"a": V.transpose(1, 2, 0).reshape(32, 4)},
    ),
    ({"a": W.astype(np.float16)}, {}, {"a": W}),
    ({"a": W / 3}, {"cast": True}, {"a": (W / 3).astype(jnp.bfloat16)}),
  ],
)
def test_parameters_are_renamed_and_changed(saved, kwargs, wanted, tmp_path):
  axes = ("model", "replica")

  def zeros(x):
    spec = P(*axes[: x.ndim])
    return jax.device_put(0 * x, jax.sharding.NamedSharding(MESH, spec))

  params = jax.tree.map(zeros, wanted)
  new, report = fs.checkpoint.init_from(
    params, save_tree(tmp_path, saved), **kwargs
  )
  assert_trees_equal(new, wanted)
  for x, y in zip(jax.tree.leaves(new), jax.tree.leaves(params), strict=True):
    assert (x.dtype, x.sharding) == (y.dtype, y.sharding)
  is_kept, is_ignored = "keep" in kwargs, "ignore" in kwargs
  assert report.unused == ("b",) * (is_kept or is_ignored)
  assert report.kept == ("b",) * is_kept
  assert all(path in str(report) for path in (*report.kept, *report.unused))


def test_parameters_without_a_sharding(tmp_path):
  wanted = {"a": W, "b": W.astype(np.float16)}
  path = save_tree(tmp_path, {"a": W, "b": W})
  for params in (wanted, jax.eval_shape(lambda: wanted)):
    new, _ = fs.checkpoint.init_from(params, path, cast=True)
    assert_trees_equal(new, wanted)
    assert all(isinstance(x, jax.Array) for x in new.values())


class Module(nnx.Module):
  def __init__(self, rngs):
    self.linear = nnx.Linear(8, 4, rngs=rngs)
    self.norm = nnx.BatchNorm(4, rngs=rngs)
    self.dropout = nnx.Dropout(0.1, rngs=rngs)


def test_nnx_checkpoint(tmp_path):
  trained = nnx.state(Module(nnx.Rngs(1)), (nnx.Param, nnx.BatchStat))
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "a", trained)
  wanted = nnx.to_pure_dict(trained)["linear"]
  state = make(model=Module(nnx.Rngs(2)))
  new, report = fs.checkpoint.init_from(state, tmp_path / "a")
  assert_trees_equal(new.params["linear"], wanted)
  assert len(report.loaded) == 6
  # A module's own state is a tree of parameters.
  params, _ = fs.checkpoint.init_from(
    nnx.state(Module(nnx.Rngs(2)), nnx.Param),
    tmp_path / "a",
    ignore=["mean", "var"],
  )
  assert_trees_equal(nnx.to_pure_dict(params)["linear"], wanted)


FILE = {"body": {"kernel": W}, "head": {"kernel": numbers(16, 4)}}


def read_file(path=None, state=FILE, **kwargs):
  """Returns a call that reads `FILE` into a state."""

  def call(folder):
    tree = jax.tree.map(jnp.asarray, state)
    fs.checkpoint.init_from(tree, path or save_tree(folder, FILE), **kwargs)

  return call


def read_body(kernel, **kwargs):
  return read_file(
    state={"body": {"kernel": kernel}}, ignore=["head"], **kwargs
  )


def read_bytes(name, content, **kwargs):
  def call(folder):
    (folder / name).write_bytes(content)
    fs.checkpoint.init_from({"a": jnp.ones(2)}, folder / name, **kwargs)

  return call


def read_numbers(*values):
  content = serialization.to_bytes({"a": np.array(values)})
  return read_bytes("a.msgpack", content, cast=True)


def read_variables_into_parameters(folder):
  fs.checkpoint.init_from(make().params, save_bytes(folder, make()))


TURN, TINY = [("body", (1, 0))], jnp.float8_e4m3b11fnuz
INDEX = b'{"weight_map": {"a": "b.safetensors"}}'
SLASHES = serialization.to_bytes({"a": {"b": np.ones(2)}, "a/b": np.ones(2)})
DOTS = safetensors_numpy.save({"a.b": np.ones(2), "a/b": np.ones(2)})

MISTAKES = [
  # Patterns.
  (read_file(keep=["hed/"]), ValueError, r"keep\[0\].*'head'"),
  (read_file(ignore=["bod/"]), ValueError, r"ignore\[0\].*'body'"),
  (read_file(rename=[("bodi", "x")]), ValueError, r"rename\[0\].*'body'"),
  (read_file(rename=[("body", "head")]), ValueError, "the same path"),
  (read_file(rename=["a"]), TypeError, "rename.* pairs"),
  (read_file(reshape=["kernal"]), ValueError, r"reshape\[0\].*'kernel'"),
  (read_file(keep=[".*"]), ValueError, "all parameters"),
  (read_file(keep="head"), TypeError, "keep.*'head'"),
  (read_file(keep=["("]), ValueError, r"keep\[0\].*'\('"),
  # Arrays.
  (read_file(rename=[("^body", "stem")]), ValueError, "lacks 1 .*stem/kernel"),
  (read_file(ignore=["^head/"]), ValueError, r"head/kernel \(16, 4\)"),
  (read_file(transpose=[("body", (0, 2))]), ValueError, r"transpose\[0\]"),
  (read_file(transpose=TURN), ValueError, r"\(16, 8\) .*\(8, 16\)"),
  # As many dimensions in another order are a forgotten transposition.
  (read_body(W.T, reshape=["body"]), ValueError, r"\(8, 16\) .*\(16, 8\)"),
  (read_body(W.astype(jnp.bfloat16)), ValueError, "float32.*bf.* cast=True"),
  (read_body(W.astype(TINY), cast=True), ValueError, "body/kernel .*float8"),
  (read_body(W.astype(np.int8), cast=True), ValueError, "body/kernel .*int8"),
  (read_numbers(1e300, 2.0), ValueError, "a has .*float32"),
  (read_numbers(1j, 2.0), ValueError, "a is complex128 .*float32"),
  (read_numbers(2**40, 2), ValueError, "a is int64 .* 1099511627776"),
  # Statistics that the model does not have are not dropped silently.
  (read_variables_into_parameters, ValueError, "lacks 2 .*batch_stats/norm"),
  # Files.
  (read_file(subtree="a/c"), ValueError, "subtree='a/c'.* body, head"),
  (read_file(path="/tmp/no/such/path"), ValueError, "no such path"),
  (read_bytes("a.safetensors", DOTS), ValueError, "slashes"),
  (read_bytes("a.msgpack", SLASHES), ValueError, "a.msgpack: .*path 'a/b'"),
  (read_bytes("a.safetensors", b"none"), ValueError, "a.safetensors cannot"),
  (read_bytes("a.safetensors.index.json", INDEX), ValueError, "index.*b.safe"),
  (read_bytes("model.bin", b"PK"), ValueError, "model.bin is no checkpoint of"),
]


@pytest.mark.parametrize(("call", "error", "words"), MISTAKES)
def test_mistakes(call, error, words, tmp_path):
  with pytest.raises(error, match=words):
    call(tmp_path)


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
def test_two_processes_read_their_parts(programs, tmp_path):
  (tmp_path / "run").mkdir()
  np.save(tmp_path / "kernel.npy", save_dense(tmp_path)["kernel"])
  for output in two_processes.run(programs, _SCRIPT, str(tmp_path)):
    assert "error" in output and "missing" in output


@pytest.mark.slow
def test_bucket(servers):
  folder = f"gs://{bucket_servers.BUCKET}/pretrained"
  params = save_dense(folder)
  for name in ("run", "a.safetensors", "a.msgpack"):
    zeros = jax.tree.map(jnp.zeros_like, params)
    read, report = fs.checkpoint.init_from(zeros, f"{folder}/{name}")
    assert_trees_equal(read, params)
    assert report.path.startswith(folder)
