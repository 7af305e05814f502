"""Prints the cost that loss scaling adds to a training step.

It prints one table per model, with a row for each way to skip the steps that
overflow:

  bare             Flax's TrainState, no scaling and no check: the reference.
  loss_scale       flaxshard, `LossScale("dynamic")`.
  dynamic_scale    Flax's `DynamicScale`, used as in Flax's ImageNet example.
  jmp              The pattern of jmp's `DynamicLossScale`, rewritten here.
  apply_if_finite  `optax.apply_if_finite` around the optimizer, no scaling.

The steps of a model are compiled ahead, warmed up, and timed in rounds, each in
a new random order. Other programs slow a whole round down, which hardly changes
the ratios to the bare step of the same round.

  python benchmarks/loss_scale.py --models mlp --precision float16
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
import functools
import platform
import random
import statistics
import time
from typing import Any, NamedTuple

from flax import linen as nn
from flax import struct
from flax.training import train_state
from flax.training.dynamic_scale import DynamicScale
import jax
import jax.numpy as jnp
import optax

import flaxshard as fs

PyTree = Any


class Problem(NamedTuple):
  """The model, loss, batch and optimizer that every variant trains."""

  params: PyTree
  loss_fn: Callable[[PyTree, PyTree], jax.Array]
  batch: PyTree
  tx: optax.GradientTransformation

  def create(self, state_class: Any, **fields: Any) -> Any:
    """Returns a new train state, whose buffers can be donated."""
    fields = {"apply_fn": None, "tx": self.tx, **fields}
    state = state_class.create(params=self.params, **fields)
    return jax.tree.map(lambda x: jnp.array(x, copy=True), state)


Step = Callable[[Any, PyTree], tuple[Any, jax.Array]]


# -- Models.


class Mlp(nn.Module):
  """Square layers. With a small batch most of a step is memory traffic."""

  dtype: Any
  features: int = 1024
  layers: int = 6

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns an array of the shape of `x`."""
    for _ in range(self.layers):
      x = nn.relu(nn.Dense(self.features, dtype=self.dtype)(x))
    return x.astype(jnp.float32)


class Transformer(nn.Module):
  """A decoder with layer norm before attention and MLP."""

  dtype: Any
  features: int = 256
  layers: int = 4
  heads: int = 4
  vocab: int = 256

  @nn.compact
  def __call__(self, tokens: jax.Array) -> jax.Array:
    """Returns the logits of the next tokens."""
    embed = nn.Embed(self.vocab, self.features, dtype=self.dtype)
    position = jnp.arange(tokens.shape[1])
    x = embed(tokens)
    x += nn.Embed(tokens.shape[1], self.features, dtype=self.dtype)(position)
    mask = nn.make_causal_mask(tokens)
    for _ in range(self.layers):
      y = nn.LayerNorm(dtype=self.dtype)(x)
      x += nn.MultiHeadDotProductAttention(self.heads, self.dtype)(y, mask=mask)
      y = nn.LayerNorm(dtype=self.dtype)(x)
      y = nn.gelu(nn.Dense(4 * self.features, dtype=self.dtype)(y))
      x += nn.Dense(self.features, dtype=self.dtype)(y)
    return embed.attend(nn.LayerNorm(dtype=self.dtype)(x)).astype(jnp.float32)


