"""Custom tasks: losses, metrics, collections, data, streams, evaluations."""

import json
import os
import shutil

from flax import nnx
import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_tasks
from small_tasks import config
from small_tasks import Regression
import tiny
import tree_equality

from flaxshard import data
from flaxshard import tasks
from flaxshard import train
from flaxshard.state import fields as fields_lib
from flaxshard.state import lora
from flaxshard.state import replica_groups
from flaxshard.tasks import apply
from flaxshard.tasks import load
from flaxshard.train import config as config_lib
from flaxshard.train import rollouts

_THIS = "custom_tasks"


@pytest.fixture(scope="module", autouse=True)
def importable():
  """Lets configs name the tasks of this file."""
  with tiny.importable(_THIS, __name__):
    yield


def test_a_task_object_trains_with_collections_streams_and_sown_losses(
  tmp_path,
):
  state = train.train_and_evaluate(config(), str(tmp_path), Regression())
  rows = tiny.rows(tmp_path)
  assert rows[-1]["eval_loss"] < 0.2 * rows[0]["train_loss"]
  assert {"train_distance", "eval_distance"} <= set(rows[-1])
  # The metrics are means over the 10 examples, without the padding.
  examples = small_tasks.make_examples(40)[:10]
  x, target = (np.stack([e[k] for e in examples]) for k in ("x", "target"))
  stats = jax.device_get(state.batch_stats["BatchNorm_0"])
  params = jax.device_get(state.params)
  x = (x - stats["mean"]) / np.sqrt(stats["var"] + 1e-5)
  x = x * params["BatchNorm_0"]["scale"] + params["BatchNorm_0"]["bias"]
  dense = params["Dense_0"]
  outputs = x @ dense["kernel"] + dense["bias"]
  loss = ((outputs - target) ** 2).mean()
  assert rows[-1]["eval_loss"] == pytest.approx(loss, rel=1e-4)
  # What the model sows is a part of the loss.
  batch = {"x": x, "scale": np.ones((10, 1)), "target": target}
  rngs = apply.Rngs(jax.random.key(0))

  @jax.jit
  def losses(state):
    made = (tasks.adapt(Regression(weight)) for weight in (0.0, 10.0))
    return [task(state, state.params, batch, rngs, True)[0] for task in made]

  without, with_sown = losses(state)
  assert with_sown > without + 1


def test_sown_collections_are_not_in_the_state_with_lora():
  task = Regression()
  setup = tiny.setup(config(lora={"rank": 1}), task)
  names = fields_lib.collections(setup.abstract_state)
  assert set(names) == {"batch_stats", lora.FROZEN}


class Ranked(Regression):
  """Adds numbers of its own to the evaluation."""

  def evaluate(self, evaluation):
    worst, outputs = 0.0, 0
    for batch in evaluation.batches():
      predicted, _ = evaluation.apply_fn(
        evaluation.state.params, batch["x"], batch["scale"]
      )
      errors = jnp.abs(predicted - batch["target"]).max(-1)
      worst = max(worst, float(jnp.where(batch["mask"], errors, 0).max()))
      outputs += int(batch["mask"].sum())
    means = evaluation.means()
    return {"worst": worst, "outputs": outputs, "distance": means["distance"]}


@pytest.mark.slow
def test_evaluate_returns_other_numbers_that_rate_checkpoints(tmp_path):
  fields = dict(
    task={"name": f"{_THIS}:Ranked", "size": 30},
    num_train_steps=8,
    eval_every_steps=2,
    checkpoint_every_steps=2,
    max_to_keep=1,
    best_metric="eval_worst",
    best_mode="min",
  )
  train.train_and_evaluate(config(**fields), str(tmp_path))
  rows = [row for row in tiny.rows(tmp_path) if "eval_worst" in row]
  assert all(row["eval_outputs"] == 10 for row in rows)
  assert all(row["eval_distance"] >= row["eval_worst"] * 0.3 for row in rows)
  best = min(rows, key=lambda row: row["eval_worst"])["step"]
  kept = {int(n) for n in os.listdir(tmp_path / "checkpoints") if n.isdigit()}
  assert kept == {best, 8}
  with pytest.raises(
    ValueError, match=r"config.best_metric='eval_best'.*worst"
  ):
    train.train_and_evaluate(
      config(**{**fields, "best_metric": "eval_best"}), str(tmp_path / "other")
    )


class OnNnx(nnx.Module):
  """Takes `deterministic` and `rngs` in its call."""

  def __init__(self, rngs):
    self.norm = nnx.BatchNorm(3, rngs=rngs)
    self.dropout = nnx.Dropout(0.1)
    self.out = nnx.Linear(3, 2, rngs=rngs)

  def __call__(self, x, *, deterministic, rngs):
    x = self.dropout(self.norm(x), deterministic=deterministic, rngs=rngs)
    return self.out(x)


class NnxRegression(Regression):
  """The model is made with `nnx.Rngs`; there is no evaluation data."""

  def create_model(self, rngs):
    return OnNnx(rngs)

  def init_inputs(self, batch):
    return (batch["x"],)

  def loss(self, apply_fn, params, batch, rngs, train):
    outputs, collections = apply_fn(params, batch["x"], rngs=rngs)
    errors = (outputs - batch["target"]) ** 2
    values = {"loss": errors.mean(-1), "distance": errors.sum(-1)}
    return errors.mean(), tasks.Aux(values, collections)

  def load_data(self):
    return data.Splits(super().load_data().train)


