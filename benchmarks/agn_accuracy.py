"""Measures AGN's accuracy: `python benchmarks/agn.py --accuracy`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
import dataclasses
from typing import Any
import warnings

from agn_step import BLOCK
from agn_step import COMMITS
from agn_step import create
from agn_step import Mlp
from agn_step import PERIODS
from agn_step import print_head
from agn_step import REPLICAS
from agn_step import step
from agn_step import Traffic
from agn_step import traffic
import jax
import numpy as np
import optax

import flaxshard as fs
from flaxshard import data

# One object, so that compiled functions are found in their caches.
MODEL = Mlp(64, 1)


@dataclasses.dataclass(frozen=True)
class Digits:
  """scikit-learn's digits, as rows of 64 pixels."""

  splits: data.Splits = dataclasses.field(default_factory=data.digits)

  def batches(self, seed: int, steps: int, size: int) -> Any:
    """Returns arrays [steps, size, ...] from shuffled epochs."""
    inputs, labels = _rows(self.splits.train)
    rng = np.random.default_rng(seed)
    epochs = -(-steps * size // len(labels))
    order = [rng.permutation(len(labels)) for _ in range(epochs)]
    chosen = np.concatenate(order)[: steps * size].reshape(steps, size)
    return {"x": inputs[chosen], "y": labels[chosen]}

  def evaluate(self, state: Any) -> tuple[float, float]:
    """Returns the held-out accuracy and loss of the center."""
    inputs, labels = _rows(self.splits.eval)
    logits = np.asarray(state.apply_fn({"params": state.params}, inputs))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return (logits.argmax(-1) == labels).mean(), float(losses.mean())


def _rows(source: Any) -> tuple[np.ndarray, np.ndarray]:
  labels = np.asarray(source.labels, np.int32)
  return np.asarray(source.inputs).reshape(len(labels), 64), labels


def train(
  strategy: fs.Strategy,
  tx: Any,
  wrapper: Any,
  *,
  seed: int,
  steps: int,
  size: int,
  every: int,
) -> list[tuple[float, float]]:
  """Trains; returns held-out accuracy and loss after every `every` steps."""
  digits = Digits()
  state = create(strategy, MODEL, tx, wrapper, seed)
  batches = digits.batches(seed, steps, size)
  results = []
  for start in range(0, steps, every):
    # Each replica takes its rows of each batch.
    part = strategy.shard_batch(
      {key: x[start : start + every] for key, x in batches.items()},
      spec=jax.P(None, "replica"),
    )
    state, _ = strategy.run_steps(
      step, state, part, reduce="mean", donate_state=True
    )
    results.append(digits.evaluate(state))
  return results


def _diloco(period: int) -> fs.AGN:
  outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
  return fs.AGN(period, "mean", outer_tx=outer, commit_delta=True)


def accuracy(args: argparse.Namespace) -> None:
  """Prints accuracies for all commits and periods, with equally long runs.

  Of two learning rates it shows the one with the higher accuracy, on average
  over the run.
  """
  strategy = fs.Strategy()
  steps, size = 1200, 64
  makers: dict[str, Callable[[int], Any]] = {
    "data parallel": lambda period: fs.CrossShard("mean"),
    **{c: lambda period, c=c: fs.AGN(period, c) for c in COMMITS},
    "DiLoCo": _diloco,
  }
  print(
    f"An MLP of 64, digits, Adam, {steps} steps of {size} examples over "
    f"{REPLICAS} replicas, {args.seeds} seeds.\n"
  )
  row = "| {:>14} | {:>6} | {:>6} | {:>7} | {:>6} | {:>13} | {:>8} |".format
  head = "commit", "period", "rate", "MB sent", "mean", "min-max"
  print_head(row(*head, "MB to .95"))
  curves = {}
  for name, make_wrapper in makers.items():
    per_step = _step_traffic(strategy, make_wrapper(1))
    for period in (1,) if name == "data parallel" else PERIODS:
      sent = per_step.sent / period / 1e6
      best: Any = None
      for rate in (2e-3, 1e-2):
        wrapper, tx = make_wrapper(period), optax.adam(rate)
        results = np.array(
          [
            train(
              strategy, tx, wrapper, seed=s, steps=steps, size=size, every=BLOCK
            )
            for s in range(args.seeds)
          ]
        )
        average = results[..., 0].mean()
        if best is None or average > best[0]:
          best = average, rate, results[..., 0]
      _, rate, accuracies = best
      mean, last = accuracies.mean(0), accuracies[:, -1]
      sent_at = sent * BLOCK * np.arange(1, len(mean) + 1)
      curves[name, period] = sent_at, mean
      sent_to_95 = sent_at[mean >= 0.95]
      print(
        row(
          name,
          period,
          f"{rate:g}",
          f"{sent_at[-1]:.2f}",
          f"{last.mean():.3f}",
          f"{last.min():.3f}-{last.max():.3f}",
          f"{sent_to_95[0]:.2f}" if sent_to_95.size else "-",
        ),
        flush=True,
      )
  print()
  if args.plot:
    plot(curves, args.plot)


def _step_traffic(strategy: fs.Strategy, wrapper: Any) -> Traffic:
  """Returns the traffic of a step with a commit."""
  state = create(strategy, MODEL, optax.adam(1e-3), wrapper)
  batch = strategy.shard_batch(
    {"x": np.zeros((64, 64), np.float32), "y": np.zeros(64, np.int32)}
  )
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    program = strategy.jit(step).lower(state, batch).compile()
  return traffic(program.as_text(), REPLICAS, 1)


def plot(curves: dict[tuple[str, int], Any], path: str) -> None:
  """Plots accuracy over the traffic of a device, one panel per commit."""
  from matplotlib import figure

  names = (*COMMITS, "DiLoCo")
  fig = figure.Figure(figsize=(9, 6.2), layout="constrained")
  panels = fig.subplots(2, 2, sharex=True, sharey=True).flat
  colors = ("#8c2d04", "#e6843c", "#3f8fbf", "#123a6b")
  for ax, name in zip(panels, names, strict=True):
    ax.plot(
      *curves["data parallel", 1], color="0.6", lw=3, label="data parallel"
    )
    for period, color in zip(PERIODS, colors, strict=True):
      ax.plot(*curves[name, period], color=color, label=f"period {period}")
    ax.set(title=name, xscale="log", ylim=(0.5, 1.0))
    ax.grid(color="0.9")
    ax.spines[["top", "right"]].set_visible(False)
  panels[0].legend(frameon=False, loc="lower right")
  fig.supxlabel("MB sent by each device")
  fig.supylabel("held-out accuracy of the center")
  fig.savefig(path, dpi=80)


def trade_off(args: argparse.Namespace) -> None:
  """Prints results of sequential commits for the same number of examples."""
  examples, size = 51200, 16
  print(
    f"Sequential commits, SGD, {size} examples per replica and step; accuracy "
    f"and loss, means of {args.seeds} seeds; div.: worse than guessing.\n"
  )
  for rate in (0.3, 1.0):
    print(f"rate {rate}, {examples} examples:\n")
    row = "| {:>8} | {:>13} | {:>13} | {:>13} | {:>13} |".format
    print_head(row("replicas", *(f"period {p}" for p in PERIODS)))
    tx = optax.sgd(rate)
    for replicas in (1, 2, 4, REPLICAS):
      strategy = fs.Strategy(devices=jax.devices()[:replicas])
      steps = examples // size // replicas
      cells = []
      for period in PERIODS:
        last_results = [
          train(
            strategy,
            tx,
            fs.AGN(period),
            seed=seed,
            steps=steps,
            size=size * replicas,
            every=steps,
          )[-1]
          for seed in range(args.seeds)
        ]
        # Guessing has a loss of log(10), and NaN is not below it.
        diverged = sum(not loss < np.log(10) for _, loss in last_results)
        mean, loss = np.mean(last_results, axis=0)
        cells.append(
          f"{diverged} of {len(last_results)} div."
          if diverged
          else f"{mean:.3f}, {loss:.3f}"
        )
      print(row(replicas, *cells), flush=True)
    print()
