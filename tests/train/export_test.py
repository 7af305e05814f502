"""fs.export: the files, and a program without flaxshard that runs them."""

import json
import os
import subprocess
import sys
import textwrap

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


def train_model(folder, **fields) -> str:
  """Returns the workdir of a run of two steps."""
  config = tiny.config(
    num_train_steps=2, wrappers=(), precision="float32", **fields
  )
  train.train_and_evaluate(config, str(folder))
  return str(folder)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
  """The workdir of a run of an NNX model."""
  folder = tmp_path_factory.mktemp("run")
  return train_model(
    folder, model={"name": f"{__name__}:Normalized"}, mesh={"replica": 2}
  )


@pytest.fixture(scope="module")
def exported(workdir, tmp_path_factory):
  """An export of the run: its folder, and the content of `model.json`."""
  path = str(tmp_path_factory.mktemp("model"))
  return path, fs.export(workdir, path)


def images(count) -> np.ndarray:
  return data.digits().eval.inputs[:count]


def read(path):
  with open(os.path.join(path, "model.stablehlo"), "rb") as f:
    function = jax_export.deserialize(bytearray(f.read()))
  variables = safetensors_flax.load_file(
    os.path.join(path, "model.safetensors")
  )
  return function, variables


def test_the_exported_function_predicts_like_the_run(workdir, exported):
  path, description = exported
  function, variables = read(path)
  loaded = fs.load(workdir)
  for count in (1, 5):
    np.testing.assert_allclose(
      function.call(variables, {"inputs": images(count)}),
      loaded.predict({"inputs": images(count)}),
      rtol=1e-5,
      atol=1e-6,
    )
  with open(os.path.join(path, "model.json")) as f:
    assert json.load(f) == description
  assert description["step"] == 2
  assert description["platforms"] == ["cpu", "cuda", "tpu"]
  # Labels are not read by the prediction.
  assert description["inputs"] == {
    "inputs": {"shape": ["batch", 8, 8, 1], "dtype": "float32"}
  }
  assert description["outputs"] == {"shape": ["batch", 10], "dtype": "float32"}
  shapes = description["variables"]
  assert shapes["params/linear/kernel"] == {
    "shape": [64, 10],
    "dtype": "bfloat16",
  }
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
  x = np.ones((4, 3), np.float32)

  @jax.jit
  def train_step(state):
    def loss_fn(params):
      return state.apply_fn({"params": params, "frozen": state.frozen}, x).sum()

    return state.minimize(loss_fn)[0]

  state = train_step(train_step(state))
  fs.export(state, tmp_path, example={"inputs": x[0]})
  function, variables = read(tmp_path)
  assert sorted(variables) == ["params/bias", "params/kernel"]
  merged = fs.merge_lora(state.replace(params=state.eval_params))
  assert not np.allclose(
    merged["params"]["kernel"], state.frozen["kernel"], rtol=1e-4
  )
  np.testing.assert_allclose(
    function.call(variables, {"inputs": x}),
    model.apply(merged, x),
    rtol=1e-5,
  )


def test_other_platforms_and_folders_that_hold_an_export_raise(
  workdir, exported, tmp_path
):
  with pytest.raises(ValueError, match=r"platforms.*'gpu'"):
    fs.export(workdir, tmp_path, platforms=("cpu", "gpu"))
  assert not os.listdir(tmp_path)
  with pytest.raises(ValueError, match=r"model\.stablehlo"):
    fs.export(workdir, exported[0])


# Refuses to import what a program that runs the model need not have.
_PROGRAM = """
import sys

class Refuse:
  def find_spec(self, name, path=None, target=None):
    if name.split(".")[0] in ("flaxshard", "flax", "optax", "orbax", "clu"):
      raise ImportError(f"{name} is not there")

sys.meta_path.insert(0, Refuse())
import json
import jax
from jax import export
import numpy as np
from safetensors.numpy import load_file

folder = sys.argv[1]
with open(f"{folder}/model.stablehlo", "rb") as f:
  exported = export.deserialize(f.read())
variables = load_file(f"{folder}/model.safetensors")
outputs = exported.call(variables, {"inputs": np.load(f"{folder}/inputs.npy")})
np.save(f"{folder}/outputs.npy", outputs)
assert not any(name.startswith("flax") for name in sys.modules)
"""


@pytest.mark.slow
def test_a_program_without_flaxshard_runs_an_export(tmp_path):
  """Of a Linen model."""
  workdir = train_model(
    tmp_path / "run",
    model={"name": "resnet", "stage_sizes": (1,), "width": 4},
    mesh={"replica": 1},
  )
  path = tmp_path / "model"
  fs.export(workdir, path)
  np.save(path / "inputs.npy", images(7))
  subprocess.run(
    [sys.executable, "-c", textwrap.dedent(_PROGRAM), str(path)],
    cwd=tmp_path,
    check=True,
    env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    timeout=200,
  )
  expected = fs.load(workdir).predict({"inputs": images(7)})
  outputs = np.load(path / "outputs.npy")
  np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-5)
