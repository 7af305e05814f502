"""Runs that begin with parameters of a checkpoint, and train LoRA factors."""

import logging

import jax
import numpy as np
import pytest
import tiny

from flaxshard import data
from flaxshard import LoRA
from flaxshard import merge_lora
from flaxshard import train
from flaxshard.train import config as config_lib
from flaxshard.train import fine_tuning

_THIS = "fine_tuning_test_factories"


@pytest.fixture(scope="module", autouse=True)
def importable():
  """Lets configs name the data of this file; draws no plots."""
  with tiny.importable(_THIS, __name__):
    yield


def rotated_digits() -> data.Splits:
  """Returns digits that are turned by a quarter, for another task."""
  digits = data.load({"name": "digits"})
  turn = lambda source: data.Arrays(
    np.stack([np.rot90(source[i]["inputs"]) for i in range(len(source))]),
    np.array([source[i]["labels"] for i in range(len(source))]),
  )
  return data.Splits(turn(digits.train), turn(digits.eval), digits.num_classes)


def make_config(**fields):
  return tiny.config(
    model={"name": "cnn", "features": (), "dense": 64},
    precision="float32",
    num_train_steps=80,
    eval_every_steps=80,
    checkpoint_every_steps=80,
    **fields,
  )


def num_bytes(tree):
  return sum(x.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.slow
def test_fine_tuning_with_lora_on_other_data(tmp_path, caplog, recwarn):
  pretrained = train.train_and_evaluate(make_config(), str(tmp_path / "a"))
  config = make_config(
    data={"name": f"{_THIS}:rotated_digits"},
    init_from={"path": str(tmp_path / "a")},
    lora={
      "rank": 8,
      "alpha": 32,
      "train": ("head/",),
      "patterns": ("dense/kernel",),
    },
  )
  workdir = str(tmp_path / "b")
  with caplog.at_level(logging.INFO):
    state = train.train_and_evaluate(config, workdir)
  assert "initialized 4 of 6 arrays" in caplog.text
  assert not [w for w in recwarn if "frozen" in str(w.message)]
  # The first row is that of steps 1 and 2, almost without training.
  rows = tiny.rows(workdir)
  assert rows[0]["train_accuracy"] < 0.5
  assert rows[-1]["eval_accuracy"] > 0.8
  frozen = state.frozen["dense"]
  for name in ("kernel", "bias"):
    np.testing.assert_array_equal(
      frozen[name], pretrained.params["dense"][name]
    )
  # Two slots of AdamW: 64 * 64 + 64 + 64 * 10 + 10 parameters; then the
  # factors of 64 * 8 * 2 and the head.
  slots = 2 * 4
  assert num_bytes(pretrained.opt_state) == slots * 4810 + 8
  assert num_bytes(state.opt_state) == slots * (1024 + 650) + 8
  # A run that resumes does not read the checkpoint again.
  config.init_from.path = str(tmp_path / "moved")
  config.num_train_steps = 82
  config.resume = "extend"
  resumed = train.train_and_evaluate(config, workdir)
  assert int(resumed.step) == 82
  # The merged parameters begin a run without LoRA; so does its checkpoint.
  merged = merge_lora(state)["params"]
  assert jax.tree.map(np.shape, merged) == jax.tree.map(
    np.shape, pretrained.params
  )


@pytest.mark.slow
def test_initialization_in_each_replica(tmp_path):
  values = dict(num_train_steps=2, eval_every_steps=2, checkpoint_every_steps=2)
  first = train.train_and_evaluate(tiny.config(**values), str(tmp_path / "a"))
  config = tiny.config(
    **values,
    learning_rate=1e-30,
    optimizer={"name": "sgd"},
    init_from={"path": str(tmp_path / "a"), "step": 2},
    mesh={"per_replica": True},
  )
  state = train.train_and_evaluate(config, str(tmp_path / "b"))
  jax.tree.map(np.testing.assert_array_equal, state.params, first.params)


@pytest.mark.parametrize(
  ("fields", "facts"),
  [
    ({"init_from": {"pth": "a"}}, ["init_from.pth", "'path'"]),
    ({"init_from": {"keep": ("head",)}}, ["init_from.keep", "init_from.path"]),
    (
      {"init_from": {"path": "a", "keep": ("(",)}},
      ["init_from.keep[0]", "'('"],
    ),
    (
      {"init_from": {"path": "a", "rename": ("b",)}},
      ["init_from.rename", "pairs"],
    ),
    ({"init_from": {"path": "a", "keep": "b"}}, ["init_from.keep", "sequence"]),
    ({"lora": {"alpha": 8}}, ["lora.alpha", "lora.rank"]),
    ({"lora": {"rank": -1}}, ["lora.rank", "-1"]),
    ({"lora": {"rank": 2, "train": ("(",)}}, ["config.lora: train", "'('"]),
  ],
)
def test_invalid_fields_raise(fields, facts):
  with pytest.raises(ValueError) as e:
    config_lib.check(tiny.config(**fields))
  for fact in facts:
    assert fact in str(e.value)


def test_lora_of_a_config():
  config = config_lib.check(tiny.config(lora={"rank": 2, "train": ["head"]}))
  assert fine_tuning.create_lora(config.lora) == LoRA(2, train=("head",))
  assert fine_tuning.create_lora(config_lib.check(tiny.config()).lora) is None


@pytest.mark.slow
def test_errors_of_the_model_name_the_field(tmp_path):
  config = tiny.config(lora={"rank": 2, "patterns": ("kernal",)})
  with pytest.raises(ValueError, match=r"config\.lora: .*'kernel'"):
    train.train_and_evaluate(config, str(tmp_path))
  config = tiny.config(init_from={"path": str(tmp_path / "missing")})
  with pytest.raises(ValueError, match=r"config\.init_from: .*no such path"):
    train.train_and_evaluate(config, str(tmp_path))
