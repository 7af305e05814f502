"""Runs that begin with parameters of a checkpoint, and train LoRA factors."""

import logging

import jax
import numpy as np
import pytest
import tiny

from flaxshard import data
from flaxshard import merge_lora
from flaxshard import train


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
    data={"name": f"{__name__}:rotated_digits"},
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
