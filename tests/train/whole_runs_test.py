"""Whole runs that end like another one: on meshes, accumulated, fine-tuned."""

import logging
import os
import shutil

import grouped
import jax
import numpy as np
import optax
import pytest
from tiny_runs import assert_evaluated
from tiny_runs import assert_same_rows
from tiny_runs import IMAGES
from tiny_runs import run
from tiny_runs import TEXT
from tree_equality import assert_trees_close
from tree_equality import assert_trees_equal

from configs import lm_text_tensor_parallel

pytestmark = pytest.mark.slow

P = jax.sharding.PartitionSpec


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
  """Runs of a CNN and of a transformer: workdir, final state and rows."""
  runs = {}
  for name, fields in (("images", IMAGES), ("text", TEXT)):
    workdir = tmp_path_factory.mktemp("run")
    runs[name] = workdir, *run(workdir, mesh={"replica": 1}, **fields)
  return runs


def copy_at_step_2(workdir, copy):
  """Copies the workdir of four steps as it was after two."""
  shutil.copytree(workdir, copy)
  shutil.rmtree(os.path.join(copy, "checkpoints", "4"))
  return copy


# Other meshes.

TENSOR_PARALLEL = dict(lm_text_tensor_parallel.get_config().mesh)
TENSOR_PARALLEL["virtual_devices"] = 0
TENSOR_PARALLEL_AND_FSDP = {
  **TENSOR_PARALLEL,
  "rules": (*TENSOR_PARALLEL["rules"], {"name": "fsdp", "min_size": 64}),
  "per_replica": True,
}
WHOLE = {"conv0": P(), "dense": P()}
SPATIAL = {"logical_devices": 8, "split": {"inputs": (1, 2, 4, 1)}}
# Batch and labels are split over the logical devices of each replica.
SPLIT_BATCH = {
  "logical_devices": 4,
  "split": {"inputs": (2, 2, 1, 1), "labels": (4,)},
  "per_replica": True,
}
CROSS_SHARD = (
  ("loss_scale", {"scale": "dynamic"}),
  ("cross_shard", {"group_assignment": ((1, 0),)}),
)


@pytest.mark.parametrize(
  ("name", "fields", "specs"),
  [
    ("images", {"mesh": SPATIAL}, WHOLE),
    ("images", {"mesh": SPLIT_BATCH, "wrappers": CROSS_SHARD}, WHOLE),
    (
      "text",
      {**TEXT, "mesh": TENSOR_PARALLEL},
      {"mlp_in": P(None, "model"), "mlp_out": P("model")},
    ),
    (
      "text",
      {**TEXT, "mesh": TENSOR_PARALLEL_AND_FSDP},
      {"mlp_in": P("replica", "model"), "mlp_out": P("model", "replica")},
    ),
  ],
)
def test_a_run_of_one_device_continues_on_other_meshes(
  one_device, tmp_path, name, fields, specs
):
  workdir, wanted, wanted_rows = one_device[name]
  state, rows = run(copy_at_step_2(workdir, tmp_path / "run"), **fields)
  assert [row["step"] for row in rows] == [2, 4]
  assert_same_rows(rows, wanted_rows)
  assert_trees_close(state.params, wanted.params, atol=1e-3)
  layers = state.params.get("block0", state.params)
  for layer, spec in specs.items():
    sharding = layers[layer]["kernel"].sharding
    assert (sharding.spec, len(sharding.device_set)) == (spec, 8)
  # The slots of the optimizer are sharded like their parameters.
  for x, like in zip(
    jax.tree.leaves(optax.tree.get(state.opt_state, "trace")),
    jax.tree.leaves(state.params),
    strict=True,
  ):
    assert x.sharding == like.sharding


@pytest.mark.filterwarnings("ignore:CrossShard")
def test_replica_0_of_groups_is_evaluated_and_resumed(tmp_path, caplog):
  caplog.set_level("INFO", "flaxshard")
  fields = dict(
    mesh={"per_replica": True, "replica": 4},
    wrappers=(("cross_shard", {"group_assignment": [[2, 0], [3, 1]]}),),
  )
  state, rows = run(tmp_path, **fields)
  kernels = grouped.on_each(state.params["head"]["kernel"])
  same = [np.array_equal(kernels[0], kernel) for kernel in kernels]
  assert same == [True, False, True, False]
  notes = [m for m in caplog.messages if "of replica 0" in m]
  assert notes and all("(2, 0)" in note for note in notes)
  replica_0 = jax.tree.map(lambda x: grouped.on_each(x)[0], state.params)
  assert_evaluated(rows[-1], state, replica_0)

  # Training continues from the checkpoint, and the groups differ again.
  state, _ = run(tmp_path, **fields, num_train_steps=5, resume="extend")
  kernels = grouped.on_each(state.params["head"]["kernel"])
  assert int(state.step) == 5
  assert np.array_equal(kernels[0], kernels[2])
  assert not np.array_equal(kernels[0], kernels[1])


