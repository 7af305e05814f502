"""Mistakes in a task are errors that name it, before anything is compiled."""

import re
import warnings

from clu import metrics as clu_metrics
import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_tasks
from small_tasks import config
from small_tasks import Forever
import tiny

from flaxshard import data
from flaxshard import tasks
from flaxshard.train import evaluation
from flaxshard.train.evaluation import check_numbers

_THIS = "mistaken_tasks"


@pytest.fixture(scope="module", autouse=True)
def importable():
  """Lets configs name the tasks of this file."""
  with tiny.importable(_THIS, __name__):
    yield


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
  evaluation.check_metrics(setup)
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
NO_AUX = with_result(lambda loss, aux: loss)
NO_SCALAR = with_result(lambda loss, aux: (aux.metrics["loss"], aux))
NO_DATA = with_attributes(load_data=None)
NO_NUMBER = {"loss": np.ones(3)}


def with_metrics(metrics):
  create_setup(with_attributes(metrics=metrics))


def with_data(*splits):
  load_data = lambda self: data.Splits(*splits)
  create_setup(with_attributes(load_data=load_data))


def label(value):
  examples = [{"labels": np.int32(0)}, {"labels": value}]
  tasks.Classification(3).collate(examples)


TASK = f"{_THIS}:Task"
WIDHT = {"name": TASK, "widht": 3}
CNN = {"name": "cnn"}
STOP = {"early_stopping": {"metric": "eval_los", "mode": "min"}}
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
    (lambda: check_numbers("a.b", NO_NUMBER), ValueError, r"loss .*64\[3\]"),
    # Data of tasks.
    (lambda: with_data(iter(EXAMPLES)), TypeError, "only once"),
    (lambda: with_data(Forever([])), ValueError, "train has no examples"),
    (lambda: with_data(3), TypeError, "train must be a sequence"),
    (lambda: with_data(EXAMPLES, Forever(EXAMPLES)), TypeError, "eval must be"),
    (lambda: create_setup(NO_DATA), ValueError, "config.data is missing"),
    # Labels of the built-in tasks.
    (lambda: label(np.int32(7)), ValueError, r"config\.data: .*\[0, 3\).* 7"),
    (lambda: label(np.int32(-1)), ValueError, r"\[0, 3\).* -1"),
    (lambda: label(np.float32(1)), ValueError, "integers.*float"),
    # Configs.
    (lambda: create_setup(task=WIDHT), ValueError, rf"\('{TASK}'\).*'widht'"),
    (lambda: create_setup(task=TASK, data="digits"), ValueError, "config.data"),
    (lambda: create_setup(task=TASK, model=CNN), ValueError, "model.*Task"),
    (lambda: create_setup(task=TASK, **BEST), ValueError, "best_.*'eval_loss'"),
    (lambda: create_setup(task=TASK, **STOP), ValueError, "early.*'eval_loss'"),
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


class Moded(nn.Module):
  @nn.compact
  def __call__(self, x, train):
    # A bool, not a tracer: only then may it choose what is computed.
    return nn.Dense(2 if train in (True, False) else 0)(x)


class ByPosition(Task):
  """Flax passes static arguments by position only."""

  def create_model(self):
    jitted = nn.jit(Moded, static_argnums=(2,))
    return nn.remat(jitted, static_argnums=(2,))()

  def init_inputs(self, batch):
    return batch["inputs"], False

  def loss(self, apply_fn, params, batch, rngs, train):
    call = lambda params, x: apply_fn(params, x, train)
    return super().loss(call, params, batch, rngs, train)


def test_the_mode_may_be_passed_by_position():
  create_setup(ByPosition())


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
  metrics = task.update_metrics(
    task.metrics.empty(), aux.metrics, mask=batch["mask"]
  )
  assert int(metrics.loss.count) == 2
  assert metrics.compute()["loss"] == pytest.approx(mean)
  assert metrics.compute()["accuracy"] == 0.5
