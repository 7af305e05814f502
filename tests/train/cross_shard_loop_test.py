"""CrossShard in the training loop: what it evaluates, saves and refuses."""

import os

import jax
import numpy as np
import optax
import pytest
import tiny

from flaxshard import checkpoint
from flaxshard import data
from flaxshard import train
from flaxshard.train import loop
from flaxshard.train import charts

GROUPS = ((2, 0), (3, 1))
FSDP = {"rules": ({"name": "fsdp", "min_size": 64},)}

pytestmark = pytest.mark.filterwarnings("ignore:CrossShard. the replicas")


@pytest.fixture(scope="module", autouse=True)
def no_plots():
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(charts, "plot", lambda rows, path: None)
    yield


def config(mesh, wrappers, **fields):
  defaults = dict(
    mesh=mesh,
    wrappers=wrappers,
    precision="float32",
    num_train_steps=4,
    eval_every_steps=2,
    checkpoint_every_steps=2,
  )
  return tiny.config(**{**defaults, **fields})


def cross_shard(groups=None):
  return ("cross_shard", {"reduction": "mean", "group_assignment": groups})


def on_each(x):
  return [np.asarray(shard.data) for shard in x.addressable_shards]


def test_trains_as_one_replica_with_the_whole_batch(tmp_path) -> None:
  alone = str(tmp_path / "alone")
  once = dict(eval_every_steps=4, checkpoint_every_steps=4)
  train.train_and_evaluate(config({"replica": 1}, (), **once), alone)
  mesh = {"per_replica": True, "replica": 4}
  stack = (("loss_scale", {"scale": "dynamic"}), cross_shard(((3, 1, 0, 2),)))
  workdir = str(tmp_path / "four")
  state = train.train_and_evaluate(config(mesh, stack, **once), workdir)
  assert set(state.wrapper_states) == {"loss_scale", "cross_shard"}
  pairs = zip(tiny.untimed_rows(workdir), tiny.untimed_rows(alone), strict=True)
  for row, wanted in pairs:
    found = {key: row[key] for key in wanted}
    assert found == pytest.approx(wanted, rel=1e-4)


def test_groups_evaluate_and_save_that_of_replica_0(tmp_path, caplog) -> None:
  mesh = {"per_replica": True, "replica": 4}
  groups = [list(group) for group in GROUPS]
  made = config(mesh, (cross_shard(groups),))
  with (
    caplog.at_level("INFO", "flaxshard"),
    pytest.warns(UserWarning, match="reduced in groups"),
  ):
    state = train.train_and_evaluate(made, str(tmp_path))
  kernels = on_each(state.params["head"]["kernel"])
  same = [np.array_equal(kernels[0], kernel) for kernel in kernels]
  assert same == [True, False, True, False]

  told = [r.message for r in caplog.records if "of replica 0" in r.message]
  assert all("the group of replica 0, (2, 0)" in message for message in told)
  # At the start, in the table of what lies where, and with each checkpoint.
  assert sum(message.startswith("CrossShard") for message in told) == 1
  assert sum(message.startswith("what lies") for message in told) == 1
  assert sum(message.startswith("step 4: Cro") for message in told) == 1
  assert len(told) == 4

  first = jax.tree.map(lambda x: on_each(x)[0], state.params)
  held_out = data.digits().eval
  logits = state.apply_fn({"params": first}, held_out.inputs)
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
    jax.tree.leaves(restored.params), jax.tree.leaves(first), strict=True
  ):
    for held in on_each(x):
      np.testing.assert_array_equal(held, wanted)

  # What was saved evaluates to what was written, and training goes on.
  again = config(
    mesh, (cross_shard(groups),), num_train_steps=5, eval_every_steps=5
  )
  state = train.train_and_evaluate(again, str(tmp_path))
  kernels = on_each(state.params["head"]["kernel"])
  assert int(state.step) == 5
  assert np.array_equal(kernels[0], kernels[2])
  assert not np.array_equal(kernels[0], kernels[1])


@pytest.mark.parametrize(
  "mesh, groups, message",
  [
    (
      {"replica": 4},
      None,
      r"config\.wrappers: cross_shard reduces the gradients of 4 replicas, "
      r"which config\.mesh\.per_replica=False does not keep apart; set",
    ),
    (
      {"replica": 8, "per_replica": True},
      GROUPS,
      r"config\.wrappers: CrossShard: group_assignment=.* \(4, 5, 6, 7\) in no",
    ),
    (
      {"replica": 4, "per_replica": True},
      ((0, 1), (2,)),
      r"wrappers\[0\] \('cross_shard'\): CrossShard: .* one size",
    ),
    (
      {"replica": 4, "per_replica": True, **FSDP},
      GROUPS,
      r"config\.mesh\.rules: nothing can be split over 'replica' here\. "
      r"config\.wrappers: CrossShard: .* reduced in groups \(2, 0\), \(3, 1\)",
    ),
  ],
)
def test_what_cannot_be_is_refused_before_anything_is_compiled(
  mesh, groups, message, monkeypatch, tmp_path
) -> None:
  monkeypatch.setattr(loop, "_compile", lambda lowered: pytest.fail("compiled"))
  with pytest.raises(ValueError, match=f"^{message}"):
    made = config(mesh, (cross_shard(groups),))
    train.train_and_evaluate(made, str(tmp_path))
  assert os.listdir(tmp_path) == []
