"""The training loop over replicas and logical devices.

Every mesh gives the metrics of one device. Most runs resume a run on another
mesh at step 2, so they also show that a checkpoint fits any mesh.
"""

import os
import shutil

import jax
import numpy as np
import optax
import pytest
import tiny
from tree_equality import assert_trees_close
from tree_equality import assert_trees_equal

from flaxshard import data
from flaxshard import train

P = jax.sharding.PartitionSpec

SPATIAL = {"logical_devices": 8, "split": {"inputs": (1, 2, 4, 1)}}
# Megatron-LM (Shoeybi et al., 2019), as in configs/lm_text_tensor_parallel.py.
TENSOR_PARALLEL = {
  "axes": (("model", 2),),
  "rules": (
    ("(query|key|value|mlp_in)/kernel", (None, "model")),
    ("(query|key|value|mlp_in)/bias", ("model",)),
    ("(out|mlp_out)/kernel", ("model", None)),
    ("embed/embedding", ("model", None)),
    ("head/kernel", (None, "model")),
  ),
}
TENSOR_PARALLEL_AND_FSDP = {
  "axes": TENSOR_PARALLEL["axes"],
  "rules": (*TENSOR_PARALLEL["rules"], {"name": "fsdp", "min_size": 64}),
}


def digits() -> data.Splits:
  """Returns digits; the 20 held-out ones are not a multiple of a batch."""
  images = data.digits()
  held_out = data.Arrays(images.eval.inputs[:20], images.eval.labels[:20])
  return data.Splits(images.train, held_out, 10)


def tokens() -> data.Splits:
  """Returns windows of 8 from a random walk over 32 tokens; 19 are held out."""
  steps = np.random.default_rng(0).integers(0, 3, 800)
  walk = (np.cumsum(steps) % 32).astype(np.int32)
  return data.Splits(
    data.Windows(walk[:640], 8), data.Windows(walk[640:], 8), 32
  )


def image_config(mesh, **fields):
  defaults = dict(
    model={"name": "cnn", "features": (4,), "dense": 8},
    data={"name": f"{__name__}:digits"},
    mesh=mesh,
    precision="float32",
    wrappers=(),
    num_train_steps=4,
    eval_every_steps=2,
    checkpoint_every_steps=2,
  )
  return tiny.config(**{**defaults, **fields})


def text_config(mesh):
  model = dict(num_layers=1, num_heads=2, embed_dim=16, mlp_dim=32)
  return image_config(
    mesh,
    model={"name": "transformer", "max_length": 8, **model},
    data={"name": f"{__name__}:tokens"},
    optimizer={"name": "sgd", "momentum": 0.9},
  )


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
  """Runs of a CNN and of a transformer: the workdir and final state of each."""
  runs = {}
  for make_config in (image_config, text_config):
    workdir = str(tmp_path_factory.mktemp("run"))
    config = make_config({"replica": 1})
    runs[make_config] = workdir, train.train_and_evaluate(config, workdir)
  return runs


def copy_at_step_2(workdir, copy) -> str:
  """Copies the workdir of four steps as it was after two."""
  shutil.copytree(workdir, copy)
  shutil.rmtree(os.path.join(copy, "checkpoints", "4"))
  return str(copy)


def assert_same_rows(workdir, wanted_workdir) -> None:
  """Asserts that two runs wrote the same metrics, up to rounding.

  Args:
    workdir: A workdir. Its rows may have further metrics.
    wanted_workdir: Another workdir.
  """
  rows, wanted = map(tiny.untimed_rows, (workdir, wanted_workdir))
  assert [r["step"] for r in rows] == [r["step"] for r in wanted] == [2, 4]
  for row, wanted_row in zip(rows, wanted, strict=True):
    assert {"train_loss", "eval_loss", "eval_accuracy"} < set(wanted_row)
    shared = {key: row[key] for key in wanted_row}
    assert shared == pytest.approx(wanted_row, rel=1e-4)


def continue_run(one_device, copy, make_config, mesh):
  """Continues a run of one device at step 2 on a mesh; returns the state."""
  workdir, wanted = one_device[make_config]
  state = train.train_and_evaluate(
    make_config(mesh), copy_at_step_2(workdir, copy)
  )
  assert_same_rows(copy, workdir)
  assert_trees_close(state.params, wanted.params, atol=1e-3)
  return state


@pytest.mark.slow
def test_a_spatial_split_continues_a_run_of_one_device(one_device, tmp_path):
  state = continue_run(one_device, tmp_path / "run", image_config, SPATIAL)
  for path, x in jax.tree_util.tree_leaves_with_path(state):
    assert x.sharding.is_fully_replicated, path
    assert len(x.sharding.device_set) == 8, path


@pytest.mark.slow
def test_replicas_with_cross_shard_train_like_one_device(one_device, tmp_path):
  """Batch and labels are split over the logical devices of each replica."""
  mesh = {
    "logical_devices": 4,
    "split": {"inputs": (2, 2, 1, 1), "labels": (4,)},
    "per_replica": True,
  }
  wrappers = (
    ("loss_scale", {"scale": "dynamic"}),
    ("cross_shard", {"group_assignment": ((1, 0),)}),
  )
  config = image_config(mesh, wrappers=wrappers)
  state = train.train_and_evaluate(config, str(tmp_path))
  workdir, wanted = one_device[image_config]
  assert_same_rows(tmp_path, workdir)
  assert set(state.wrapper_states) == {"loss_scale", "cross_shard"}
  assert_trees_close(state.params, wanted.params, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("mesh", "specs"),
  [
    (TENSOR_PARALLEL, [P(None, "model"), P("model"), P("model")]),
    (
      TENSOR_PARALLEL_AND_FSDP,
      [P("replica", "model"), P("model"), P("model", "replica")],
    ),
    (
      {**TENSOR_PARALLEL_AND_FSDP, "per_replica": True},
      [P("replica", "model"), P("model"), P("model", "replica")],
    ),
  ],
)
def test_split_parameters_continue_a_run_of_one_device(
  one_device, tmp_path, mesh, specs
):
  state = continue_run(one_device, tmp_path / "run", text_config, mesh)
  block = state.params["block0"]
  found = [block["mlp_in"]["kernel"], block["mlp_in"]["bias"]]
  found.append(block["mlp_out"]["kernel"])
  assert [x.sharding.spec for x in found] == specs
  # The slots of the optimizer are sharded like their parameters.
  for x, like in zip(
    jax.tree.leaves(optax.tree.get(state.opt_state, "trace")),
    jax.tree.leaves(state.params),
    strict=True,
  ):
    assert x.sharding == like.sharding


@pytest.mark.slow
def test_replicas_with_statistics_and_dropout_resume_exactly(tmp_path):
  """A checkpoint has the position of the data, not that of reading ahead."""
  config = image_config(
    {"per_replica": True, "replica": 2},
    model={"name": "normed:Normed"},
    wrappers=(("loss_scale", {"scale": "dynamic"}),),
  )
  workdir = str(tmp_path / "whole")
  state = train.train_and_evaluate(config, workdir)
  copy = copy_at_step_2(workdir, tmp_path / "copy")
  resumed = train.train_and_evaluate(config, copy)
  assert_trees_equal(*map(jax.tree.leaves, (resumed, state)))
  assert tiny.untimed_rows(copy) == tiny.untimed_rows(workdir)
  mean = state.batch_stats["BatchNorm_0"]["mean"]
  assert mean.sharding.is_fully_replicated
  assert np.abs(mean).max() > 0
