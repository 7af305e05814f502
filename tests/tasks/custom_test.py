"""Custom tasks: losses, collections, rollouts, evaluations, and mistakes."""

import functools
import re
import shutil
import warnings

from clu import metrics as clu_metrics
import flax
from flax import nnx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_tasks
from small_tasks import config
from small_tasks import Forever
from small_tasks import Regression
import tiny
import tree_equality

from flaxshard import data
from flaxshard import tasks
from flaxshard import train
from flaxshard.state import fields as fields_lib
from flaxshard.tasks import apply
from flaxshard.tasks import steps
from flaxshard.train import config as config_lib
from flaxshard.wrappers import stack

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
  evaluate = functools.partial(small_tasks.Noisy(2).apply, train=False)
  outputs = jax.jit(evaluate)(variables, x, scale)
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
  assert set(names) == {"batch_stats", stack.FROZEN}


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
  counts = tiny.count_at_restore(monkeypatch, (3, 2))
  again = train.train_and_evaluate(*arguments)
  # An NNX module initializes its parameters; they are gone by then.
  assert counts == [0]
  tree_equality.assert_trees_equal(
    jax.tree.leaves(again), jax.tree.leaves(state)
  )


class PaddedTokens(tasks.LanguageModeling):
  """Repeats sequences up to 5 tokens."""

  def collate(self, examples):
    tokens = [np.resize(example["inputs"], 5) for example in examples]
    return {"inputs": np.stack(tokens), "labels": np.stack(tokens)}


def shapes_of_sequences():
  return data.Shapes({"inputs": jax.ShapeDtypeStruct((2,), np.int32)}, 7)


@data.shapes_from(shapes_of_sequences)
def unread_sequences():
  raise AssertionError("a plan must not read the data")


def test_a_plan_has_the_shapes_of_collated_batches():
  task, factory = f"{_THIS}:PaddedTokens", f"{_THIS}:unread_sequences"
  fields = config(task=task, data=factory, model={"name": "transformer"})
  _, found, _ = tasks.load(config_lib.check(fields), shapes_only=True)
  assert found.num_classes == 7
  shapes = {key: x.shape for key, x in found.example.items()}
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
  with pytest.raises(ValueError, match=r"best_metric='eval_best'.*largest"):
    run(tmp_path / "wrong", task, 2, best_metric="eval_best", best_mode="max")
  assert not tiny.rows(tmp_path / "wrong")


ZEROS = {"inputs": np.zeros((8, 2)), "target": np.zeros(8)}


@pytest.mark.parametrize(
  ("batches", "facts"),
  [
    ([{"inputs": np.zeros((8, 2))}], "target: missing"),
    ([{k: x[:4] for k, x in ZEROS.items()}], r"inputs: .*\(4, 2\).*\(8, 2\)"),
    ([{**ZEROS, "target": np.full(8, 2**40)}], r"target.*1099511627776"),
    ([{**ZEROS, "target": np.full(8, 0.5)}], "target: .*float32.*int32"),
    ([], "after 0 steps.* None"),
  ],
)
def test_invalid_rollouts_raise(batches, facts, tmp_path):
  class Task(small_tasks.Rollouts):
    def example(self):
      target = jax.ShapeDtypeStruct((), np.int32)
      return {**super().example(), "target": target}

    def train_batches(self, stream):
      # It may be a collective: once a batch, however often it is asked for.
      assert stream.state() is stream.state()
      self.stream = stream
      return batches

  task = Task()
  with pytest.raises(ValueError, match=f"Task.train_batches.*{facts}"):
    train.train_and_evaluate(config(), str(tmp_path), task)
  with pytest.raises(RuntimeError, match="state"):
    task.stream.state()


# Mistakes are errors that name the task, before anything is compiled.


class Model(nn.Module):
  @nn.compact
  def __call__(self, x):
    self.variable("counts", "n", jnp.zeros, ())
    return nn.Dense(2)(x)


class Task:
  """A task without mistakes, to be changed."""

  metrics = small_tasks.Loss

  def create_model(self):
    return Model()

  def load_data(self):
    examples = [{"inputs": np.ones(2, np.float32)}] * 8
    return data.Splits(examples, examples)

  def loss(self, apply_fn, params, batch, rngs, train):
    outputs, collections = apply_fn(params, batch["inputs"])
    losses = outputs.sum(-1)
    return losses.mean(), tasks.Aux({"loss": losses}, collections)


