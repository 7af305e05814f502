"""A custom task: its own loss, metrics, collections, data and evaluation."""

from clu import metrics as clu_metrics
import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from flaxshard import data
from flaxshard import tasks
from flaxshard import train

_THIS = "custom_task"


@pytest.fixture(scope="module", autouse=True)
def importable():
  """Lets configs name the tasks of this file."""
  with tiny.importable(_THIS, __name__):
    yield


@flax.struct.dataclass
class Metrics(clu_metrics.Collection):
  loss: clu_metrics.Average.from_output("loss")
  distance: clu_metrics.Average.from_output("distance")


class Noisy(nn.Module):
  """Batch normalization, a stream of its own, and a sown loss."""

  width: int

  @nn.compact
  def __call__(self, x, scale, *, train):
    x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(x) * scale
    if train:
      x = x + 0.01 * jax.random.normal(self.make_rng("noise"), x.shape)
    self.sow("losses", "size", (x**2).mean())
    return nn.Dense(self.width)(x)


class Regression:
  """Predicts `target` of `x` and `scale`."""

  metrics = Metrics

  def __init__(self, weight=0.0, size=40):
    self._weight, self._size = weight, size

  def create_model(self, example):
    return Noisy(width=example["target"].shape[0])

  def init_inputs(self, batch):
    return batch["x"], batch["scale"]

  def loss(self, apply_fn, params, batch, rngs, train):
    outputs, collections = apply_fn(
      params, batch["x"], batch["scale"], rngs=rngs, mutable=("losses",)
    )
    sown = collections.pop("losses")["size"][0]
    errors = (outputs - batch["target"]) ** 2
    loss = errors.mean() + self._weight * sown
    values = {"loss": errors.mean(-1), "distance": jnp.sqrt(errors.sum(-1))}
    return loss, tasks.Aux(values, collections)

  def load_data(self):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(self._size, 3)).astype(np.float32)
    target = x @ np.array([[1.0, 2], [0, 1], [3, 0]], np.float32)
    examples = [
      {"x": a, "scale": np.ones(1, np.float32), "target": b}
      for a, b in zip(x, target, strict=True)
    ]
    return data.Splits(examples[10:], examples[:10])


def config(**fields):
  values = tiny.config(precision="float32", wrappers=(), num_train_steps=8)
  del values.model, values.data
  values.learning_rate = 0.3
  return {
    **values,
    "num_train_steps": 40,
    "log_every_steps": 10,
    "batch_size": 8,
    "eval_every_steps": 20,
    "checkpoint_every_steps": 20,
    **fields,
  }


def test_a_task_object_trains(tmp_path):
  state = train.train_and_evaluate(config(), str(tmp_path), Regression())
  rows = tiny.rows(tmp_path)
  assert rows[-1]["eval_loss"] < 0.2 * rows[1]["train_loss"]
  assert {"train_distance", "eval_distance"} <= set(rows[-1])
  stats = state.batch_stats["BatchNorm_0"]
  assert not np.allclose(stats["mean"], 0)


def test_config_names_a_task_with_arguments(tmp_path):
  task = {"name": f"{_THIS}:Regression", "size": 30}
  train.train_and_evaluate(config(task=task, num_train_steps=2), str(tmp_path))
  assert "eval_distance" in tiny.rows(tmp_path)[-1]