class Conv(nn.Module):
  """3x3 convolutions with stride 2 and group norm, then a linear head."""

  dtype: Any
  widths: tuple[int, ...] = (64, 128, 256)
  classes: int = 10

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns logits."""
    for width in self.widths:
      x = nn.Conv(width, (3, 3), strides=2, dtype=self.dtype)(x)
      x = nn.relu(nn.GroupNorm(num_groups=8, dtype=self.dtype)(x))
    x = x.mean((1, 2))
    return nn.Dense(self.classes, dtype=self.dtype)(x).astype(jnp.float32)


def mlp(dtype: Any, batch_size: int | None) -> Problem:
  shape = (batch_size or 64, 1024)
  x, y = (jax.random.normal(jax.random.key(i), shape) for i in (0, 1))
  loss = lambda out, y: ((out - y) ** 2).mean()
  return _problem(Mlp(dtype), x, y, loss, optax.adam(1e-4))


def transformer(dtype: Any, batch_size: int | None) -> Problem:
  tokens = jax.random.randint(jax.random.key(0), (batch_size or 8, 65), 0, 256)
  x, y = tokens[:, :-1], tokens[:, 1:]
  return _problem(Transformer(dtype), x, y, _xent, optax.adamw(1e-4))


def conv(dtype: Any, batch_size: int | None) -> Problem:
  n = batch_size or 32
  x = jax.random.normal(jax.random.key(0), (n, 32, 32, 3))
  y = jax.random.randint(jax.random.key(1), (n,), 0, 10)
  return _problem(Conv(dtype), x, y, _xent, optax.sgd(1e-3, momentum=0.9))


def _xent(logits: jax.Array, y: jax.Array) -> jax.Array:
  return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def _problem(
  model: nn.Module, x: jax.Array, y: jax.Array, loss: Any, tx: Any
) -> Problem:
  def loss_fn(params: PyTree, batch: PyTree) -> jax.Array:
    return loss(model.apply({"params": params}, batch[0]), batch[1])

  params = jax.jit(model.init)(jax.random.key(0), x)["params"]
  return Problem(params, loss_fn, (x, y), tx)


# -- Variants: each returns a state and a step.


def bare(problem: Problem) -> tuple[Any, Step]:
  def step(state: Any, batch: PyTree) -> tuple[Any, jax.Array]:
    loss, grads = jax.value_and_grad(problem.loss_fn)(state.params, batch)
    return state.apply_gradients(grads=grads), loss

  return problem.create(train_state.TrainState), step


def loss_scale(problem: Problem) -> tuple[Any, Step]:
  def step(state: Any, batch: PyTree) -> tuple[Any, jax.Array]:
    return state.minimize(problem.loss_fn, batch)

  return problem.create(fs.TrainState, wrappers=[fs.LossScale("dynamic")]), step


class DynamicScaleState(train_state.TrainState):
  """The state of Flax's ImageNet example."""

  dynamic_scale: DynamicScale


def dynamic_scale(problem: Problem) -> tuple[Any, Step]:
  def step(state: Any, batch: PyTree) -> tuple[Any, jax.Array]:
    grad_fn = state.dynamic_scale.value_and_grad(problem.loss_fn)
    scale, is_fin, loss, grads = grad_fn(state.params, batch)
    new_state = state.apply_gradients(grads=grads)
    select = functools.partial(jnp.where, is_fin)
    new_state = new_state.replace(
      opt_state=jax.tree.map(select, new_state.opt_state, state.opt_state),
      params=jax.tree.map(select, new_state.params, state.params),
      dynamic_scale=scale,
    )
    return new_state, loss

  return problem.create(DynamicScaleState, dynamic_scale=DynamicScale()), step


class JmpState(train_state.TrainState):
  """A state with jmp's scale and its counter of finite steps."""

  scale: jax.Array = struct.field(kw_only=True)
  counter: jax.Array = struct.field(kw_only=True)


def jmp(problem: Problem) -> tuple[Any, Step]:
  period, factor = 2000, 2

  def adjust(scale: jax.Array, counter: jax.Array, finite: jax.Array) -> Any:
    grown = jnp.where(jnp.isfinite(scale * factor), scale * factor, scale)
    up = jnp.where(counter == period - 1, grown, scale)
    scale = jnp.where(finite, up, jnp.maximum(1.0, scale / factor))
    return scale, (counter + 1) % period * finite

  def step(state: Any, batch: PyTree) -> tuple[Any, jax.Array]:
    scaled = lambda p, batch: state.scale * problem.loss_fn(p, batch)
    loss, grads = jax.value_and_grad(scaled)(state.params, batch)
    inverse = 1 / state.scale
    loss, grads = jax.tree.map(lambda x: x * inverse, (loss, grads))
    flags = [jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]
    finite = jnp.stack(flags).all()
    new_state = state.apply_gradients(grads=grads)
    params, opt_state = jax.tree.map(
      functools.partial(jax.lax.select, finite),
      (new_state.params, new_state.opt_state),
      (state.params, state.opt_state),
    )
    scale, counter = adjust(state.scale, state.counter, finite)
    new_state = new_state.replace(
      params=params, opt_state=opt_state, scale=scale, counter=counter
    )
    return new_state, loss

  fields = dict(scale=jnp.float32(2**15), counter=jnp.int32(0))
  return problem.create(JmpState, **fields), step


def apply_if_finite(problem: Problem) -> tuple[Any, Step]:
  tx = optax.apply_if_finite(problem.tx, max_consecutive_errors=1000)
  return bare(problem._replace(tx=tx))


MODELS = {f.__name__: f for f in (mlp, transformer, conv)}
VARIANTS = {
  f.__name__: f for f in (bare, loss_scale, dynamic_scale, jmp, apply_if_finite)
}


# -- Measuring.