def create_setup(task=None, /, **fields):
  setup = tiny.setup(config(**fields), task)
  steps.check_metrics(setup)
  return setup


def with_result(change):
  """Returns a task whose loss returns `change(loss, aux)`."""

  class Changed(Task):
    def loss(self, *args):
      return change(*super().loss(*args))

  return Changed()


def with_attributes(**attributes):
  return type("Changed", (Task,), attributes)()


@flax.struct.dataclass
class Collected(clu_metrics.Collection):
  loss: clu_metrics.CollectingMetric.from_outputs(("loss",))


class NoMetrics:
  matrics = small_tasks.Loss
  loss = Task.loss


# Its fields are strings, as with `from __future__ import annotations`.
@flax.struct.dataclass
class Strings(clu_metrics.Collection):
  loss: "clu_metrics.Average"


NO_CLASS = with_attributes(create_model=lambda self, width: Model())
NO_TUPLE = with_attributes(init_inputs=lambda self, batch: batch["inputs"])
NO_ROWS = with_attributes(collate=lambda self, xs: {"inputs": np.ones(2)})
SQUARE = with_attributes(collate=lambda self, xs: {"inputs": np.eye(len(xs))})
NO_AUX = with_result(lambda loss, aux: loss)
NO_SCALAR = with_result(lambda loss, aux: (aux.metrics["loss"], aux))
NO_DATA = with_attributes(load_data=None)
NO_SHAPES = with_attributes(load_data=None, example=lambda self: (3,))
NO_SPLITS = with_attributes(load_data=lambda self: ([], []))
NO_VALUES = with_result(lambda loss, aux: (loss, tasks.Aux({})))
NO_NUMBER = {"loss": np.ones(3)}


def with_metrics(metrics):
  create_setup(with_attributes(metrics=metrics))


def with_data(*splits):
  load_data = lambda self: data.Splits(*splits)
  create_setup(with_attributes(load_data=load_data))


take_batch = lambda task: next(create_setup(task).open_train_batches(None))


def label(value):
  examples = [{"labels": np.int32(0)}, {"labels": value}]
  tasks.Classification(3).collate(examples)


TASK = f"{_THIS}:Task"
WIDHT = {"name": TASK, "widht": 3}
BEST = {"best_metric": "eval_los", "best_mode": "min"}
EXAMPLES = [{"inputs": np.ones(2, np.float32)}]


@pytest.mark.parametrize(
  ("call", "error", "words"),
  [
    # Tasks.
    (lambda: create_setup(Task), TypeError, "class .*task=Task()"),
    (lambda: create_setup(NoMetrics()), ValueError, "'metrics'.*'matrics'"),
    (lambda: with_metrics(Collected), TypeError, "Collected .*merged"),
    (lambda: with_metrics(Strings), TypeError, "Strings .*strings"),
    (lambda: with_metrics(dict), TypeError, "metrics .*builtins.dict"),
    (lambda: create_setup(NO_CLASS), TypeError, "Changed.create_.*'width'"),
    (lambda: create_setup(NO_TUPLE), TypeError, r"Changed.init_.*\[1,2\]"),
    (lambda: create_setup(NO_ROWS), ValueError, r"Changed.load_.*collate.*\[2"),
    (lambda: create_setup(NO_AUX), TypeError, "loss .*Aux"),
    (lambda: create_setup(NO_SCALAR), ValueError, r"scalar.*float32\[8\]"),
    (lambda: create_setup(Task(), task="a.b"), ValueError, "task=.*task="),
    (lambda: steps.check_numbers("a", NO_NUMBER), ValueError, r"loss .*64\[3"),
    (lambda: steps.check_numbers("a", 3), ValueError, "^a .*by name.* 3"),
    (lambda: create_setup(NO_VALUES), ValueError, r"Changed.*KeyError.'loss'"),
    # Data of tasks.
    (lambda: create_setup(NO_SHAPES), ValueError, "example .*shapes.*tuple"),
    (lambda: create_setup(NO_SPLITS), TypeError, r"load_data .*Splits.*\(\[\]"),
    (lambda: with_data(iter(EXAMPLES)), TypeError, "only once"),
    (lambda: with_data({"x": np.ones(3)}), TypeError, r"train .*'x'.*Arrays\("),
    (lambda: with_data(Forever([])), ValueError, "train has no examples"),
    (lambda: with_data(EXAMPLES, Forever(EXAMPLES)), TypeError, "eval must be"),
    (lambda: create_setup(NO_DATA), ValueError, "config.data is missing"),
    (lambda: take_batch(SQUARE), ValueError, r"differ .*inputs: shape \(8,\)"),
    # Labels of the built-in tasks.
    (lambda: label(np.int32(7)), ValueError, r"config\.data: .*\[0, 3\).* 7"),
    (lambda: label(np.int32(-1)), ValueError, r"\[0, 3\).* -1"),
    (lambda: label(np.float32(1)), ValueError, "integers.*float"),
    # Configs.
    (lambda: create_setup(task=WIDHT), ValueError, rf"\('{TASK}'\).*'widht'"),
    (lambda: create_setup(task=TASK, data="digits"), ValueError, "config.data"),
    (lambda: create_setup(task=TASK, model="cnn"), ValueError, "model.*Task"),
    (lambda: create_setup(task=TASK, **BEST), ValueError, "best_.*'eval_loss'"),
    (lambda: create_setup(task="<a.B>"), ValueError, "'<a.B>'.*argument task"),
  ],
)
def test_mistakes(call, error, words):
  with pytest.raises(error, match=words):
    call()


