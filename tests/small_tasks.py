"""Small tasks that the tests of tasks train."""

from clu import metrics as clu_metrics
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import tiny

from flaxshard import data
from flaxshard import tasks

average = clu_metrics.Average.from_output
Loss = clu_metrics.Collection.create(loss=average("loss"))
Metrics = clu_metrics.Collection.create(
  loss=average("loss"), distance=average("distance")
)


class Noisy(nn.Module):
  """Batch normalization, a random stream of its own, and a sown loss."""

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
    examples = make_examples(self._size)
    return data.Splits(examples[10:], examples[:10])


def make_examples(size):
  rng = np.random.default_rng(0)
  x = rng.normal(size=(size, 3)).astype(np.float32)
  target = x @ np.array([[1.0, 2], [0, 1], [3, 0]], np.float32)
  return [
    {"x": a, "scale": np.ones(1, np.float32), "target": b}
    for a, b in zip(x, target, strict=True)
  ]


class Forever:
  """A stream: the examples again and again, without a length."""

  def __init__(self, examples):
    self.examples = examples

  def __iter__(self):
    return iter(self.examples)


class Streamed(Regression):
  """Regression on a stream of examples, with an evaluation of its own."""

  def evaluate(self, evaluation):
    # Global arrays: no process can read them whole.
    largest = [
      jnp.where(batch["mask"][:, None], batch["target"], 0).max()
      for batch in evaluation.batches()
    ]
    return {**evaluation.means(), "largest": max(map(float, largest))}

  def load_data(self):
    examples = make_examples(self._size)
    return data.Splits(Forever(examples[10:]), examples[:10])


class Rollouts:
  """Moves the outputs of the model at random inputs towards 1."""

  metrics = Loss

  def __init__(self):
    self.made = []

  def create_model(self):
    return nn.Dense(1, use_bias=False)

  def example(self):
    return {
      "inputs": jax.ShapeDtypeStruct((2,), jnp.float32),
      "target": jax.ShapeDtypeStruct((), jnp.float32),
    }

  def loss(self, apply_fn, params, batch, rngs, train):
    outputs, collections = apply_fn(params, batch["inputs"])
    losses = (outputs[:, 0] - batch["target"]) ** 2
    return losses.mean(), tasks.Aux({"loss": losses}, collections)

  def train_batches(self, stream):
    while True:
      kernel = np.asarray(stream.state().params["kernel"])[:, 0]
      inputs = np.asarray(jax.random.normal(stream.rng, (8, 2)))
      self.made.append(stream.step)
      target = inputs @ kernel + 0.5 * (1 - inputs @ kernel)
      yield {"inputs": inputs, "target": target}


def config(**fields):
  """Returns a config of a task that makes its model and data."""
  values = tiny.config(
    precision="float32",
    wrappers=(),
    batch_size=8,
    learning_rate=0.3,
    num_train_steps=40,
    log_every_steps=10,
    eval_every_steps=20,
    checkpoint_every_steps=20,
    mesh={"replica": 1},
  )
  del values.model, values.data
  return {**values, **fields}
