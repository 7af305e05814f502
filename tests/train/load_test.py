"""Runs that are used: fs.load and fs.export."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

from flax import linen as nn
from flax import nnx
import jax
from jax import export as jax_export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors import flax as safetensors_flax
import tiny
import tree_equality

import flaxshard as fs
from flaxshard import data
from flaxshard import train


class Normalized(nnx.Module):
  """Has batch statistics, keys of random streams and bfloat16 parameters."""

  def __init__(self, num_classes, rngs):
    self.norm = nnx.BatchNorm(64, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)
    self.linear = nnx.Linear(
      64, num_classes, param_dtype=jnp.bfloat16, rngs=rngs
    )

  def __call__(self, x):
    x = self.norm(x.reshape(x.shape[0], -1))
    return self.linear(self.dropout(x)).astype(jnp.float32)


class Pairs(nn.Module):
  """Works for an even number of examples only."""

  num_classes: int

  @nn.compact
  def __call__(self, x, train):
    if x.shape[0] > 1:
      x = x.reshape(x.shape[0] // 2, 2, -1).reshape(x.shape[0], -1)
    return nn.Dense(self.num_classes)(x.reshape(x.shape[0], -1))


def digits_from_disk() -> data.Splits:
  """Returns the digits; a test removes it, as where they are not on disk."""
  return data.digits()


def images(count=3) -> np.ndarray:
  return data.digits().eval.inputs[:count]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A run with checkpoints of steps 4 and 8: its workdir and final state."""
  workdir = str(tmp_path_factory.mktemp("run"))
  config = tiny.config(
    model={"name": f"{__name__}:Normalized"},
    data={"name": f"{__name__}:digits_from_disk"},
    mesh={"replica": 2},
    precision="float32",
    wrappers=(("ema", {"decay": 0.5}),),
    best_metric="eval_loss",
  )
  return workdir, train.train_and_evaluate(config, workdir)


@pytest.fixture
def copy(run, tmp_path):
  """A copy of the workdir, to be changed."""
  path = str(tmp_path / "run")
  shutil.copytree(run[0], path)
  return path


def expected_logits(state, x):
  """Returns the logits of EMA's averages, with the running statistics."""
  params, stats = state.eval_params, state.batch_stats["norm"]
  params, stats = jax.tree.map(np.float32, (params, stats))
  x = (x.reshape(len(x), -1) - stats["mean"]) / np.sqrt(stats["var"] + 1e-5)
  x = x * params["norm"]["scale"] + params["norm"]["bias"]
  return x @ params["linear"]["kernel"] + params["linear"]["bias"]


def assert_predicts(predict, state, count=3):
  np.testing.assert_allclose(
    predict({"inputs": images(count)}),
    expected_logits(state, images(count)),
    rtol=1e-4,
    atol=1e-5,
  )


# fs.load


def test_a_run_is_loaded_without_its_data(run, monkeypatch):
  workdir, state = run
  monkeypatch.delattr(f"{__name__}.digits_from_disk")
  loaded = fs.load(workdir)
  assert loaded.step == int(loaded.state.step) == 8
  tree_equality.assert_trees_equal(loaded.state.params, state.params)
  tree_equality.assert_trees_equal(loaded.state.opt_state, state.opt_state)
  tree_equality.assert_trees_equal(loaded.params, state.eval_params)
  assert loaded.config.model.name == f"{__name__}:Normalized"
  assert loaded.task.name == "Classification"
  assert loaded.example["inputs"].shape == (8, 8, 1)
  assert loaded.strategy.num_replicas_in_sync == 2
  assert_predicts(loaded.predict, state)
  with pytest.raises(TypeError, match=r"ndarray.* not a mapping"):
    loaded.predict(images(1))


def test_the_step_can_be_chosen(run):
  workdir, _ = run
  losses = {row["step"]: row.get("eval_loss") for row in tiny.rows(workdir)}
  assert fs.load(workdir, 4).step == 4
  assert fs.load(workdir, "best").step == min((4, 8), key=losses.get)
  mistakes = {5: r"step 5 .*\[4, 8\]", "bets": "step, if not 'best', must be"}
  for step, words in mistakes.items():
    with pytest.raises(ValueError, match=words):
      fs.load(workdir, step)


def test_a_run_is_loaded_on_other_devices(run):
  workdir, state = run
  strategy = fs.Strategy(
    devices=jax.devices()[:4], mesh_shape={"replica": 1, "model": 4}
  )
  rules = (("linear/kernel", ("model", None)),)
  loaded = fs.load(workdir, strategy=strategy, rules=rules)
  kernel = loaded.state.params["linear"]["kernel"]
  assert kernel.sharding.spec[0] == "model"
  assert kernel.sharding.mesh.size == 4
  tree_equality.assert_trees_equal(loaded.state.params, state.params)
  assert_predicts(loaded.predict, state)


def test_a_damaged_latest_checkpoint_is_passed_over(copy, caplog):
  shutil.rmtree(os.path.join(copy, "checkpoints", "8", "default"))
  assert fs.load(copy).step == 4
  assert "step 8 is damaged" in caplog.text


