"""`init_from` reads parameters of any format into a new state."""

import json
import types

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

import flaxshard as fs

P = jax.sharding.PartitionSpec
MESH = jax.sharding.Mesh(
  np.array(jax.devices()).reshape(4, 2), ("replica", "model")
)
STRATEGY = types.SimpleNamespace(mesh=MESH)
RULES = (("body/kernel", P(None, "model")),)
X = np.ones((2, 8), np.float32)


class Net(nn.Module):
  """A body, a norm with statistics, and a head."""

  classes: int = 4
  head: str = "head"

  @nn.compact
  def __call__(self, x, train=False):
    x = nn.BatchNorm(use_running_average=not train, name="norm")(
      nn.Dense(16, name="body")(x)
    )
    return nn.Dense(self.classes, name=self.head)(x)


def make(seed=0, model=None, **kwargs):
  model = Net() if model is None else model
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


def plain(state):
  """Returns the fields that a plain Flax program saves."""
  return {
    "step": state.step,
    "params": state.params,
    "opt_state": state.opt_state,
    "batch_stats": state.batch_stats,
  }


def variables_of(state):
  return {"params": state.params, "batch_stats": state.batch_stats}


def flat(state, separator):
  leaves = jax.tree_util.tree_leaves_with_path(variables_of(state))
  return {
    jax.tree_util.keystr(path, simple=True, separator=separator): np.asarray(x)
    for path, x in leaves
  }


def save_ours(path, state):
  with fs.Checkpointer(path / "checkpoints") as checkpointer:
    checkpointer.save(3, make())
    checkpointer.save(7, state)
  return path


def save_manager(path, state):
  with ocp.CheckpointManager(path) as manager:
    manager.save(7, args=ocp.args.StandardSave(plain(state)))
  return path


def save_bytes(path, state):
  file = path / "model.msgpack"
  file.write_bytes(serialization.to_bytes(variables_of(state)))
  return file


def save_safetensors(path, state):
  file = path / "model.safetensors"
  safetensors_numpy.save_file(flat(state, "/"), file)
  return file


def save_several_safetensors(path, state):
  tensors = flat(state, ".")
  names = sorted(tensors)
  parts = {"a.safetensors": names[:3], "b.safetensors": names[3:]}
  for name, keys in parts.items():
    safetensors_numpy.save_file({k: tensors[k] for k in keys}, path / name)
  index = {k: name for name, keys in parts.items() for k in keys}
  (path / "model.safetensors.index.json").write_text(
    json.dumps({"metadata": {}, "weight_map": index})
  )
  return path


SAVES = [
  save_bytes,
  save_several_safetensors,
  *(
    pytest.param(save, marks=pytest.mark.slow)
    for save in (
      save_ours,
      save_manager,
      save_safetensors,
    )
  ),
]


def assert_equal(tree, wanted):
  jax.tree.map(np.testing.assert_array_equal, tree, wanted)


@pytest.mark.parametrize("save", SAVES)
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
  new, report = fs.checkpoint.init_from(make(seed=2), path)
  assert_equal(variables_of(new), variables_of(pretrained))
  assert {"step", "opt_state/0/count"} <= set(report.unused)
  with pytest.raises(ValueError, match=r"\[3, 7\]"):
    fs.checkpoint.init_from(make(), path, step=4)


def test_partial_and_renamed(tmp_path, pretrained):
  path = save_bytes(tmp_path, pretrained)
  state = make(model=Net(classes=9, head="classifier"))
  new, report = fs.checkpoint.init_from(
    state,
    path,
    rename=[("^body/", "body/")],
    keep=["^classifier/"],
    ignore=["^head/"],
  )
  assert_equal(new.params["body"], pretrained.params["body"])
  assert_equal(new.params["classifier"], state.params["classifier"])
  assert report.kept == ("classifier/bias", "classifier/kernel")
  assert report.unused == ("params/head/bias", "params/head/kernel")
  assert "classifier/bias" in str(report) and "head/kernel" in str(report)
  # The kept paths exist in the file too: they need no `ignore`.
  new, report = fs.checkpoint.init_from(
    make(model=Net(classes=9)), path, keep=["^head/"]
  )
  assert report.kept == ("head/bias", "head/kernel")
  # A part of a file.
  part = tmp_path / "part.msgpack"
  part.write_bytes(
    serialization.to_bytes({"a": {"b": variables_of(pretrained)}})
  )
  new, _ = fs.checkpoint.init_from(make(), part, subtree="a/b")
  assert_equal(variables_of(new), variables_of(pretrained))
  with pytest.raises(ValueError, match=r"subtree='a/c' .* has a"):
    fs.checkpoint.init_from(make(), part, subtree="a/c")
  # The head under its new name.
  new, report = fs.checkpoint.init_from(
    make(model=Net(head="classifier")), path, rename=[("^head", "classifier")]
  )
  assert report.loaded["classifier/bias"] == "params/head/bias"
  assert_equal(new.params["classifier"], pretrained.params["head"])


