"""CrossShard in the training loop, where groups of replicas differ."""

import jax
import numpy as np
import optax
import pytest
import tiny

from flaxshard import checkpoint
from flaxshard import data
from flaxshard import train
from flaxshard.train import charts

GROUPS = [[2, 0], [3, 1]]


def config(**fields):
  return tiny.config(
    mesh={"per_replica": True, "replica": 4},
    wrappers=(("cross_shard", {"group_assignment": GROUPS}),),
    precision="float32",
    eval_every_steps=2,
    checkpoint_every_steps=2,
    **fields,
  )


def on_each_device(x):
  return [np.asarray(shard.data) for shard in x.addressable_shards]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:CrossShard")
def test_replica_0_is_evaluated_saved_and_restored(
  tmp_path, caplog, monkeypatch
):
  monkeypatch.setattr(charts, "plot", lambda *args: None)
  caplog.set_level("INFO", "flaxshard")
  state = train.train_and_evaluate(config(num_train_steps=4), str(tmp_path))
  kernels = on_each_device(state.params["head"]["kernel"])
  same = [np.array_equal(kernels[0], kernel) for kernel in kernels]
  assert same == [True, False, True, False]

  notes = [r.message for r in caplog.records if "of replica 0" in r.message]
  assert all("(2, 0)" in note for note in notes)
  assert notes

  replica_0 = jax.tree.map(lambda x: on_each_device(x)[0], state.params)
  held_out = data.digits().eval
  logits = state.apply_fn({"params": replica_0}, held_out.inputs)
  losses = optax.softmax_cross_entropy_with_integer_labels(
    logits, held_out.labels
  )
  row = tiny.rows(tmp_path)[-1]
  assert row["eval_loss"] == pytest.approx(float(losses.mean()), rel=1e-5)
  accuracy = (np.argmax(logits, -1) == held_out.labels).mean()
  assert row["eval_accuracy"] == pytest.approx(accuracy)

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
    config(num_train_steps=5, resume="extend"), str(tmp_path)
  )
  kernels = on_each_device(state.params["head"]["kernel"])
  assert int(state.step) == 5
  assert np.array_equal(kernels[0], kernels[2])
  assert not np.array_equal(kernels[0], kernels[1])
