"""Kills one of four workers of AGN over hosts with SIGKILL, ten times.

Each run trains `digits_agn_host` with four processes on this machine. At a
random step, one of them is killed; in every second run it is started again
after two seconds. Prints, for each run, the longest pause of the others after
the kill, the number of steps that were taken, and the loss and the accuracy at
the end, beside a run without a kill.

  python benchmarks/kills.py
  python benchmarks/kills.py --runs 2 --commit sequential
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
import itertools
import json
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

_WORKERS = 4
_HEARTBEAT = 10.0
_STEPS = 600
_RESTART_SECONDS = 2.0


def record(step: int, state: Any, metrics: Mapping[str, float]) -> None:
  """Writes when a step was taken: a hook of the runs."""
  del state, metrics
  with open(os.environ["STEPS_FILE"], "a") as f:
    f.write(f"{step} {time.monotonic()}\n")


def main() -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--runs", type=int, default=10)
  parser.add_argument("--commit", default="mean")
  parser.add_argument("--heartbeat", type=float, default=_HEARTBEAT)
  parser.add_argument("--seed", type=int, default=0)
  args = parser.parse_args()
  rng = random.Random(args.seed)
  print(
    "| run | killed | at step | started again | longest pause (s) "
    "| workers of commits | eval_loss | eval_accuracy |\n"
    "| --: | --: | --: | --- | --: | --- | --: | --: |"
  )
  pauses, losses = [], []
  for number in range(args.runs + 1):
    with tempfile.TemporaryDirectory() as folder:
      run = Run(pathlib.Path(folder), args)
      try:
        victim = rng.randrange(_WORKERS)
        step = rng.randrange(_STEPS // 10, _STEPS * 8 // 10)
        if number == 0:
          run.wait()
          pause, comes_back = None, False
          survivors = [*range(_WORKERS)]
        else:
          comes_back = number % 2 == 0
          killed = run.kill(victim, step, comes_back)
          survivors = [k for k in range(_WORKERS) if k != victim]
          run.wait()
          pause = max(run.pause(k, killed) for k in survivors)
          pauses.append(pause)
        row = run.last_row(survivors[0])
        counts = run.workers_of_commits(survivors[0])
        if number:
          losses.append(row["eval_loss"])
      finally:
        run.close()
    if number == 0:
      print(f"| | none | | | | {counts} ", end="")
    else:
      print(
        f"| {number} | {victim} | {step} | {'yes' if comes_back else 'no'} "
        f"| {pause:.1f} | {counts} ",
        end="",
      )
    print(
      f"| {row['eval_loss']:.4f} | {row['eval_accuracy']:.4f} |", flush=True
    )
  print(
    f"\npause: median {statistics.median(pauses):.1f} s, longest "
    f"{max(pauses):.1f} s, with a heartbeat of {args.heartbeat} s; eval_loss: "
    f"{min(losses):.4f} to {max(losses):.4f}; load of the machine "
    f"{os.getloadavg()[0]:.1f}"
  )


class Run:
  """A run of four processes.

  Args:
    folder: An empty folder.
    args: The flags.
  """

  def __init__(self, folder: pathlib.Path, args: argparse.Namespace):
    self._folder = folder
    self._args = args
    self._processes: dict[int, subprocess.Popen[bytes]] = {}
    for worker in range(_WORKERS):
      self._start(worker)

  def _start(self, worker: int) -> None:
    agn = {
      "communication_period": 10,
      "commit": self._args.commit,
      "transport": "host",
      "heartbeat": self._args.heartbeat,
    }
    root = pathlib.Path(__file__).parents[1]
    command = [
      *(sys.executable, "-m", "flaxshard"),
      "--config=digits_agn_host",
      f"--workdir={self._folder / 'run'}",
      f"--num_processes={_WORKERS}",
      f"--process_id={worker}",
      f"--config.wrappers=(('loss_scale', {{'scale': 'dynamic'}}), "
      f"('agn', {agn}))",
      f"--config.num_train_steps={_STEPS}",
      "--config.log_every_steps=2",
      "--config.hooks=('kills:record',)",
    ]
    env = {
      **os.environ,
      "JAX_PLATFORMS": "cpu",
      "PYTHONPATH": os.pathsep.join(map(str, (root, root / "benchmarks"))),
      "STEPS_FILE": str(self._folder / f"steps-{worker}"),
    }
    with open(self._folder / f"log-{worker}", "ab") as log:
      self._processes[worker] = subprocess.Popen(
        command, env=env, cwd=root, stdout=log, stderr=log
      )

  def _steps(self, worker: int) -> list[tuple[int, float]]:
    """Returns the steps of a worker with their times."""
    path = self._folder / f"steps-{worker}"
    if not path.exists():
      return []
    lines = path.read_text().splitlines()
    rows = [line.split() for line in lines if line.count(" ") == 1]
    return [(int(step), float(seconds)) for step, seconds in rows]

  def kill(self, victim: int, step: int, comes_back: bool) -> float:
    """Kills a worker at a step; returns the time."""
    while not any(taken >= step for taken, _ in self._steps(victim)):
      self._check(victim)
      time.sleep(0.01)
    process = self._processes[victim]
    process.send_signal(signal.SIGKILL)
    killed = time.monotonic()
    process.wait()
    if comes_back:
      time.sleep(_RESTART_SECONDS)
      self._start(victim)
    else:
      del self._processes[victim]
    return killed

  def wait(self) -> None:
    """Waits until all processes have ended."""
    for worker, process in self._processes.items():
      process.wait(600)
      self._check(worker)

  def _check(self, worker: int) -> None:
    """Raises an error if a worker has ended with another code than 0."""
    if self._processes[worker].poll():
      log = (self._folder / f"log-{worker}").read_text()
      raise RuntimeError(f"worker {worker} has failed:\n{log[-4000:]}")

  def pause(self, worker: int, since: float) -> float:
    """Returns the longest time between two rows of a worker since a time."""
    times = [seconds for _, seconds in self._steps(worker)]
    times = [t for t in times if t < since][-1:] + [
      t for t in times if t >= since
    ]
    return max(b - a for a, b in itertools.pairwise(times))

  def _workdir(self, worker: int) -> pathlib.Path:
    run = self._folder / "run"
    return run / "workers" / str(worker) if worker else run

  def last_row(self, worker: int) -> dict[str, float]:
    """Returns the last row of metrics with an evaluation."""
    lines = (self._workdir(worker) / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [row for row in rows if "eval_loss" in row][-1]

  def workers_of_commits(self, worker: int) -> str:
    """Returns how many commits had how many workers."""
    folder = self._folder / "run" / "workers" / str(worker)
    lines = (folder / "commits.jsonl").read_text().splitlines()
    counts: dict[int, int] = {}
    for line in lines:
      count = len(json.loads(line)["workers"])
      counts[count] = counts.get(count, 0) + 1
    return ", ".join(f"{n}: {counts[n]}" for n in sorted(counts, reverse=True))

  def close(self) -> None:
    """Ends what still runs."""
    for process in self._processes.values():
      process.kill()
      process.wait()


if __name__ == "__main__":
  main()
