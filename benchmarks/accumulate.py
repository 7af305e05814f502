"""Prints the cost of a step that accumulates gradients of several batches.

  bare         Flax's TrainState, an update for each batch: the reference.
  multi_steps  `optax.MultiSteps` around the optimizer.
  accumulate   flaxshard, `Accumulate`.

A round is the steps of one update, each with its batch. The model is the mlp of
loss_scale.py: 6 layers of 1024, Adam, whose step is mostly memory traffic.

  python benchmarks/accumulate.py --every 4
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
import statistics
from typing import Any

from flax.training import train_state
import jax
import jax.numpy as jnp
import loss_scale
import optax
import timing

import flaxshard as fs


def create_states(problem: loss_scale.Problem, every: int) -> dict[str, Any]:
  """Returns the state of each variant."""
  multi_steps = optax.MultiSteps(problem.tx, every).gradient_transformation()
  return {
    "bare": problem.create(train_state.TrainState),
    "multi_steps": problem.create(train_state.TrainState, tx=multi_steps),
    "accumulate": problem.create(
      fs.TrainState, wrappers=[fs.Accumulate(every)]
    ),
  }


def compile_step(problem: loss_scale.Problem, state: Any) -> Any:
  """Returns the compiled train step, which donates the state."""

  def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
    loss, grads = jax.value_and_grad(problem.loss_fn)(state.params, batch)
    return state.apply_gradients(grads=grads), loss

  jitted = jax.jit(step, donate_argnums=0)
  return jitted.lower(state, problem.batch).compile()


def repeat(
  compiled: Any, state: Any, batch: Any, steps: int
) -> Callable[[], None]:
  """Returns a function that takes `steps` steps, from where it ended."""

  def run() -> None:
    nonlocal state
    for _ in range(steps):
      state, loss = compiled(state, batch)
    jax.block_until_ready((state, loss))

  return run


def main() -> None:
  """Reads the flags, measures, prints."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--every", type=int, default=4, help="batches per update")
  parser.add_argument("--batch-size", type=int, default=64)
  parser.add_argument("--rounds", type=int, default=30)
  args = parser.parse_args()
  problem = loss_scale.mlp(jnp.dtype("float32"), args.batch_size)
  grads = sum(4 * p.size for p in jax.tree.leaves(problem.params))
  temporaries, variants = {}, {}
  for name, state in create_states(problem, args.every).items():
    compiled = compile_step(problem, state)
    temporaries[name] = compiled.memory_analysis().temp_size_in_bytes
    variants[name] = repeat(compiled, state, problem.batch, args.every)
  seconds = timing.rounds(variants, args.rounds)
  print(
    f"JAX {jax.__version__}, optax {optax.__version__}; {args.rounds} rounds "
    f"of {args.every} steps, batch {args.batch_size}, state donated;\n"
    f"bare: {1e3 * statistics.median(seconds['bare']) / args.every:.1f} ms a "
    f"step, {temporaries['bare'] / 1e6:.1f} MB of temporaries. temp: beyond "
    "that, in copies\nof the gradients.\n"
  )
  print("| variant     | median |   quartiles | min/min |  temp |")
  print("|-------------|-------:|------------:|--------:|------:|")
  for name, times in seconds.items():
    low, middle, high = timing.quartiles(times, seconds["bare"])
    least = min(times) / min(seconds["bare"])
    temp = (temporaries[name] - temporaries["bare"]) / grads
    print(
      f"| {name:<11} | {middle:6.2f} | {f'{low:.2f}-{high:.2f}':>11} | "
      f"{least:7.2f} | {temp:+5.2f} |"
    )


if __name__ == "__main__":
  main()