@pytest.mark.parametrize(
  ("fields", "fact"),
  [
    ({"bach_size": 3}, "config.bach_size"),
    (None, "config.json is broken"),
    # A model that has changed since.
    ({"model": {"name": "cnn", "features": [], "dense": 9}}, "dense/"),
    # A task that was an object is given again.
    ({"task": "<mine.Task>"}, "'<mine.Task>' was an object: give it again as"),
  ],
)
def test_a_config_that_does_not_fit_raises(copy, fields, fact):
  path = pathlib.Path(copy, "config.json")
  values = json.loads(path.read_text())
  path.write_text("" if fields is None else json.dumps({**values, **fields}))
  with pytest.raises(ValueError) as e:
    fs.load(copy)
  assert fact in str(e.value)
  if fields and "task" in fields:
    task = fs.tasks.Classification(num_classes=10)
    assert fs.load(copy, task=task).task.task is task


# fs.export


def read(path):
  file = pathlib.Path(path, "model.stablehlo")
  function = jax_export.deserialize(bytearray(file.read_bytes()))
  variables = safetensors_flax.load_file(file.with_name("model.safetensors"))
  return function, variables


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
  """An export of the run: its folder, and the content of `model.json`."""
  path = str(tmp_path_factory.mktemp("model"))
  return path, fs.export(run[0], path)


def test_the_exported_function_predicts_like_the_run(run, exported):
  path, description = exported
  function, variables = read(path)
  for count in (1, 5):
    predict = lambda batch: function.call(variables, batch)
    assert_predicts(predict, run[1], count)
  written = pathlib.Path(path, "model.json").read_text()
  assert json.loads(written) == description
  assert description["step"] == 8
  assert description["platforms"] == ["cpu", "cuda", "tpu"]
  # Labels are not read by the prediction.
  assert description["inputs"] == {
    "inputs": {"shape": ["batch", 8, 8, 1], "dtype": "float32"}
  }
  assert description["outputs"] == {"shape": ["batch", 10], "dtype": "float32"}
  shapes = description["variables"]
  kernel = {"shape": [64, 10], "dtype": "bfloat16"}
  assert shapes["params/linear/kernel"] == kernel
  assert {"batch_stats/norm/mean", "params/norm/scale"} < set(shapes)
  for name, x in variables.items():
    assert shapes[name] == {"shape": list(x.shape), "dtype": str(x.dtype)}


def test_a_model_that_needs_a_fixed_batch_size_says_so(tmp_path):
  state = fs.create_train_state(
    Pairs(10), jax.random.key(0), images(2), optax.sgd(0.1), train=False
  )
  example = {"inputs": images(1)[0]}
  with pytest.raises(ValueError, match="example"):
    fs.export(state, tmp_path)
  with pytest.raises(ValueError, match=r"batch_size=1") as e:
    fs.export(state, tmp_path, example=example)
  assert "any number of examples" in str(e.value)
  with pytest.raises(ValueError, match=r"batch_size .*0"):
    fs.export(state, tmp_path, example=example, batch_size=0)
  description = fs.export(state, tmp_path, example=example, batch_size=4)
  assert description["outputs"]["shape"] == [4, 10]


def test_averages_and_factors_of_lora_are_merged(tmp_path):
  model = nn.Dense(2)
  state = fs.create_train_state(
    model,
    jax.random.key(0),
    jnp.ones((1, 3)),
    optax.sgd(0.5),
    wrappers=[fs.EMA(0.5)],
    lora=fs.LoRA(rank=1, patterns=("kernel",)),
  )
  for _ in range(2):
    grads = jax.tree.map(jnp.ones_like, state.params)
    state = state.apply_gradients(grads=grads)
  x = np.ones((4, 3), np.float32)
  fs.export(state, tmp_path, example={"inputs": x[0]})
  function, variables = read(tmp_path)
  assert sorted(variables) == ["params/bias", "params/kernel"]
  merged = fs.merge_lora(state.replace(params=state.eval_params))
  assert not np.allclose(
    merged["params"]["kernel"], state.frozen["kernel"], rtol=1e-4
  )
  outputs = function.call(variables, {"inputs": x})
  np.testing.assert_allclose(outputs, model.apply(merged, x), rtol=1e-5)


def test_other_platforms_and_folders_that_hold_an_export_raise(
  run, exported, tmp_path
):
  with pytest.raises(ValueError, match=r"platforms.*'cuda'.*'c'"):
    fs.export(run[0], tmp_path, platforms="cpu")
  assert not os.listdir(tmp_path)
  with pytest.raises(ValueError, match=r"model\.stablehlo"):
    fs.export(run[0], exported[0])


# Refuses to import what a program that runs the model need not have.
_PROGRAM = """
import sys

class Refuse:
  def find_spec(self, name, path=None, target=None):
    if name.split(".")[0] in ("flaxshard", "flax", "optax", "orbax", "clu"):
      raise ImportError(f"{name} is not there")

sys.meta_path.insert(0, Refuse())
import jax
from jax import export
import numpy as np
from safetensors.flax import load_file

model, inputs, outputs = sys.argv[1:]
with open(f"{model}/model.stablehlo", "rb") as f:
  exported = export.deserialize(bytearray(f.read()))
variables = load_file(f"{model}/model.safetensors")
np.save(outputs, exported.call(variables, {"inputs": np.load(inputs)}))
"""


@pytest.mark.slow
def test_a_program_without_flaxshard_runs_an_export(run, exported, tmp_path):
  inputs, outputs = (str(tmp_path / f"{name}.npy") for name in ("x", "y"))
  np.save(inputs, images(7))
  subprocess.run(
    [sys.executable, "-c", _PROGRAM, exported[0], inputs, outputs],
    check=True,
    env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    timeout=200,
  )
  assert_predicts(lambda batch: np.load(outputs), run[1], 7)