class Run:
  """A compiled variant with its state and the seconds of each round."""

  def __init__(self, name: str, problem: Problem, donate: bool):
    self.name = name
    self.seconds: list[float] = []
    self.state, step = VARIANTS[name](problem)
    jitted = jax.jit(step, donate_argnums=(0,) if donate else ())
    self.compiled = jitted.lower(self.state, problem.batch).compile()
    cost = self.compiled.cost_analysis() or {}
    memory = self.compiled.memory_analysis()
    self.temp = getattr(memory, "temp_size_in_bytes", float("nan"))
    self.traffic = cost.get("bytes accessed", float("nan"))

  def time(self, batch: PyTree, steps: int) -> float:
    """Returns the seconds per step, of `steps` steps in a row."""
    start = time.perf_counter()
    for _ in range(steps):
      self.state, loss = self.compiled(self.state, batch)
    jax.block_until_ready((self.state, loss))
    return (time.perf_counter() - start) / steps


def measure(
  problem: Problem, names: list[str], rounds: int, steps: int, donate: bool
) -> list[Run]:
  """Times all variants in each round, in a random order."""
  runs = [Run(name, problem, donate) for name in names]
  for run in runs:
    run.time(problem.batch, 3)
  order = random.Random(0)
  for _ in range(rounds):
    for run in order.sample(runs, len(runs)):
      run.time(problem.batch, 1)  # loads its state into the CPU caches
      run.seconds.append(run.time(problem.batch, steps))
  return runs


def report(model: str, runs: list[Run], problem: Problem) -> None:
  """Prints the table of one model."""
  reference = next(run for run in runs if run.name == "bare")
  grads = sum(4 * p.size for p in jax.tree.leaves(problem.params))
  ms = 1e3 * statistics.median(reference.seconds)
  print(
    f"\n{model}: {grads / 1e6:.1f} MB of gradients; the bare step takes "
    f"{ms:.2f} ms (median)\nand {reference.temp / 1e6:.1f} MB of temporaries.\n"
  )
  header = ["variant", "median", "quartiles", "min/min", "temp", "bytes"]
  widths = [15, 6, 11, 7, 6, 6]
  line = lambda cells: (
    f"| {cells[0]:<15} | "
    + " | ".join(
      f"{c:>{w}}" for c, w in zip(cells[1:], widths[1:], strict=True)
    )
    + " |"
  )
  print(line(header))
  print("|" + "|".join("-" * (w + 1) + ":" for w in widths) + "|")
  for run in runs:
    ratios = [
      a / b for a, b in zip(run.seconds, reference.seconds, strict=True)
    ]
    low, middle, high = statistics.quantiles(ratios, n=4)
    cells = [
      run.name,
      f"{middle:.2f}",
      f"{low:.2f}-{high:.2f}",
      f"{min(run.seconds) / min(reference.seconds):.2f}",
      f"{(run.temp - reference.temp) / grads:+.2f}",
      f"{run.traffic / reference.traffic:.2f}",
    ]
    print(line(cells))


def main() -> None:
  """Reads the flags, measures, prints."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  add = parser.add_argument
  add("--models", nargs="+", choices=MODELS, default=list(MODELS))
  add("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
  precisions = ("float32", "float16", "bfloat16")
  add(
    "--precision",
    choices=precisions,
    default="float32",
    help="dtype of computations",
  )
  add("--batch-size", type=int, help="default: depends on the model")
  add("--rounds", type=int, default=50)
  add("--steps", type=int, default=5, help="timed steps in a row, per round")
  add("--donate", action=argparse.BooleanOptionalAction, default=True)
  args = parser.parse_args()
  # With asynchronous dispatch on CPU, steps with a host callback run
  # differently from those without. Dispatch all of them in the same way.
  jax.config.update("jax_cpu_enable_async_dispatch", False)

  names = list(dict.fromkeys(["bare", *args.variants]))
  device = jax.devices()[0]
  print(
    f"{device.device_kind} ({device.platform}), JAX {jax.__version__}, "
    f"Python {platform.python_version()}; {args.precision} compute,\n"
    f"state {'' if args.donate else 'not '}donated; {args.rounds} rounds of "
    f"{args.steps} steps. median, quartiles: of the ratios to\nthe bare step "
    "in the same round; min/min: of the fastest rounds; temp: temporary\n"
    "memory beyond the bare step's, in sizes of the gradients; bytes: XLA's "
    "estimate of\nthe bytes accessed, over the bare step's."
  )
  for model in args.models:
    problem = MODELS[model](jnp.dtype(args.precision), args.batch_size)
    runs = measure(problem, names, args.rounds, args.steps, args.donate)
    report(model, runs, problem)


if __name__ == "__main__":
  main()
