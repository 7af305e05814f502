"""Wrappers and parameter groups in the training loop: values of whole runs."""

import jax
import numpy as np
import optax
import pytest
import tiny
import tree_equality

from configs import digits_diloco
from flaxshard import checkpoint
from flaxshard import data
from flaxshard import train

pytestmark = pytest.mark.slow


def config(**fields):
  values = dict(wrappers=(), precision="float32", mesh={"replica": 2})
  return tiny.config(**{**values, **fields})


def run(workdir, **fields):
  """Returns the state and the rows of a run."""
  state = train.train_and_evaluate(config(**fields), str(workdir))
  return state, tiny.rows(workdir)


def close(a, b):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)


def assert_evaluated(row, state, params):
  """Asserts that a row has the loss and the accuracy of some parameters."""
  # Loaded here: all workers of the tests would import scikit-learn otherwise.
  held_out = data.digits().eval
  logits = state.apply_fn({"params": params}, held_out.inputs)
  losses = optax.softmax_cross_entropy_with_integer_labels(
    logits, held_out.labels
  )
  accuracy = (np.argmax(logits, -1) == held_out.labels).mean()
  assert row["eval_accuracy"] == pytest.approx(accuracy)
  assert row["eval_loss"] == pytest.approx(float(losses.mean()), rel=1e-4)


def test_accumulated_batches_equal_large_ones_and_averages_are_evaluated(
  tmp_path,
):
  cosine = {"name": "cosine", "warmup_steps": 1}
  large, large_rows = run(
    tmp_path / "large", num_train_steps=4, log_every_steps=1, schedule=cosine
  )
  small, rows = run(
    tmp_path / "small",
    batch_size=8,
    accumulate_steps=2,
    schedule=cosine,
    wrappers=(("ema", {"decay": 0.75, "debias": False}),),
  )
  assert int(small.step) == int(large.step) == 4
  close(small.params, large.params)
  # A row for each update. The rates are those of the updates.
  assert [row["step"] for row in rows] == [2, 4, 6, 8]
  expected = optax.warmup_cosine_decay_schedule(0.0, 0.01, 1, 4)
  for i, (row, large_row) in enumerate(zip(rows, large_rows, strict=True)):
    np.testing.assert_allclose(row["learning_rate"], expected(i))
    assert row["learning_rate"] == large_row["learning_rate"]
    # Metrics have the batches that were only added.
    close(row["train_loss"], large_row["train_loss"])
  assert_evaluated(rows[-1], small, small.eval_params)
  assert int(small.wrapper_states["ema"].num_updates) == 4


def test_resume_within_an_accumulation_is_bit_equal(tmp_path):
  fields = dict(
    accumulate_steps=3,
    wrappers=(
      ("loss_scale", {"scale": "dynamic"}),
      ("ema", {"decay": 0.5}),
    ),
    precision="mixed_float16",
    optimizer={"name": "adam"},
  )
  whole = train.train_and_evaluate(config(**fields), str(tmp_path / "whole"))
  workdir = str(tmp_path / "parts")
  part = train.train_and_evaluate(config(**fields, num_train_steps=4), workdir)
  assert int(part.wrapper_states["accumulate"].num_batches) == 1
  resumed = train.train_and_evaluate(config(**fields, resume="extend"), workdir)
  tree_equality.assert_trees_equal(
    jax.tree.leaves(resumed), jax.tree.leaves(whole)
  )
  assert int(whole.wrapper_states["ema"].num_updates) == int(whole.step) == 2


def test_frozen_parameters_and_rates_by_pattern(tmp_path):
  state, rows = run(
    tmp_path,
    num_train_steps=4,
    freeze=("^dense/",),
    learning_rates=(("bias$", 4.0),),
    optimizer={"name": "sgd", "momentum": 0.9},
  )
  paths = [
    jax.tree_util.keystr(path, simple=True, separator="/")
    for path, _ in jax.tree_util.tree_leaves_with_path(state.opt_state)
  ]
  assert all("dense" not in path for path in paths)
  assert any("head" in path for path in paths)
  assert rows[-1]["learning_rate"] == pytest.approx(0.01)
  assert rows[-1]["learning_rate/bias$"] == pytest.approx(0.04)
  # The bias of a layer starts at zeros.
  assert not np.any(np.asarray(state.params["dense"]["bias"]))
  assert np.any(np.asarray(state.params["head"]["bias"]))


def test_replicas_of_diloco_differ_and_the_center_is_evaluated(tmp_path):
  """The shipped config, shortened."""
  config = digits_diloco.get_config()
  loss_scale, (agn, arguments) = config.wrappers
  arguments = {**arguments, "communication_period": 4}
  config.update(
    wrappers=(loss_scale, (agn, arguments)),
    model={"name": "cnn", "features": (), "dense": 8},
    num_train_steps=6,
    log_every_steps=3,
    eval_every_steps=3,
    checkpoint_every_steps=100,
    writer="none",
  )
  config.mesh.replica = 2
  state = train.train_and_evaluate(config, str(tmp_path))
  rows = tiny.rows(tmp_path)
  assert [row["commits"] for row in rows] == [0, 1]
  agn_state = state.wrapper_states["agn"]
  assert int(agn_state.local_step) == 6
  # Two steps after the commit, each replica has its own parameters.
  copies = np.asarray(agn_state.local_params["head"]["kernel"])
  assert copies.shape[0] == 2
  assert not np.array_equal(copies[0], copies[1])
  momentum = agn_state.outer_opt_state[0].trace["head"]["kernel"]
  assert float(np.abs(momentum).max()) > 0
  assert_evaluated(rows[-1], state, state.params)


def on_each_device(x):
  return [np.asarray(shard.data) for shard in x.addressable_shards]


@pytest.mark.filterwarnings("ignore:CrossShard")
def test_replica_0_of_groups_is_evaluated_saved_and_restored(tmp_path, caplog):
  caplog.set_level("INFO", "flaxshard")
  fields = dict(
    mesh={"per_replica": True, "replica": 4},
    wrappers=(("cross_shard", {"group_assignment": [[2, 0], [3, 1]]}),),
    eval_every_steps=2,
    checkpoint_every_steps=2,
  )
  workdir = str(tmp_path)
  state = train.train_and_evaluate(config(**fields, num_train_steps=4), workdir)
  kernels = on_each_device(state.params["head"]["kernel"])
  same = [np.array_equal(kernels[0], kernel) for kernel in kernels]
  assert same == [True, False, True, False]
  notes = [m for m in caplog.messages if "of replica 0" in m]
  assert notes and all("(2, 0)" in note for note in notes)
  replica_0 = jax.tree.map(lambda x: on_each_device(x)[0], state.params)
  assert_evaluated(tiny.rows(tmp_path)[-1], state, replica_0)

  with checkpoint.Checkpointer(tmp_path / "checkpoints") as checkpointer:
    assert checkpointer.all_steps() == [2, 4]
    restored = checkpointer.restore(state)
  for x, wanted in zip(
    jax.tree.leaves(restored.params), jax.tree.leaves(replica_0), strict=True
  ):
    for copy in on_each_device(x):
      np.testing.assert_array_equal(copy, wanted)

  # Training continues from the checkpoint, and the groups differ again.
  state = train.train_and_evaluate(
    config(**fields, num_train_steps=5, resume="extend"), workdir
  )
  kernels = on_each_device(state.params["head"]["kernel"])
  assert int(state.step) == 5
  assert np.array_equal(kernels[0], kernels[2])
  assert not np.array_equal(kernels[0], kernels[1])