@pytest.mark.slow
def test_an_nnx_task_without_evaluation_data(tmp_path, monkeypatch):
  arguments = config(), str(tmp_path), NnxRegression()
  state = train.train_and_evaluate(*arguments)
  rows = tiny.rows(tmp_path)
  assert rows[-1]["train_loss"] < 0.7 * rows[0]["train_loss"]
  assert not [key for row in rows for key in row if key.startswith("eval_")]
  assert not np.allclose(state.batch_stats["norm"]["mean"], 0)
  shutil.rmtree(tmp_path / "checkpoints" / "40")
  before = tiny.count_live_arrays((3, 2))
  counts = tiny.count_at_restore(monkeypatch, (3, 2))
  again = train.train_and_evaluate(*arguments)
  # An NNX module initializes its parameters; they are gone by then.
  assert counts == [before]
  tree_equality.assert_trees_equal(
    jax.tree.leaves(again), jax.tree.leaves(state)
  )


@pytest.mark.slow
def test_a_task_trains_once_per_replica_with_different_streams(tmp_path):
  mesh = {"replica": 2, "per_replica": True}
  state = train.train_and_evaluate(
    config(mesh=mesh), str(tmp_path), Regression()
  )
  rows = tiny.rows(tmp_path)
  assert rows[-1]["eval_loss"] < 0.2 * rows[0]["train_loss"]
  assert int(state.step) == 40


class PaddedTokens(tasks.LanguageModeling):
  """Pads sequences to 5 tokens."""

  def collate(self, examples):
    tokens = np.zeros((len(examples), 5), np.int32)
    for row, example in zip(tokens, examples, strict=True):
      row[: len(example["inputs"])] = example["inputs"]
    weights = (tokens > 0).astype(np.float32)
    return {"inputs": tokens, "labels": tokens, "weights": weights}


def sequences():
  return data.Splits(
    [{"inputs": np.ones(n, np.int32)} for n in (2, 3)], None, 7
  )


def shapes_of_sequences():
  example = {"inputs": jax.ShapeDtypeStruct((2,), np.int32)}
  return data.Shapes(example, 7)


@data.shapes_from(shapes_of_sequences)
def unread_sequences():
  raise AssertionError("a plan must not read the data")


@pytest.mark.parametrize("factory", ["sequences", "unread_sequences"])
def test_a_plan_has_the_shapes_of_collated_batches(factory):
  fields = dict(
    task=f"{_THIS}:PaddedTokens",
    data=f"{_THIS}:{factory}",
    model={"name": "transformer"},
  )
  checked = config_lib.check(config(**fields))
  found = load.load(checked, shapes_only=True)
  assert found.shapes.num_classes == 7
  assert {key: x.shape for key, x in found.shapes.example.items()} == {
    "inputs": (5,),
    "labels": (5,),
    "weights": (5,),
  }


# Training data without a length: streams of examples, and rollouts.


def numbers(size):
  return [{"inputs": np.float32(i)} for i in range(size)]


def make_stream(kind):
  if kind == "dataset":
    return grain.MapDataset.source(numbers(10)).to_iter_dataset()
  if kind == "loader":  # its positions are bytes
    sampler = grain.samplers.IndexSampler(10, shuffle=False, num_epochs=1)
    return grain.DataLoader(data_source=numbers(10), sampler=sampler)
  return small_tasks.Forever(numbers(10))


def jitter(example, rng):
  return {"inputs": example["inputs"] + np.float32(rng.random())}


@pytest.mark.parametrize("kind", ["dataset", "loader", "plain"])
def test_a_stream_is_read_in_its_order_and_continues_from_a_position(kind):
  splits = data.Splits(make_stream(kind))
  iterator = data.train_iterator(splits, batch_size=4, seed=0)
  first = [next(iterator)["inputs"].tolist() for _ in range(3)]
  assert first == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]
  position = json.loads(json.dumps(iterator.get_state()))
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
    (data.Splits(small_tasks.Forever([])), ValueError, "train has no examples"),
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
@pytest.mark.parametrize(
  "create", [Regression, small_tasks.Streamed, small_tasks.Rollouts]
)
def test_training_resumes_to_the_same_result(tmp_path, create):
  task = create()
  whole = run(tmp_path, "whole", task, 12)
  parts = run(tmp_path, "parts", create(), 5, 12)
  tree_equality.assert_trees_equal(
    jax.tree.leaves(parts), jax.tree.leaves(whole)
  )
  if create is not small_tasks.Rollouts:
    # Another task is another run.
    with pytest.raises(ValueError, match=r"config\.task\.name: .*Ranked"):
      run(tmp_path, "parts", Ranked(), 12)
    return
  assert task.made == list(range(12))
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
def test_invalid_rollouts_raise(batches, facts, monkeypatch):
  # May be a collective: once a batch, however often the state is asked for.
  broadcast = []
  monkeypatch.setattr(replica_groups, "of_first_replica", broadcast.append)

  class Task(small_tasks.Rollouts):
    def train_batches(self, stream):
      stream.state(), stream.state()
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
    made.next_batch("the state")
  assert broadcast == ["the state"]
  with pytest.raises(RuntimeError, match="state"):
    made.state()