class WithPolicy(Task):
  def __init__(self, policy):
    del policy


NO_COLLECTIONS = with_result(lambda loss, aux: (loss, tasks.Aux(aux.metrics)))
SCALARS = with_result(
  lambda loss, aux: (loss, aux.replace(metrics={"loss": loss}))
)
BFLOAT16 = {"precision": "mixed_bfloat16"}


@pytest.mark.parametrize(
  ("task", "fields", "warning"),
  [
    (NO_COLLECTIONS, {}, r"Changed\.loss.* lacks counts"),
    (SCALARS, {"batch_size": 5}, "scalars: loss.*batch_size=5"),
    (SCALARS, {"batch_size": 4}, None),  # the evaluation is not padded
    (Task(), BFLOAT16, r"'mixed_bfloat16'.*Task\.create_model"),
    (None, {"task": f"{_THIS}:WithPolicy", **BFLOAT16}, None),
  ],
)
def test_warnings(task, fields, warning):
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always", UserWarning)
    create_setup(task, **fields)
  told = [str(w.message) for w in caught if w.category is UserWarning]
  assert len(told) == (warning is not None)
  assert re.search(warning or "", "".join(told))


class WithoutClasses(Task):
  """Its data has no classes, and its constructor has a default number."""

  def __init__(self, num_classes=3):
    self.num_classes = num_classes


def test_a_task_with_its_own_data_keeps_its_default_number_of_classes():
  setup = create_setup(task=f"{_THIS}:WithoutClasses")
  assert setup.task.task.num_classes == 3


@pytest.mark.slow
def test_language_modeling_weights_tokens():
  task = tasks.adapt(tasks.LanguageModeling(num_classes=4))
  example = {
    "inputs": np.zeros(3, np.int32),
    "labels": np.array([0, 1, -100], np.int32),
    "weights": np.array([1, 1, 0], np.float32),
  }
  batch = task.collate([example, example])
  assert batch["labels"].tolist() == [[0, 1, 0]] * 2
  logits = jnp.log(jnp.array([[0.5, 0.3, 0.1, 0.1]] * 6).reshape(2, 3, 4))
  apply_fn = lambda params, x, rngs: (logits, {})
  mean = -(np.log(0.5) + np.log(0.3)) / 2
  loss, aux = task.loss(apply_fn, {}, batch, {}, True)
  assert float(loss) == pytest.approx(mean)
  batch["mask"] = np.array([True, False])
  _, aux = task.loss(apply_fn, {}, jax.tree.map(jnp.asarray, batch), {}, False)
  metrics = task.metrics.single_from_model_output(**aux.metrics)
  assert int(metrics.loss.count) == 2
  assert metrics.compute()["loss"] == pytest.approx(mean)
  assert metrics.compute()["accuracy"] == 0.5
