"""The table and the picture of `links.py`, from its file of results."""

from __future__ import annotations

import json
import math
from typing import Any

import links_methods
from links_methods import METHODS

# The links that are compared, and their names in the table.
LINKS = {
  "1gbit": "1 Gbit/s",
  "100mbit": "100 Mbit/s",
  "10mbit": "10 Mbit/s",
}
# A network without limits, for losses.
UNLIMITED = "unlimited"

Results = dict[tuple[str, str, str], dict[str, Any]]


def report(path: str, plot_path: str) -> None:
  """Prints the tables of all tasks in a file, and plots them.

  Args:
    path: The file of results.
    plot_path: Path of a PNG, or `""`.
  """
  results: Results = {}
  with open(path) as file:
    for line in file:
      result = json.loads(line)
      if "error" not in result and result["method"] in METHODS:
        results[result["task"], result["method"], result["link"]] = result
  tasks = list(dict.fromkeys(task for task, _, _ in results))
  for task in tasks:
    print_table(task, results)
  if plot_path:
    plot(tasks, results, plot_path)


def print_table(task: str, results: Results) -> None:
  """Prints the table of a task, and what was measured of int8 and delays."""
  target = target_loss(task, results)
  print(f"\n{task}: seconds to a held-out loss of {target:.3f}\n")
  head = ["method", "kB a step", "steps to loss"]
  head += [f"{name}: ms a step, s to loss" for name in LINKS.values()]
  print(f"| {' | '.join(head)} |\n| --- |{' --: |' * (len(head) - 1)}")
  for method in METHODS:
    found = [_on_link(task, method, link, results) for link in LINKS]
    if not any(found) or METHODS[method].is_alone:
      continue
    sent = [bytes_per_step(x) for x in found if x]
    steps = steps_to(target, losses(task, method, results))
    cells = [
      method,
      f"{sum(sent) / len(sent) / 1e3:,.0f}",
      "-" if steps is None else str(steps),
    ]
    for result in found:
      if result is None:
        cells.append("")
        continue
      seconds = seconds_per_step(result)
      reached = "-" if steps is None else f"{steps * seconds:,.1f}"
      cells.append(f"{1e3 * seconds:,.0f}, {reached}")
    print(f"| {' | '.join(cells)} |")
  _print_ratios(task, results, target)


def _on_link(
  task: str, method: str, link: str, results: Results
) -> dict[str, Any] | None:
  """Returns the run with the seconds and bytes of a method on a link."""
  measured = METHODS[method].same_seconds_as or method
  return results.get((task, measured, link))


def _print_ratios(task: str, results: Results, target: float) -> None:
  """Prints the goals: times sooner, bytes of int8, and hidden commits."""
  print()
  for method in METHODS:
    same = f"{method}, int8"
    if same in METHODS:
      _print_int8(task, results, target, method, same)
  alone = results.get((task, links_methods.ALONE, UNLIMITED))
  if alone:
    milliseconds = 1e3 * seconds_per_step(alone)
    print(f"Without commits a step takes {milliseconds:,.0f} ms.")
  for link, name in LINKS.items():
    for method in METHODS:
      plain = results.get((task, method, link))
      delayed = results.get((task, f"{method}, delay", link))
      if not (alone and plain and delayed):
        continue
      none, with_delay, without = (
        METHODS[method].period * seconds_per_step(x)
        for x in (alone, delayed, plain)
      )
      # The last one is waited for at the end of the run.
      commits = delayed["commits"][:-1]
      waited = sum(x["waited_seconds"] for x in commits)
      hidden = 1 - waited / sum(x["seconds"] for x in commits)
      print(
        f"{name}, {method}: a period takes {none:.2f} s without commits, "
        f"{without:.2f} s with, {with_delay:.2f} s with delay, where steps run "
        f"in {hidden:.0%} of the time of a commit"
      )


def _print_int8(
  task: str, results: Results, target: float, method: str, same: str
) -> None:
  steps = [steps_to(target, losses(task, m, results)) for m in (method, same)]
  for link, name in LINKS.items():
    pair = [results.get((task, m, link)) for m in (method, same)]
    if not all(pair) or None in steps:
      continue
    whole, quantized = (
      bytes_per_step(result) * count
      for result, count in zip(pair, steps, strict=True)
    )
    print(
      f"{name}, {method}: {whole / 1e6:.2f} MB to the loss, int8 "
      f"{quantized / 1e6:.2f} MB: {quantized / whole:.3f}"
    )


def target_loss(task: str, results: Results) -> float:
  """Returns the loss of data parallelism at the end of its longest run."""
  found = losses(task, "data parallel", results)
  return found[-1][1] if found else math.nan


def losses(task: str, method: str, results: Results) -> list[Any]:
  """Returns `[step, loss]` of the longest run of a method on any links."""
  method = METHODS[method].same_losses_as or method
  runs = [r for (t, m, _), r in results.items() if (t, m) == (task, method)]
  if not runs:
    return []
  return max(runs, key=lambda r: len(r["seconds"]))["losses"]


def steps_to(target: float, found: list[Any]) -> int | None:
  """Returns the first evaluated step with at most this loss, if any."""
  return next((step for step, loss in found if loss <= target), None)


def seconds_per_step(result: dict[str, Any]) -> float:
  """Returns the mean seconds of a step over whole periods but the first."""
  return _per_step(result, "seconds")


def bytes_per_step(result: dict[str, Any]) -> float:
  """Returns the mean bytes that process 0 sends in a step."""
  return _per_step(result, "sent")


def _per_step(result: dict[str, Any], field: str) -> float:
  values = result[field]
  period = METHODS[result["method"]].period
  last = len(values) - len(values) % period
  if last <= period:
    return values[-1] / len(values)
  return (values[last - 1] - values[period - 1]) / (last - period)


def plot(tasks: list[str], results: Results, path: str) -> None:
  """Plots the loss over the seconds, for each task and link."""
  from matplotlib import figure
  from matplotlib import ticker

  fig = figure.Figure(
    figsize=(11, 3.2 * len(tasks) + 0.6), layout="constrained"
  )
  panels = fig.subplots(len(tasks), len(LINKS), squeeze=False, sharey="row")
  labels = {}
  for row, task in zip(panels, tasks, strict=True):
    target = target_loss(task, results)
    for ax, (link, name) in zip(row, LINKS.items(), strict=True):
      ax.axhline(target, color="0.7", lw=1, ls=":")
      for method, (color, style) in links_methods.STYLES.items():
        result = _on_link(task, method, link, results)
        found = losses(task, method, results)
        if not result or not found:
          continue
        seconds = seconds_per_step(result)
        [line] = ax.plot(
          [step * seconds for step, _ in found],
          [loss for _, loss in found],
          color=color,
          ls=style,
          lw=1.6,
        )
        labels.setdefault(method, line)
      ax.set(xscale="log", yscale="log")
      ax.yaxis.set_major_formatter("{x:g}")
      ax.yaxis.set_minor_locator(ticker.LogLocator(subs=(2, 3, 5)))
      ax.yaxis.set_minor_formatter("{x:g}")
      ax.set_title(f"{task}, {name}", fontsize=10)
      ax.grid(color="0.92", which="both", lw=0.5)
      ax.spines[["top", "right"]].set_visible(False)
  fig.legend(
    labels.values(),
    labels.keys(),
    loc="outside lower center",
    ncols=4,
    frameon=False,
    fontsize=9,
  )
  for ax in panels[-1]:
    ax.set_xlabel("seconds of training", fontsize=10)
  fig.supylabel("held-out loss of the center", fontsize=10)
  fig.savefig(path, dpi=80)
