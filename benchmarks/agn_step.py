"""The train step of AGN's benchmarks, and the traffic of its program."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any
import warnings

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import flaxshard as fs

REPLICAS = 8
PERIODS = (1, 4, 10, 40)
COMMITS = ("sequential", "mean", "sum")
# Number of steps in a timed block: whole periods of every variant.
BLOCK = max(PERIODS)

_KINDS = (
  "all-reduce",
  "all-gather",
  "all-to-all",
  "collective-permute",
  "reduce-scatter",
)


class Mlp(nn.Module):
  """Hidden layers of equal width, and ten logits."""

  features: int
  layers: int

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns ten logits."""
    for _ in range(self.layers):
      x = nn.relu(nn.Dense(self.features)(x))
    return nn.Dense(10)(x)


def step(state: Any, batch: Any) -> Any:
  """Returns the state after a step on a batch, and the loss."""

  def loss_fn(params: Any) -> jax.Array:
    logits = state.apply_fn({"params": params}, batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return losses.mean()

  loss, grads = state.value_and_grad(loss_fn)
  return state.apply_gradients(grads=grads), loss


def create(
  strategy: fs.Strategy, model: Any, tx: Any, wrapper: Any, seed: int = 0
) -> Any:
  """Returns a train state of the model with one wrapper."""
  params = _init(model, seed)
  # AGN warns of short periods, which are intended here.
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    return fs.TrainState.create(
      apply_fn=model.apply,
      params=params,
      tx=tx,
      wrappers=[wrapper],
      strategy=strategy,
    )


@functools.partial(jax.jit, static_argnums=0)
def _init(model: Any, seed: int) -> Any:
  return model.init(jax.random.key(seed), jnp.zeros((1, 64)))["params"]


def print_head(line: str) -> None:
  """Prints the head of a table."""
  print(f"{line}\n{re.sub(r'[^|]', '-', line)}")


def num_bytes(tree: Any) -> int:
  """Returns the size of all arrays of a tree in bytes."""
  return sum(x.nbytes for x in jax.tree.leaves(tree))


@dataclasses.dataclass(frozen=True)
class Traffic:
  """Bytes that a step moves on one device.

  Attributes:
    operands: Bytes of the operands of its collectives.
    sent: Bytes sent if all collectives go around a ring.
  """

  operands: float = 0.0
  sent: float = 0.0

  def __add__(self, other: Traffic) -> Traffic:
    """Returns the sum of both."""
    return Traffic(self.operands + other.operands, self.sent + other.sent)

  def times(self, count: float) -> Traffic:
    """Returns `count` times this traffic."""
    return Traffic(count * self.operands, count * self.sent)


def traffic(text: str, replicas: int, period: int) -> Traffic:
  """Reads the traffic of a step from the text of its compiled program.

  The body of a loop counts as often as the loop runs. A conditional is a
  commit: its larger branch counts once per period.

  Args:
    text: The compiled program.
    replicas: Number of devices.
    period: Number of steps between commits.
  """
  lines: dict[str, list[str]] = {}
  current = entry = ""
  for line in text.splitlines():
    header = re.match(r"(ENTRY )?%?(\S+) \(.*\{$", line)
    if header:
      current = header[2]
      lines[current] = []
      entry = current if header[1] else entry
    elif " = " in line:
      lines[current].append(line)

  def add_computation(name: str) -> tuple[Traffic, Traffic]:
    """Returns a computation's traffic outside and inside conditionals."""
    always, in_branches = Traffic(), Traffic()
    for line in lines[name]:
      always += _collective(line, replicas)
      count = 1
      if " while(" in line:
        found = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
        if found is None:
          raise ValueError(f"a loop of unknown length: {line.strip()[:200]}")
        count = int(found[1])
      for called in re.findall(r"(?:calls|to_apply|body)=%?([\w.\-]+)", line):
        outside, inside = add_computation(called)
        always += outside.times(count)
        in_branches += inside.times(count)
      branches = re.findall(
        r"(?:true_computation|false_computation)=%?([\w.\-]+)", line
      )
      for some in re.findall(r"branch_computations=\{([^}]*)\}", line):
        branches += [n.strip().lstrip("%") for n in some.split(",")]
      if branches:
        sums = [a + b for a, b in map(add_computation, branches)]
        in_branches += max(sums, key=lambda t: t.operands)
    return always, in_branches

  always, in_branches = add_computation(entry)
  return always + in_branches.times(1 / period)


def _collective(line: str, replicas: int) -> Traffic:
  """Returns the traffic of a line of the program; zeros if no collective."""
  match = re.search(rf" = (.*?) ({'|'.join(_KINDS)})(?:-start)?\(", line)
  if not match:
    return Traffic()
  out = sum(
    (1 if kind == "pred" else int(bits) // 8)
    * int(np.prod([int(n) for n in shape.split(",") if n]))
    for kind, bits, shape in re.findall(
      r"(pred|bf|f|s|u)(\d*)\[([\d,]*)\]", match[1]
    )
  )
  others = replicas - 1
  if match[2] == "all-reduce":
    return Traffic(out, 2 * out * others / replicas)
  # Each device has one part, and passes on all parts but one.
  if match[2] == "all-gather":
    return Traffic(out / replicas, out * others / replicas)
  if match[2] == "all-to-all":
    return Traffic(out, out * others / replicas)
  raise ValueError(f"unknown collective: {line.strip()[:200]}")