def test_other_dtypes_and_dimensions(tmp_path):
  file = tmp_path / "torch.safetensors"
  weight = np.arange(128, dtype=np.float32).reshape(16, 8)
  tensors = {
    "body.weight": weight.astype(jnp.bfloat16),
    "body.bias": np.ones(16, np.float16),
  }
  safetensors_numpy.save_file(tensors, file)
  state = make(
    model=nn.Sequential([nn.Dense(16)]),
    strategy=STRATEGY,
    rules=(("kernel", P("model", "replica")),),
  )
  rename = [("body", "layers_0"), ("weight", "kernel")]
  new, _ = fs.checkpoint.init_from(
    state, file, rename=rename, transpose=[("kernel$", (1, 0))]
  )
  kernel = new.params["layers_0"]["kernel"]
  np.testing.assert_array_equal(kernel, weight.T)
  assert kernel.dtype == jnp.float32
  assert kernel.sharding == state.params["layers_0"]["kernel"].sharding
  with pytest.raises(ValueError, match=r"\(16, 8\).*\(8, 16\).*transpose"):
    fs.checkpoint.init_from(state, file, rename=rename)

  half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), new.params)
  tree = {
    "layers_0": {
      "kernel": weight.T + 1 / 256,
      "bias": np.ones(16, jnp.bfloat16),
    }
  }
  narrow = tmp_path / "model.msgpack"
  narrow.write_bytes(serialization.to_bytes(tree))
  with pytest.raises(ValueError, match=r"bfloat16.*cast=True"):
    fs.checkpoint.init_from(half, narrow)
  cast, _ = fs.checkpoint.init_from(half, narrow, cast=True)
  assert cast["layers_0"]["kernel"].dtype == jnp.bfloat16


def test_other_numbers_of_dimensions(tmp_path):
  weight = np.arange(64, dtype=np.float32).reshape(8, 8)
  file = tmp_path / "torch.safetensors"
  names = ("query", "out", "convolution")
  tensors = {f"encoder.layer.0.self.{name}.weight": weight for name in names}
  tensors["encoder.layer.0.self.convolution.weight"] = weight.reshape(8, 2, 4)
  safetensors_numpy.save_file(tensors, file)
  shapes = {"query": (8, 4, 2), "out": (4, 2, 8), "convolution": (8, 8)}
  specs = {
    "query": P("model", "replica"),
    "out": P("replica", "model"),
    "convolution": P(("replica", "model")),
  }
  params = {
    "block0": {
      name: jax.device_put(
        np.zeros(shapes[name], np.float32),
        jax.sharding.NamedSharding(MESH, specs[name]),
      )
      for name in names
    }
  }
  kwargs = dict(
    rename=[(r"^encoder/layer/(\d+)/self/(\w+)/weight", r"block\1/\2")],
    transpose=[("query|out", (1, 0)), ("convolution", (1, 2, 0))],
  )
  new, _ = fs.checkpoint.init_from(params, file, reshape=["block"], **kwargs)
  for name in names:
    wanted = weight.reshape(8, -1).T.reshape(shapes[name])
    np.testing.assert_array_equal(new["block0"][name], wanted)
    assert new["block0"][name].sharding == params["block0"][name].sharding
  with pytest.raises(ValueError, match=r"\(2, 4, 8\).*\(8, 8\).*reshape"):
    fs.checkpoint.init_from(params, file, **kwargs)
  # As many dimensions in another order are a forgotten transposition.
  with pytest.raises(ValueError, match=r"\(2, 32\).*\(32, 2\).*transpose"):
    safetensors_numpy.save_file({"x": np.ones((2, 32))}, file)
    fs.checkpoint.init_from({"x": jnp.ones((32, 2))}, file, reshape=["x"])


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


@pytest.mark.parametrize(
  ("kwargs", "error", "facts"),
  [
    ({"keep": ["hed/"]}, ValueError, ["keep[0]", "'head'"]),
    ({"ignore": ["bod/"]}, ValueError, ["ignore[0]", "'body'"]),
    ({"rename": [("bodi", "x")]}, ValueError, ["rename[0]", "'body'"]),
    (
      {"rename": [("^body/", "stem/")]},
      ValueError,
      ["lacks 2", "body/kernel (8, 16)", "stem/kernel", "ignore"],
    ),
    ({"rename": [("body", "head")]}, ValueError, ["same path"]),
    ({"ignore": ["^head/"]}, ValueError, ["head/kernel (16, 4)", "keep"]),
    ({"keep": [".*"]}, ValueError, ["all parameters"]),
    ({"transpose": [("kernel", (0, 1, 2))]}, ValueError, ["(8, 16)"]),
    ({"transpose": [("kernel", (0, 2))]}, ValueError, ["transpose[0]"]),
    ({"transpose": [("kernel", ("a", 1))]}, ValueError, ["transpose[0]"]),
    ({"reshape": ["kernal"]}, ValueError, ["reshape[0]", "'kernel'"]),
    ({"keep": "head"}, TypeError, ["keep", "'head'"]),
    ({"keep": ["("]}, ValueError, ["keep[0]", "'('"]),
    ({"rename": ["a"]}, TypeError, ["rename", "pairs"]),
    ({"cast": 1}, TypeError, ["cast"]),
    ({"path": "/tmp/no/such/path"}, ValueError, ["no such path"]),
    ({"path": None}, TypeError, ["path"]),
    (
      {"state": lambda: make(model=Net(classes=5))},
      ValueError,
      ["head/bias ", "(4,)", "(5,)", "keep"],
    ),
    # Statistics that the model does not have are not dropped silently.
    (
      {"state": lambda: make().params},
      ValueError,
      ["lacks 2", "batch_stats/norm"],
    ),
  ],
)
def test_mistakes(kwargs, error, facts, tmp_path, pretrained):
  kwargs = {
    "state": make,
    "path": save_bytes(tmp_path, pretrained),
    **kwargs,
  }
  state = kwargs.pop("state")()
  with pytest.raises(error) as e:
    fs.checkpoint.init_from(state, **kwargs)
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
