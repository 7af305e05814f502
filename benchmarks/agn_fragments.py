"""Measures AGN with fragments and delay: `benchmarks/agn.py --fragments`.

A network with several layers, so that parameters can be divided. The peak is
the largest commit of one step, in bytes of gradients.
"""

from __future__ import annotations

import argparse
from typing import Any
import warnings

import agn_accuracy
from agn_step import create
from agn_step import Mlp
from agn_step import print_head
from agn_step import step
import numpy as np
import optax

import flaxshard as fs
from flaxshard import compiled

MODEL = Mlp(64, 4)
STEPS, SIZE = 1200, 64
RATES = (2e-3, 1e-2)
SETTINGS: tuple[dict[str, Any], ...] = (
  {},
  {"fragments": 4},
  {"delay": 5},
  {"delay": 5, "blend": 0.5},
  {"fragments": 4, "delay": 5, "blend": 0.5},
  {"fragments": 4, "delay": 5, "blend": 0.5, "commit_dtype": "int8"},
)
_DILOCO = {
  "outer_tx": optax.sgd(0.7, momentum=0.9, nesterov=True),
  "commit_delta": True,
}


def fragments(args: argparse.Namespace) -> None:
  """Prints accuracies and the bytes of the largest commit.

  Of two learning rates it shows the one with the higher accuracy at the end.
  """
  strategy = fs.Strategy()
  print(
    f"An MLP of 4 x 64, digits, Adam, {STEPS} steps of {SIZE} examples over "
    f"{strategy.num_replicas_in_sync} replicas, {args.seeds} seeds.\n"
  )
  row = "| {:>6} | {:>6} | {:>9} | {:>5} | {:>5} | {:>5} | {:>7} ".format
  row2 = "| {:>7} | {:>5} | {:>5} | {:>11} |".format
  print_head(
    row("commit", "period", "fragments", "delay", "blend", "dtype", "peak kB")
    + row2("MB sent", "rate", "mean", "min-max")
  )
  for name, common in (("mean", {}), ("DiLoCo", _DILOCO)):
    for period in (10, 40):
      for settings in SETTINGS:
        wrapper = fs.AGN(period, "mean", **common, **settings)
        peak, sent = _bytes(strategy, wrapper)
        accuracies, rate = _best(strategy, wrapper, args.seeds)
        print(
          row(
            name,
            period,
            wrapper.fragments,
            wrapper.delay,
            f"{wrapper.blend:g}",
            wrapper.commit_dtype or "f32",
            f"{peak / 1e3:.1f}",
          )
          + row2(
            f"{sent * STEPS / 1e6:.2f}",
            f"{rate:g}",
            f"{accuracies.mean():.3f}",
            f"{accuracies.min():.3f}-{accuracies.max():.3f}",
          ),
          flush=True,
        )
  print()


def _best(
  strategy: fs.Strategy, wrapper: Any, seeds: int
) -> tuple[np.ndarray, float]:
  """Returns the last accuracy of each seed at the better rate, and the rate."""
  results = []
  for rate in RATES:
    tx = optax.adam(rate)
    last = [
      agn_accuracy.train(
        strategy,
        tx,
        wrapper,
        seed=seed,
        steps=STEPS,
        size=SIZE,
        every=STEPS,
        model=MODEL,
      )[-1][0]
      for seed in range(seeds)
    ]
    results.append((np.array(last), rate))
  return max(results, key=lambda result: result[0].mean())


def _bytes(strategy: fs.Strategy, wrapper: Any) -> tuple[float, float]:
  """Returns the bytes of the largest collective, and those sent in a step."""
  state = create(strategy, MODEL, optax.adam(1e-3), wrapper)
  batch = strategy.shard_batch(
    {"x": np.zeros((64, 64), np.float32), "y": np.zeros(64, np.int32)}
  )
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    program = strategy.jit(step).lower(state, batch).compile()
  found = compiled.collectives(program, strategy.mesh)
  commits = [c for c in found if c.in_commit]
  period = wrapper.communication_period
  sent = sum(c.link_bytes * c.executions_per_step(period) for c in commits)
  return max(c.operand_bytes for c in commits), sent
