"""The training loop: what it refuses, and its command line."""

import os
import pathlib
import subprocess
import sys

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from flaxshard import data
from flaxshard import train
from flaxshard.train import loop
from flaxshard.train import charts

_ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def importable(monkeypatch):
  """Makes the factories here nameable in configs."""
  monkeypatch.setitem(
    sys.modules, "train_errors_factories", sys.modules[__name__]
  )
  return "train_errors_factories:"


class CountingModel(nn.Module):
  """A model with an integer parameter."""

  num_classes: int
  policy: object

  @nn.compact
  def __call__(self, x, train: bool = False):
    self.param("count", lambda key: jnp.zeros((), jnp.int32))
    return nn.Dense(self.num_classes)(x.reshape(x.shape[0], -1))


class WrongLogits(nn.Module):
  """A model without a dimension of classes."""

  num_classes: int
  policy: object

  @nn.compact
  def __call__(self, x, train: bool = False):
    return nn.Dense(1)(x.reshape(x.shape[0], -1))[:, 0]


class WrongInEvaluation(nn.Module):
  """A model without a dimension of classes, but for training."""

  num_classes: int
  policy: object

  @nn.compact
  def __call__(self, x, train: bool = False):
    logits = nn.Dense(self.num_classes)(x.reshape(x.shape[0], -1))
    return logits if train else logits.argmax(-1)


class Untrainable(nn.Module):
  """A model that cannot be told whether it trains."""

  num_classes: int
  policy: object

  @nn.compact
  def __call__(self, x):
    return nn.Dense(self.num_classes)(x.reshape(x.shape[0], -1))


def mislabelled() -> data.Splits:
  """Digits with five classes declared, and example 0 among the others."""
  splits = data.digits()
  order = np.argsort(-splits.train.labels)
  train_split = data.Arrays(
    splits.train.inputs[order], splits.train.labels[order]
  )
  return data.Splits(train_split, splits.eval, 5)


def unlabelled() -> data.Splits:
  """Examples that are inputs alone."""
  examples = [{"inputs": np.zeros((8, 8, 1), np.float32)}]
  return data.Splits(examples, examples, 10)


@pytest.mark.parametrize(
  "fields, message",
  [
    (dict(batch_size=12), "config.batch_size=12 must be a multiple of the 8"),
    (dict(precision="float16"), "config.precision must be"),
    (dict(model={"name": "cnn", "depth": 3}), "unknown argument 'depth'"),
    (dict(model={"name": "cnn", "dense": 0}), "config.model .*dense must be"),
    (dict(model={"name": "cnn", "dropout": 1.5}), "dropout must be"),
    (dict(data={"name": "train_errors_factories:unlabelled"}), "'labels'"),
    (
      dict(data={"name": "train_errors_factories:mislabelled"}),
      r"labels must lie in \[0, 5\)",
    ),
    (
      dict(model={"name": "train_errors_factories:WrongLogits"}),
      r"config.model .*must return logits .* got \(16,\)",
    ),
    (
      dict(model={"name": "train_errors_factories:WrongInEvaluation"}),
      r"config.model .*must return logits .* got \(16,\)",
    ),
    (
      dict(model={"name": "train_errors_factories:Untrainable"}),
      "config.model .*cannot be trained .*'train'",
    ),
    (
      dict(optimizer={"name": "adamw", "weight_decay": float("nan")}),
      "config.optimizer.weight_decay must be a finite",
    ),
    (
      dict(schedule={"name": "cosine", "warmup_steps": -1}),
      "config.schedule .*warmup_steps must be an integer",
    ),
    (dict(seed=2**40), "config.seed must be"),
    (
      dict(model={"name": "train_errors_factories:CountingModel"}),
      "count is int32",
    ),
  ],
)
def test_bad_configs_are_refused_before_compilation(
  importable, tmp_path, monkeypatch, fields, message
) -> None:
  def compiles(*args):
    raise AssertionError("compiled")

  monkeypatch.setattr(loop, "_compile", compiles)
  with pytest.raises((TypeError, ValueError), match=message):
    train.train_and_evaluate(tiny.config(**fields), str(tmp_path))
  assert os.listdir(tmp_path) == []


def test_a_workdir_that_cannot_be_written_is_refused(tmp_path) -> None:
  blocked = tmp_path / "file"
  blocked.write_text("")
  with pytest.raises(ValueError, match=r"workdir=.*cannot be written"):
    train.train_and_evaluate(tiny.config(), str(blocked / "below"))


def test_missing_packages_are_named_at_the_start(tmp_path, monkeypatch) -> None:
  real = charts.importlib.util.find_spec
  for package, config in (
    ("matplotlib", tiny.config()),
    ("tensorboardX", tiny.config(writer="tensorboard")),
  ):
    monkeypatch.setattr(
      charts.importlib.util,
      "find_spec",
      lambda name, gone=package: None if name == gone else real(name),
    )
    with pytest.raises(ImportError, match=rf"{package}.*pip install"):
      train.train_and_evaluate(config, str(tmp_path / package))
    assert not (tmp_path / package / "metrics.jsonl").exists()


def _run(*arguments: str) -> subprocess.CompletedProcess:
  return subprocess.run(
    [sys.executable, "-m", "flaxshard", *arguments],
    cwd=_ROOT,
    capture_output=True,
    text=True,
    timeout=120,
  )


def test_a_misspelt_field_is_an_error_that_lists_near_names(tmp_path) -> None:
  result = _run(
    "--config=configs/digits.py",
    f"--workdir={tmp_path}",
    "--config.batch_siz=3",
  )
  assert result.returncode != 0
  assert 'Did you mean "batch_size"' in result.stderr


def test_help_says_what_can_be_set() -> None:
  result = _run("--help")
  for part in ("--config.batch_size=", "--workdir", "metrics.jsonl", "Ctrl-C"):
    assert part in result.stdout, part


def test_importing_touches_no_device_and_only_what_it_needs() -> None:
  code = """
import sys
import flaxshard
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
heavy = {"orbax.checkpoint", "grain", "clu", "matplotlib", "tensorflow"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
assert flaxshard.Checkpointer is flaxshard.checkpoint.Checkpointer
"""
  result = subprocess.run(
    [sys.executable, "-c", code], cwd=_ROOT, capture_output=True, text=True
  )
  assert result.returncode == 0, result.stderr


def test_a_config_file_that_does_not_exist_is_named(tmp_path) -> None:
  result = _run("--config=configs/nope.py", f"--workdir={tmp_path}")
  assert result.returncode != 0
  assert "configs/nope.py" in result.stderr.splitlines()[-1]
