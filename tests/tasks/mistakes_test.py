"""Mistakes in a task are errors that name it, before anything is compiled."""

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
import tiny

from flaxshard import data
from flaxshard import tasks
from flaxshard.train import evaluation

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

  def loss(self, apply_fn, params, batch, rngs, train):
    raise NotImplementedError


# Its fields are strings, as with `from __future__ import annotations`.
@flax.struct.dataclass
class Strings(clu_metrics.Collection):
  loss: "clu_metrics.Average"


NO_CLASS = with_attributes(create_model=lambda self, width: Model())
NO_TUPLE = with_attributes(init_inputs=lambda self, batch: batch["inputs"])
NO_ROWS = with_attributes(collate=lambda self, xs: {"inputs": np.ones(2)})
NO_AUX = with_result(lambda loss, aux: loss)
NO_SCALAR = with_result(lambda loss, aux: (aux.metrics["loss"], aux))


@pytest.mark.parametrize(
  ("task", "kind", "facts"),
  [
    (Task, TypeError, "class .*task=Task()"),
    (NoMetrics(), ValueError, "NoMetrics .*'metrics'.*'matrics'"),
    (with_attributes(metrics=Collected), TypeError, "Collected .*merged"),
    (with_attributes(metrics=Strings), TypeError, "Strings .*strings"),
    (with_attributes(metrics=dict), TypeError, "metrics .*builtins.dict"),
    (NO_CLASS, TypeError, "Changed.create_model.*'width'"),
    (NO_TUPLE, TypeError, r"Changed.init_inputs .*tuple.*float32\[1,2\]"),
    (NO_ROWS, ValueError, r"Changed.load_data.* collate .*\[2\]"),
    (NO_AUX, TypeError, "loss .*Aux"),
    (NO_SCALAR, ValueError, r"scalar.*float32\[8\]"),
    (with_attributes(load_data=None), ValueError, "config.data is missing"),
  ],
)
def test_a_mistaken_task_raises(task, kind, facts):
  with pytest.raises(kind, match=facts):
    create_setup(task)


_TASK = f"{_THIS}:Task"
_STOP = {"metric": "eval_los", "mode": "min"}


@pytest.mark.parametrize(
  ("fields", "facts"),
  [
    ({"task": {"name": _TASK, "widht": 3}}, rf"task \('{_TASK}'\).*'widht'"),
    ({"task": _TASK, "data": "digits"}, "config.data"),
    ({"task": _TASK, "model": {"name": "cnn"}}, "model.*Task.create_model"),
    (
      {"task": _TASK, "best_metric": "eval_los", "best_mode": "min"},
      "config.best_metric='eval_los'.*'eval_loss'",
    ),
    (
      {"task": _TASK, "early_stopping": _STOP},
      "config.early_stopping.metric='eval_los'.*'eval_loss'",
    ),
    ({"task": "<a.B>"}, "config.task='<a.B>'.*argument task"),
  ],
)
def test_a_mistaken_config_raises(fields, facts):
  with pytest.raises(ValueError, match=facts):
    create_setup(**fields)


def test_a_task_is_given_once():
  with pytest.raises(ValueError, match=r"config\.task=.*task=.*Task"):
    create_setup(Task(), task="language_modeling")


def test_collections_that_the_aux_lacks_warn():
  task = with_result(lambda loss, aux: (loss, tasks.Aux(aux.metrics)))
  with pytest.warns(UserWarning, match=r"Changed\.loss.* lacks counts"):
    create_setup(task)


def test_scalar_metrics_warn_if_the_evaluation_is_padded():
  task = with_result(
    lambda loss, aux: (loss, aux.replace(metrics={"loss": loss}))
  )
  create_setup(task)
  with pytest.warns(UserWarning, match=r"scalars: loss.*batch_size=5"):
    create_setup(task, batch_size=5)


class WithPolicy(Task):
  def __init__(self, policy):
    del policy


def test_a_precision_that_no_model_takes_warns():
  with pytest.warns(UserWarning, match=r"'mixed_bfloat16'.*Task\.create_model"):
    create_setup(Task(), precision="mixed_bfloat16")
  with warnings.catch_warnings(action="error", category=UserWarning):
    create_setup(task=f"{_THIS}:WithPolicy", precision="mixed_bfloat16")


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


# Flax passes static arguments by position only.
Transformed = nn.remat(nn.jit(Moded, static_argnums=(2,)), static_argnums=(2,))


@pytest.mark.parametrize("model", [Moded, Transformed])
def test_the_mode_may_be_passed_by_position(model):
  class ByPosition(Task):
    def create_model(self):
      return model()

    def init_inputs(self, batch):
      return batch["inputs"], False

    def loss(self, apply_fn, params, batch, rngs, train):
      call = lambda params, x: apply_fn(params, x, train)
      return super().loss(call, params, batch, rngs, train)

  create_setup(ByPosition())


@pytest.mark.parametrize(
  "task", [tasks.Classification(3), tasks.LanguageModeling(3)]
)
@pytest.mark.parametrize(
  ("label", "facts"),
  [
    (np.int32(7), r"\[0, 3\).* 7"),
    (np.int32(-1), r"\[0, 3\).* -1"),
    (np.float32(1), "integers.*float"),
  ],
)
def test_labels_are_checked_by_the_built_in_tasks(task, label, facts):
  with pytest.raises(ValueError, match=rf"^config\.data: .*{facts}"):
    task.collate([{"labels": np.int32(0)}, {"labels": label}])


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


def test_a_metric_that_is_no_number_raises():
  with pytest.raises(ValueError, match=r"Task\.metrics: loss .*float64\[3\]"):
    evaluation.check_numbers("Task.metrics", {"loss": np.ones(3)})
