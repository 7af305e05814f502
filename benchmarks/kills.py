"""Kills workers of AGN in a store with SIGKILL, and counts their commits.

  python benchmarks/kills.py
  python benchmarks/kills.py --commits mean --kills 10 --directory=/mnt/share

Four workers train on one store. Every few seconds one of them is killed, or all
at once. Whoever was killed starts again, in most cases within two seconds.

The gradient of each period is 12 in an element of the parameters that no other
period has, and the optimizer is `sgd(1.0)`. So the last center says of each
commit how often it was counted:

- Sequentially and by sum, its element is -12, once.
- By mean it is -12, -6, -4 or -3: of so many workers. There are as many of each
  as such merges need.
- A commit that `fs.Worker.commit` has returned from is in the center.
- A period whose worker was killed before may be missing.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import multiprocessing
from multiprocessing import context as context_lib
import pathlib
import random
import statistics
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import flaxshard as fs

_WORKERS = 4
_PERIOD = 2
_SLOTS = 1 << 14  # periods of a worker, with those that are lost
_VALUE = 12
_ALL_EVERY = 10  # of so many kills, one kills all
_LONG_EVERY = 5  # after one of so many kills, the worker is away for long
_SHORT, _LONG = 2.0, 15.0  # seconds: at most, and exactly


def main() -> None:
  """Runs, checks and prints the table."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--directory", default=tempfile.gettempdir())
  parser.add_argument(
    "--commits", nargs="+", default=["sequential", "sum", "mean"]
  )
  parser.add_argument("--kills", type=int, default=50)
  parser.add_argument("--quorum", type=int, default=1)
  parser.add_argument("--grace", type=float, default=10.0)
  parser.add_argument("--seed", type=int, default=0)
  args = parser.parse_args()
  print(
    "| commit | kills | commits in the center | lost | twice "
    "| pause of others: median, longest | without kills |\n"
    "| --- | --: | --: | --: | --: | --: | --: |"
  )
  for commit in args.commits:
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
      folder = pathlib.Path(name)
      kills = disturb(folder, commit, args)
      found = check(folder, commit)
      pauses, usual = find_pauses(folder, kills)
    print(
      f"| {commit} | {sum(len(k) for _, k in kills)} "
      f"| {found['counted']} | {found['lost']} | {found['twice']} "
      f"| {statistics.median(pauses or [0]):.2f}, {max(pauses or [0]):.2f} "
      f"| {usual:.2f} |",
      flush=True,
    )


def disturb(
  folder: pathlib.Path, commit: str, args: argparse.Namespace
) -> list[tuple[float, list[int]]]:
  """Runs the workers, and kills some of them; returns when and whom."""
  rng = random.Random(args.seed)
  context = multiprocessing.get_context("forkserver")
  running: dict[int, context_lib.ForkServerProcess] = {}
  kills: list[tuple[float, list[int]]] = []

  def start_missing() -> None:
    for k in range(_WORKERS):
      if k not in running or running[k].exitcode:
        error = k in running and (running[k].exitcode or 0) > 0
        assert not error, f"worker {k} has failed"
        running[k] = context.Process(target=run, args=(folder, k, commit, args))
        running[k].start()

  start_missing()
  while len(list(folder.glob("times-*"))) < _WORKERS:
    time.sleep(0.1)
  time.sleep(8)  # some time without kills
  for number in range(1, args.kills + 1):
    time.sleep(rng.uniform(0.2, 4))
    victims = [rng.randrange(_WORKERS)]
    if number % _ALL_EVERY == 0:
      victims = list(range(_WORKERS))
    kills.append((time.monotonic(), victims))
    for k in victims:
      running[k].kill()
    for k in victims:
      running[k].join()
    is_long = number % _LONG_EVERY == 1
    time.sleep(_LONG if is_long else rng.uniform(0, _SHORT))
    start_missing()
  time.sleep(4)
  (folder / "stop").touch()
  while any(process.exitcode != 0 for process in running.values()):
    time.sleep(0.1)
    start_missing()
  return kills


