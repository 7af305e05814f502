"""Training data without a length: streams of examples, and rollouts."""

import grain
import jax
import numpy as np
import pytest
import small_tasks
from small_tasks import config
import tiny
import tree_equality

from flaxshard import data
from flaxshard import tasks
from flaxshard import train
from flaxshard.train import rollouts


@pytest.fixture(scope="module", autouse=True)
def without_plots():
  with tiny.importable("stream_tasks", __name__):
    yield


def numbers(size):
  return [{"inputs": np.float32(i)} for i in range(size)]


def make_stream(kind):
  if kind == "grain":
    return grain.MapDataset.source(numbers(10)).to_iter_dataset()
  return small_tasks.Forever(numbers(10))


def jitter(example, rng):
  return {"inputs": example["inputs"] + np.float32(rng.random())}


@pytest.mark.parametrize("kind", ["grain", "plain"])
def test_a_stream_is_read_in_its_order_and_continues_from_a_position(kind):
  splits = data.Splits(make_stream(kind))
  iterator = data.train_iterator(splits, batch_size=4, seed=0)
  first = [next(iterator)["inputs"].tolist() for _ in range(3)]
  assert first == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]
  position = iterator.get_state()
  again = data.train_iterator(splits, batch_size=4, seed=0)
  again.set_state(position)
  assert next(again)["inputs"].tolist() == [2, 3, 4, 5]
  # Rows are the same examples for any number of processes.
  augmented = data.Splits(make_stream(kind), augment=jitter)
  whole = data.train_iterator(augmented, batch_size=4, seed=0)
  half = data.train_iterator(augmented, batch_size=4, seed=0, rows=[2, 3])
  for _ in range(3):
    np.testing.assert_array_equal(
      next(whole)["inputs"][2:], next(half)["inputs"]
    )


def test_a_stream_that_became_shorter_cannot_be_continued():
  stream = small_tasks.Forever(numbers(10))
  iterator = data.train_iterator(data.Splits(stream), batch_size=4, seed=0)
  next(iterator), next(iterator)
  position = iterator.get_state()
  stream.examples = numbers(5)
  with pytest.raises(ValueError, match=r"5 examples.* after 8"):
    iterator.set_state(position)


@pytest.mark.parametrize(
  ("splits", "error", "fact"),
  [
    (data.Splits(iter(numbers(3))), TypeError, "only once"),
    (data.Splits(small_tasks.Forever([])), ValueError, "no train examples"),
    (data.Splits(3), TypeError, "train must be a sequence"),
    (
      data.Splits(numbers(3), small_tasks.Forever(numbers(3))),
      TypeError,
      "eval must be a sequence",
    ),
  ],
)
def test_an_invalid_stream_raises(splits, error, fact, tmp_path):
  class Task(small_tasks.Regression):
    def load_data(self):
      return splits

  with pytest.raises(error, match=rf"Task.load_data.*{fact}"):
    train.train_and_evaluate(config(), str(tmp_path), Task())


def run(tmp_path, name, task, *steps):
  for num_train_steps in steps:
    fields = dict(num_train_steps=num_train_steps, resume="extend")
    state = train.train_and_evaluate(
      config(**fields), str(tmp_path / name), task
    )
  return state


@pytest.mark.slow
def test_training_on_a_stream_resumes_to_the_same_result(tmp_path):
  whole = run(tmp_path, "whole", small_tasks.Streamed(), 10)
  parts = run(tmp_path, "parts", small_tasks.Streamed(), 5, 10)
  tree_equality.assert_trees_equal(
    jax.tree.leaves(parts), jax.tree.leaves(whole)
  )
  assert tiny.rows(tmp_path / "parts")[-1]["eval_loss"] > 0


@pytest.mark.slow
def test_rollouts_of_the_newest_state_resume_to_the_same_result(tmp_path):
  task = small_tasks.Rollouts()
  whole = run(tmp_path, "whole", task, 12)
  assert task.made == list(range(12))
  parts = run(tmp_path, "parts", small_tasks.Rollouts(), 5, 12)
  tree_equality.assert_trees_equal(
    jax.tree.leaves(parts), jax.tree.leaves(whole)
  )
  # Each batch moved the outputs of the state before it towards 1.
  assert float(np.abs(jax.device_get(whole.params)["Dense_0"]["kernel"]).sum())
  rows = tiny.rows(tmp_path / "whole")
  assert rows[-1]["train_loss"] < rows[0]["train_loss"] or len(rows) == 1


ZEROS = {"inputs": np.zeros((8, 2)), "target": np.zeros(8)}


@pytest.mark.parametrize(
  ("batches", "facts"),
  [
    ([{"inputs": np.zeros((8, 2))}], "inputs, target"),
    ([{**ZEROS, "inputs": np.zeros((4, 2))}], r"inputs .*\(8, 2\).* \(4, 2\)"),
    ([{**ZEROS, "target": np.full(8, 0.5)}], "target .*int32.*float64"),
    ([], "after 0 steps.* None"),
  ],
)
def test_invalid_rollouts_raise(batches, facts):
  class Task(small_tasks.Rollouts):
    def train_batches(self, stream):
      return batches

  sharding = jax.sharding.NamedSharding(jax.make_mesh((1,), ("x",)), jax.P())
  made = rollouts.Rollouts(
    tasks.adapt(Task()),
    seed=0,
    batch={
      "inputs": jax.ShapeDtypeStruct((8, 2), np.float32, sharding=sharding),
      "target": jax.ShapeDtypeStruct((8,), np.int32, sharding=sharding),
    },
  )
  with pytest.raises(ValueError, match=f"Task.train_batches.*{facts}"):
    made.next_batch(None)
