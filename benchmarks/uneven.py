"""Trains with one of four workers that is slow, or away half of the time.

  python benchmarks/uneven.py
  python benchmarks/uneven.py --tasks digits --seeds 3

Four workers train a config with AGN in a store, at a given pace: they sleep
after each step, so that the cores of this machine do not set it. In "slow" the
last worker takes twice as long for a step. In "away" it is stopped with SIGSTOP
for some seconds, then goes on for as long, and so on. Printed are the held-out
loss and accuracy of the last center, and the seconds from the first step of a
worker to the last step of any.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

_WORKERS = 4
_UNEVEN = _WORKERS - 1


@dataclasses.dataclass(frozen=True)
class Task:
  """A config and its pace.

  Attributes:
    config: Name of the config.
    step_seconds: Seconds of a step, with the sleep.
    away: Seconds that a worker is away, and then there.
    grace: Seconds that a commit of three waits for the fourth.
    overrides: Other fields of the config.
    agn: Other options of AGN.
  """

  config: str
  step_seconds: float
  away: float
  grace: float
  overrides: tuple[str, ...] = ()
  agn: Mapping[str, Any] = dataclasses.field(default_factory=dict)


TASKS = {
  "digits": Task("digits_agn_host", 0.03, 3.0, 0.15),
  "lm_text": Task(
    "lm_text",
    0.3,
    20.0,
    1.5,
    (
      "--config.num_train_steps=240",
      "--config.schedule.warmup_steps=24",
      "--config.eval_every_steps=240",
      "--config.checkpoint_every_steps=240",
    ),
    {"commit_delta": True},
  ),
}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
  "sequential": ("sequential", {}),
  "mean, quorum 3": ("mean", {"quorum": 3}),
  "mean, quorum 4": ("mean", {"quorum": 4}),
}


class Pace:
  """A hook that sleeps until its step is over, and writes when it was.

  Args:
    seconds: Seconds of a step.
    slow: Whether the last worker takes twice as long.
    folder: Folder of the files with the times.
    worker_id: Number of this worker.
  """

  def __init__(
    self, seconds: float, slow: bool, folder: str, worker_id: int = 0
  ):
    self._seconds = seconds * (1 + (slow and worker_id == _UNEVEN))
    self._path = pathlib.Path(folder, f"times-{worker_id}")
    self._next = 0.0

  def __call__(self, step: int, state: Any, metrics: Mapping[str, float]):
    """Sleeps."""
    with open(self._path, "a") as file:
      file.write(f"{time.monotonic()}\n")
    time.sleep(max(self._next - time.monotonic(), 0))
    self._next = time.monotonic() + self._seconds


def main() -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
  parser.add_argument(
    "--methods", nargs="+", default=list(METHODS), choices=METHODS
  )
  parser.add_argument("--seeds", type=int, default=1)
  args = parser.parse_args()
  print(
    "| task | commit | fourth worker | seed | eval_loss | eval_accuracy | s |\n"
    "| --- | --- | --- | --: | --: | --: | --: |"
  )
  for task in args.tasks:
    for method in args.methods:
      for kind in ("as the others", "slow", "away"):
        for seed in range(args.seeds):
          with tempfile.TemporaryDirectory() as folder:
            row, seconds = run(
              TASKS[task], METHODS[method], kind, seed, pathlib.Path(folder)
            )
          print(
            f"| {task} | {method} | {kind} | {seed} | {row['eval_loss']:.4f} "
            f"| {row['eval_accuracy']:.4f} | {seconds:.0f} |",
            flush=True,
          )


def run(
  task: Task,
  method: tuple[str, dict[str, Any]],
  kind: str,
  seed: int,
  folder: pathlib.Path,
) -> tuple[dict[str, float], float]:
  """Trains; returns the last row of metrics and the seconds."""
  root = pathlib.Path(__file__).parents[1]
  commit, options = method
  agn = {"communication_period": 10, "commit": commit, **task.agn}
  agn["transport"] = {"type": "store", "grace": task.grace, **options}
  if task.agn:
    # The center moves by the mean of the changes, or by one after another.
    rate = 1 / _WORKERS if commit == "sequential" else 1.0
    agn["outer_tx"] = {"type": "optimizer", "name": "sgd"}
    agn["outer_tx"]["learning_rate"] = rate
  pace = {
    "name": "uneven:Pace",
    "seconds": task.step_seconds,
    "slow": kind == "slow",
    "folder": str(folder),
  }
  env = {
    **os.environ,
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": os.pathsep.join(map(str, (root, root / "benchmarks"))),
  }
  command = [
    *(sys.executable, "-m", "flaxshard", f"--config={task.config}"),
    f"--workdir={folder / 'run'}",
    f"--num_processes={_WORKERS}",
    f"--config.wrappers=(('agn', {agn}),)",
    f"--config.seed={seed}",
    "--config.log_every_steps=1",
    f"--config.hooks=({pace},)",
    *task.overrides,
  ]
  with contextlib.ExitStack() as stack:
    processes = []
    for k in range(_WORKERS):
      log = stack.enter_context(open(folder / f"log-{k}", "w"))
      process = subprocess.Popen(
        [*command, f"--process_id={k}"],
        env=env,
        cwd=root,
        stdout=log,
        stderr=log,
      )
      stack.callback(process.kill)
      processes.append(process)
    uneven = processes[_UNEVEN]
    while not (folder / f"times-{_UNEVEN}").exists():
      check(processes, folder)
    change, is_away = time.monotonic(), False
    while check(processes, folder):
      if kind == "away" and time.monotonic() > change + task.away:
        change, is_away = time.monotonic(), not is_away
        uneven.send_signal(signal.SIGSTOP if is_away else signal.SIGCONT)
  times = [
    float(line)
    for k in range(_WORKERS)
    for line in (folder / f"times-{k}").read_text().split()
  ]
  lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  row = [row for row in rows if row.get("eval_loss") is not None][-1]
  return row, max(times) - min(times)


def check(
  processes: list[subprocess.Popen[bytes]], folder: pathlib.Path
) -> bool:
  """Returns whether any worker still runs, a moment later.

  Raises:
    RuntimeError: One has failed.
  """
  time.sleep(0.05)
  for k, process in enumerate(processes):
    if process.poll():
      log = (folder / f"log-{k}").read_text()
      raise RuntimeError(f"worker {k} has failed:\n{log[-4000:]}")
  return any(process.returncode is None for process in processes)


if __name__ == "__main__":
  main()
