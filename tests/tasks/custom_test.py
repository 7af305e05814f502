"""Custom tasks: losses, metrics, collections, rollouts, evaluations."""

import shutil

from flax import nnx
import jax
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
  variables = {"params": state.params, "batch_stats": state.batch_stats}
  scale = np.ones((10, 1), np.float32)
  outputs = small_tasks.Noisy(2).apply(variables, x, scale, train=False)
  loss = float(((outputs - target) ** 2).mean())
  assert rows[-1]["eval_loss"] == pytest.approx(loss, rel=1e-4)
  # What the model sows is a part of the loss.
  batch = {"x": x, "scale": scale, "target": target}
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


class PaddedTokens(tasks.LanguageModeling):
  """Repeats sequences up to 5 tokens."""

  def collate(self, examples):
    tokens = [np.resize(example["inputs"], 5) for example in examples]
    return {"inputs": np.stack(tokens), "labels": np.stack(tokens)}


def sequences():
  return data.Splits([{"inputs": np.ones(2, np.int32)}], None, 7)


def shapes_of_sequences():
  return data.Shapes({"inputs": jax.ShapeDtypeStruct((2,), np.int32)}, 7)


@data.shapes_from(shapes_of_sequences)
def unread_sequences():
  raise AssertionError("a plan must not read the data")


@pytest.mark.parametrize("factory", ["sequences", "unread_sequences"])
def test_a_plan_has_the_shapes_of_collated_batches(factory):
  task, factory = f"{_THIS}:PaddedTokens", f"{_THIS}:{factory}"
  fields = config(task=task, data=factory, model={"name": "transformer"})
  found = load.load(config_lib.check(fields), shapes_only=True)
  assert found.shapes.num_classes == 7
  shapes = {key: x.shape for key, x in found.shapes.example.items()}
  assert shapes == {"inputs": (5,), "labels": (5,)}


def run(workdir, task, *steps, **fields):
  for num_train_steps in steps:
    fields |= {"num_train_steps": num_train_steps, "resume": "extend"}
    state = train.train_and_evaluate(config(**fields), str(workdir), task)
  return state


@pytest.mark.slow
@pytest.mark.parametrize("create", [small_tasks.Streamed, small_tasks.Rollouts])
def test_training_resumes_to_the_same_result(tmp_path, create):
  task = create()
  whole = run(tmp_path / "whole", task, 12)
  parts = run(tmp_path / "parts", create(), 5, 12)
  tree_equality.assert_trees_equal(
    jax.tree.leaves(parts), jax.tree.leaves(whole)
  )
  if create is small_tasks.Rollouts:
    # Each batch is made with the state before it.
    assert task.made == list(range(12))
  # Another task is another run.
  with pytest.raises(ValueError, match=r"config\.task\.name: .*Regression"):
    run(tmp_path / "parts", Regression(), 12)


@pytest.mark.slow
def test_evaluate_returns_other_numbers_that_rate_checkpoints(tmp_path):
  task = small_tasks.Streamed()
  run(tmp_path / "run", task, 2, best_metric="eval_largest", best_mode="max")
  row = tiny.rows(tmp_path / "run")[-1]
  largest = max(example["target"].max() for example in task.load_data().eval)
  assert row["eval_largest"] == pytest.approx(largest)
  assert {"eval_loss", "eval_distance"} <= row.keys()
  wrong = {"best_metric": "eval_best", "best_mode": "max"}
  with pytest.raises(ValueError, match=r"best_metric='eval_best'.*largest"):
    run(tmp_path / "wrong", task, 2, **wrong)


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
  batch = {
    "inputs": jax.ShapeDtypeStruct((8, 2), np.float32, sharding=sharding),
    "target": jax.ShapeDtypeStruct((8,), np.int32, sharding=sharding),
  }
  made = rollouts.Rollouts(tasks.adapt(Task()), seed=0, batch=batch)
  with pytest.raises(ValueError, match=f"Task.train_batches.*{facts}"):
    made.next_batch("the state")
  assert broadcast == ["the state"]
  with pytest.raises(RuntimeError, match="state"):
    made.state()