def run(
  folder: pathlib.Path, worker_id: int, commit: str, args: argparse.Namespace
) -> None:
  """Trains until the file `stop` is there, and writes the last center."""
  store = fs.Store(quorum=min(args.quorum, _WORKERS), grace=args.grace)
  state = fs.TrainState.create(
    apply_fn=None,
    params={"counts": jnp.zeros((_WORKERS, _SLOTS))},
    tx=optax.sgd(1.0),
    wrappers=[fs.AGN(_PERIOD, commit, transport=store)],
  )
  drawn = folder / f"drawn-{worker_id}"
  with (
    open(folder / f"returned-{worker_id}", "a", 1) as returned,
    open(folder / f"times-{worker_id}", "a", 1) as times,
    fs.Worker(str(folder / "store"), worker_id, _WORKERS) as worker,
  ):
    state = worker.start(state)
    slot = int(drawn.read_text()) if drawn.exists() else 0
    while not (folder / "stop").exists():
      slot += 1
      # At once, and before anything of this period is written.
      drawn.with_suffix(".new").write_text(str(slot))
      drawn.with_suffix(".new").replace(drawn)
      for _ in range(_PERIOD):
        state = worker.commit(_step(state, worker_id, slot - 1))
        times.write(f"{time.monotonic()}\n")
        time.sleep(0.01)
      returned.write(f"{slot - 1}\n")
    state = worker.finish(state)
  with open(folder / f"center-{worker_id}.npy", "wb") as file:
    np.save(file, jax.device_get(state.params["counts"]))


@jax.jit
def _step(state: fs.TrainState, worker_id: int, slot: int) -> fs.TrainState:
  return state.minimize(lambda p: _VALUE * p["counts"][worker_id, slot])[0]


def check(folder: pathlib.Path, commit: str) -> dict[str, int]:
  """Checks the last center; returns how many commits were counted."""
  centers = [np.load(folder / f"center-{k}.npy") for k in range(_WORKERS)]
  for center in centers:
    np.testing.assert_array_equal(center, centers[0])
  for k in range(_WORKERS):
    lines = (folder / f"returned-{k}").read_text().splitlines()
    missing = [line for line in lines if not centers[0][k, int(line)]]
    assert not missing, f"commits of worker {k} that are missing: {missing}"
  drawn = sum(int((folder / f"drawn-{k}").read_text()) for k in range(_WORKERS))
  counts = collections.Counter(-centers[0][centers[0] != 0])
  sizes = range(1, _WORKERS + 1) if commit == "mean" else [1]
  once = {_VALUE / n: n for n in sizes}
  twice = sum(n for value, n in counts.items() if value not in once)
  for value, workers in once.items():
    assert counts[value] % workers == 0, f"{commit}: {counts}"
  counted = sum(counts.values())
  return {"counted": counted, "lost": drawn - counted, "twice": twice}


def find_pauses(
  folder: pathlib.Path, kills: list[tuple[float, list[int]]]
) -> tuple[list[float], float]:
  """Returns the longest pause of the others after each kill, and before any."""
  steps = [
    [float(x) for x in (folder / f"times-{k}").read_text().split()]
    for k in range(_WORKERS)
  ]
  gaps = [list(itertools.pairwise(times)) for times in steps]
  first = kills[0][0] if kills else float("inf")
  # Their own restarts are no pauses.
  away = [[t for t, victims in kills if k in victims] for k in range(_WORKERS)]
  pauses = []
  for (begin, victims), (end, _) in itertools.pairwise(
    [*kills, (float("inf"), [])]
  ):
    found = [
      b - a
      for k in range(_WORKERS)
      for a, b in gaps[k]
      if begin < b and a < end and not any(a <= t <= b for t in away[k])
    ]
    # None, if the others have not begun again yet.
    if found and len(victims) < _WORKERS:
      pauses.append(max(found))
  usual = max(b - a for pairs in gaps for a, b in pairs if b < first)
  return pauses, usual


if __name__ == "__main__":
  main()