# Accumulated gradients, averages, statistics and dropout.


def test_accumulated_batches_equal_large_ones_and_averages_are_evaluated(
  tmp_path,
):
  cosine = {"name": "cosine", "warmup_steps": 1}
  large, large_rows = run(
    tmp_path / "large", log_every_steps=1, schedule=cosine
  )
  small, rows = run(
    tmp_path / "small",
    batch_size=8,
    accumulate_steps=2,
    num_train_steps=8,
    schedule=cosine,
    wrappers=(("ema", {"decay": 0.75, "debias": False}),),
  )
  assert int(small.step) == int(large.step) == 4
  assert_trees_close(small.params, large.params, rtol=2e-4, atol=2e-5)
  # A row for each update. The rates are those of the updates.
  assert [row["step"] for row in rows] == [2, 4, 6, 8]
  expected = optax.warmup_cosine_decay_schedule(0.0, 0.01, 1, 4)
  for i, (row, large_row) in enumerate(zip(rows, large_rows, strict=True)):
    np.testing.assert_allclose(row["learning_rate"], expected(i))
    assert row["learning_rate"] == large_row["learning_rate"]
    # Metrics have the batches that were only added.
    assert row["train_loss"] == pytest.approx(large_row["train_loss"], 2e-4)
  assert_evaluated(rows[-1], small, small.eval_params)
  assert int(small.wrapper_states["ema"].num_updates) == 4


def test_replicas_within_an_accumulation_resume_to_the_same_bits(tmp_path):
  """A checkpoint has the position of the data, not that of reading ahead."""
  fields = dict(
    model={"name": "normed:Normed"},
    mesh={"per_replica": True, "replica": 2},
    precision="mixed_float16",
    wrappers=(("loss_scale", {"scale": "dynamic"}), ("ema", {"decay": 0.5})),
    accumulate_steps=3,
  )
  whole, rows = run(tmp_path / "whole", **fields)
  copy = copy_at_step_2(tmp_path / "whole", tmp_path / "copy")
  resumed, resumed_rows = run(copy, **fields)
  assert_trees_equal(*map(jax.tree.leaves, (resumed, whole)))
  assert resumed_rows == rows
  assert int(whole.wrapper_states["ema"].num_updates) == int(whole.step) == 1
  assert int(whole.wrapper_states["accumulate"].num_batches) == 1
  mean = whole.batch_stats["BatchNorm_0"]["mean"]
  assert mean.sharding.is_fully_replicated
  assert np.abs(mean).max() > 0


# Fine-tuning: runs that begin with the parameters of another one.


def assert_has_slots_of(state, *layers):
  slots = optax.tree.get(state.opt_state, "trace")
  found = {path for path, x in slots.items() if jax.tree.leaves(x)}
  assert found == set(layers)


def test_frozen_parameters_and_rates_by_pattern(one_device, tmp_path):
  workdir, pretrained, _ = one_device["images"]
  state, rows = run(
    tmp_path,
    init_from={"path": str(workdir)},
    freeze=("^dense/", "^conv0/"),
    learning_rates=(("bias$", 4.0),),
  )
  assert_has_slots_of(state, "head")
  assert rows[-1]["learning_rate"] == pytest.approx(0.01)
  assert rows[-1]["learning_rate/bias$"] == pytest.approx(0.04)
  for layer in ("conv0", "dense"):
    assert_trees_equal(state.params[layer], pretrained.params[layer])
  for before, after in zip(
    *(jax.tree.leaves(x.params["head"]) for x in (pretrained, state)),
    strict=True,
  ):
    assert not np.array_equal(before, after)


def test_factors_of_lora_are_trained(one_device, tmp_path, caplog, recwarn):
  workdir, pretrained, _ = one_device["images"]
  fields = dict(
    init_from={"path": str(workdir)},
    lora={"rank": 2, "patterns": ("dense/kernel",), "train": ("head/",)},
  )
  with caplog.at_level(logging.INFO, "flaxshard"):
    state, _ = run(tmp_path / "lora", **fields)
  assert "initialized 6 of 8 arrays" in caplog.text
  assert not [w for w in recwarn if "frozen" in str(w.message)]
  assert_has_slots_of(state, "dense", "head")
  assert_trees_equal(state.frozen["dense"], pretrained.params["dense"])
  # The factors begin with a product of zero.
  assert np.abs(state.params["dense"]["kernel"]["lora_b"]).max() > 0
  # A run that resumes does not read the checkpoint again.
  fields["init_from"] = {"path": str(tmp_path / "moved")}
  state, _ = run(
    tmp_path / "lora", **fields, num_train_steps=6, resume="extend"
  )
  assert int(state.step) == 6
