"""Compares AGN with data parallelism, in cost and in accuracy.

By default it prints traffic, memory and step time for the periods 1, 4, 10 and
40 and for the three commits, on eight virtual CPU devices. The reference is
`CrossShard("mean")`, which reduces the gradients at every step. Whole periods
are timed. In every round all variants are timed in a random order, and the
ratios compare times of the same round.

Four columns are in copies of the parameters, per step and device:

  operands  Operands of all collectives in the compiled program. Those of a
            commit are divided by the period.
  sent      Bytes sent if all collectives go around a ring.
  state     The arguments of the step: parameters, slots, and AGN's own state.
  temp      Temporary memory.

  python benchmarks/agn.py
  python benchmarks/agn.py --accuracy --plot=/tmp/agn_accuracy.png

With `--accuracy` it trains a small network on scikit-learn's digits instead.
"""

from __future__ import annotations

import argparse
import platform
import statistics
from typing import Any
import warnings

import agn_accuracy
from agn_step import BLOCK
from agn_step import COMMITS
from agn_step import create
from agn_step import Mlp
from agn_step import num_bytes
from agn_step import PERIODS
from agn_step import print_head
from agn_step import REPLICAS
from agn_step import step
from agn_step import traffic
import jax
import numpy as np
import optax
from timing import quartiles
from timing import rounds

import flaxshard as fs


def measure(args: argparse.Namespace) -> None:
  """Prints a table of costs for each optimizer."""
  strategy = fs.Strategy()
  model = Mlp(args.features, args.layers)
  rng = np.random.default_rng(0)
  batch = strategy.shard_batch(
    {
      "x": rng.normal(size=(args.batch_size, 64)).astype(np.float32),
      "y": rng.integers(0, 10, args.batch_size, dtype=np.int32),
    }
  )
  optimizers = {
    "adam": optax.adam(1e-3),
    "momentum": optax.sgd(1e-3, momentum=0.9),
    "clip_by_global_norm, adam": optax.chain(
      optax.clip_by_global_norm(1.0), optax.adam(1e-3)
    ),
  }
  for name, tx in optimizers.items():
    # All commits and periods for one optimizer, a few for the others.
    is_full = name == "adam"
    variants: dict[str, tuple[Any, int]] = {
      "data parallel": (fs.CrossShard("mean"), 1)
    }
    for commit in COMMITS if is_full else ("sequential", "mean"):
      for period in PERIODS if is_full else (10,):
        wrapper = fs.AGN(communication_period=period, commit=commit)
        variants[f"{commit}, {period}"] = wrapper, period
    _compare(args, name, strategy, model, tx, batch, variants)


def _compare(
  args: argparse.Namespace,
  name: str,
  strategy: fs.Strategy,
  model: Any,
  tx: Any,
  batch: Any,
  variants: dict[str, tuple[Any, int]],
) -> None:
  """Prints a table with one row for each variant (wrapper, period)."""
  states, compiled, numbers = {}, {}, {}
  for variant, (wrapper, period) in variants.items():
    state = create(strategy, model, tx, wrapper)
    copy = num_bytes(state.params)
    run = strategy.jit(step, donate_argnums=0)
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")
      program = run.lower(state, batch).compile()
      states[variant], _ = run(state, batch)
    compiled[variant] = run
    step_traffic = traffic(program.as_text(), REPLICAS, period)
    memory = program.memory_analysis()
    numbers[variant] = (
      step_traffic.operands / copy,
      step_traffic.sent / copy,
      memory.argument_size_in_bytes / copy,
      memory.temp_size_in_bytes / copy,
    )

  def advance(variant: str) -> None:
    state = states[variant]
    for _ in range(BLOCK):
      state, _ = compiled[variant](state, batch)
    states[variant] = jax.block_until_ready(state)

  times = rounds({v: lambda v=v: advance(v) for v in variants}, args.rounds)
  first = statistics.median(times["data parallel"]) / BLOCK
  print(
    f"{name}: {copy / 1e6:.2f} MB of parameters; the data parallel step takes "
    f"{1e3 * first:.2f} ms (median).\n"
  )
  row = "| {:>17} | {:>8} | {:>6} | {:>5} | {:>5} | {:>5} | {:>11} |".format
  head = "commit, period", "operands", "sent", "state", "temp", "time"
  print_head(row(*head, "quartiles"))
  for variant, seconds in times.items():
    low, middle, high = quartiles(seconds, times["data parallel"])
    print(
      row(
        variant,
        *(f"{x:.3f}" for x in numbers[variant][:2]),
        *(f"{x:.2f}" for x in numbers[variant][2:]),
        f"{middle:.2f}",
        f"{low:.2f}-{high:.2f}",
      )
    )
  print()


def main() -> None:
  """Reads the flags, measures, prints."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--rounds", type=int, default=12)
  parser.add_argument("--features", type=int, default=384)
  parser.add_argument("--layers", type=int, default=3)
  parser.add_argument("--batch_size", type=int, default=64)
  parser.add_argument("--accuracy", action="store_true")
  parser.add_argument("--seeds", type=int, default=3)
  parser.add_argument(
    "--plot", default="", help="path of a PNG, with --accuracy"
  )
  args = parser.parse_args()
  jax.config.update("jax_num_cpu_devices", REPLICAS)
  print(
    f"{REPLICAS} replicas, {jax.devices()[0].device_kind}, JAX "
    f"{jax.__version__}, Python {platform.python_version()}\n"
  )
  if args.accuracy:
    agn_accuracy.accuracy(args)
    agn_accuracy.trade_off(args)
  else:
    measure(args)


if __name__ == "__main__":
  main()
