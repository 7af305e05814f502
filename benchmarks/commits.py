"""Seconds of a commit to a store: three workers at once, 25 MB each.

  python benchmarks/commits.py
  python benchmarks/commits.py --directory=/mnt/share/bench --commits mean

Each worker is a process with six layers of 1024 x 1024. It commits after every
step, so all commits are under way at the same time. Printed are the quartiles
of the seconds that `fs.Worker.commit` takes, until the new state is on the
device.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import statistics
import tempfile
import time

import jax
import jax.numpy as jnp
import optax

import flaxshard as fs

_FIRST = 3  # commits that are not counted: start and compilation


def main() -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--directory", default=tempfile.gettempdir())
  parser.add_argument("--commits", nargs="+", default=["mean", "sequential"])
  parser.add_argument("--dtypes", nargs="+", default=["float32"])
  parser.add_argument("--workers", type=int, default=3)
  parser.add_argument("--optimizers", nargs="+", default=["sgd", "adam"])
  parser.add_argument("--count", type=int, default=30)
  args = parser.parse_args()
  context = multiprocessing.get_context("forkserver")
  print("| commit | optimizer | dtype | seconds: 25 %, median, 75 % | load |")
  print("| --- | --- | --- | --: | --: |")
  for row in itertools.product(args.commits, args.optimizers, args.dtypes):
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
      queue = context.Queue()
      processes = [
        context.Process(target=run, args=(folder, k, *row, args, queue))
        for k in range(args.workers)
      ]
      for process in processes:
        process.start()
      seconds = [x for _ in processes for x in queue.get(timeout=600)]
      for process in processes:
        process.join()
    quartiles = statistics.quantiles(seconds, n=4)
    print(
      f"| {' | '.join(row)} | {', '.join(f'{x:.2f}' for x in quartiles)} "
      f"| {os.getloadavg()[0]:.1f} |",
      flush=True,
    )


def run(
  folder: str,
  worker_id: int,
  commit: str,
  optimizer: str,
  dtype: str,
  args: argparse.Namespace,
  queue: multiprocessing.Queue[list[float]],
) -> None:
  """Commits, and sends the seconds of the commits."""
  store = fs.Store(commit_dtype=None if dtype == "float32" else dtype)
  state = fs.TrainState.create(
    apply_fn=None,
    params={f"w{i}": jnp.zeros((1024, 1024)) for i in range(6)},
    tx=getattr(optax, optimizer)(1e-3),
    wrappers=[fs.AGN(1, commit, transport=store)],
  )
  step = jax.jit(_step, donate_argnums=0)
  seconds = []
  with fs.Worker(folder, worker_id, args.workers) as worker:
    state = worker.start(state)
    for _ in range(_FIRST + args.count):
      state = jax.block_until_ready(step(state))
      start = time.perf_counter()
      state = jax.block_until_ready(worker.commit(state))
      seconds.append(time.perf_counter() - start)
    state = worker.finish(state)
  queue.put(seconds[_FIRST:])


def _step(state: fs.TrainState) -> fs.TrainState:
  return state.minimize(
    lambda p: sum(jnp.square(x - 1).sum() for x in p.values())
  )[0]


if __name__ == "__main__":
  main()
