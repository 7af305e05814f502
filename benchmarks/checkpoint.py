"""Prints the time that saving and restoring a checkpoint takes.

  python benchmarks/checkpoint.py
  python benchmarks/checkpoint.py --megabytes 100 --rounds 80

`flaxshard.Checkpointer` and Orbax's own asynchronous `CheckpointManager` save
the same parameters, Adam state and `LossScale` state in turns, in one process.
For each save the script measures the time until the call returns, and the time
until all files are on disk; the next save starts after that. Then it verifies
and restores the checkpoint of flaxshard.
"""

import argparse
import os
import shutil
import tempfile
import time

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp

import flaxshard as fs
from flaxshard.checkpoint import step_files


def make_state(megabytes: float, layers: int) -> fs.TrainState:
  """Returns a state of `megabytes` MB: a third parameters, the rest Adam's."""
  width = int((megabytes * 1e6 / 12 / layers) ** 0.5)
  keys = jax.random.split(jax.random.key(0), layers)
  params = {
    f"layer_{i}": jax.random.normal(key, (width, width))
    for i, key in enumerate(keys)
  }
  state = fs.TrainState.create(
    apply_fn=None,
    params=params,
    tx=optax.adam(1e-3),
    wrappers=[fs.LossScale("dynamic")],
  )
  # One step fills Adam's state with random numbers, which do not compress: the
  # gradients of this loss are the parameters.
  loss_fn = lambda p: optax.tree_utils.tree_norm(p, squared=True) / 2
  return jax.block_until_ready(jax.jit(lambda s: s.minimize(loss_fn)[0])(state))


def save_with_orbax(state, directory, step):
  """Returns the seconds until `save` returns, and until all is on disk."""
  with ocp.CheckpointManager(directory) as manager:
    start = time.perf_counter()
    manager.save(
      step,
      args=ocp.args.Composite(
        default=ocp.args.StandardSave(state.without_wrappers()),
        wrappers=ocp.args.StandardSave(state.wrapper_states),
      ),
    )
    blocked = time.perf_counter()
    manager.wait_until_finished()
    return blocked - start, time.perf_counter() - start


def save_with_flaxshard(state, directory, step):
  """Returns the seconds until `save` returns, and until all is on disk."""
  with fs.Checkpointer(directory) as checkpointer:
    start = time.perf_counter()
    checkpointer.save(step, state)
    blocked = time.perf_counter()
    checkpointer.wait()
    return blocked - start, time.perf_counter() - start


def print_row(name, seconds, reference):
  """Prints a row; the ratio is that of the means, to `reference`."""
  low, quarter, middle, upper = np.percentile(seconds, (5, 25, 50, 75)) * 1e3
  mean = np.mean(seconds)
  print(
    f"| {name:>18} | {1e3 * mean:7.1f} | {mean / np.mean(reference):5.2f} | "
    f"{low:7.1f} | {quarter:7.1f} | {middle:7.1f} | {upper:7.1f} |"
  )


def main():
  """Prints a table."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--megabytes", type=float, default=400)
  parser.add_argument("--layers", type=int, default=12)
  parser.add_argument("--rounds", type=int, default=40)
  args = parser.parse_args()
  state = make_state(args.megabytes, args.layers)
  size = sum(x.nbytes for x in jax.tree.leaves(state.without_wrappers()))
  savers = {"Orbax": save_with_orbax, "flaxshard": save_with_flaxshard}
  blocked = {name: [] for name in savers}
  total = {name: [] for name in savers}
  verifying, restoring = [], []
  with tempfile.TemporaryDirectory() as folder:
    for i in range(args.rounds + 1):
      # Each saver is first in every other round.
      for name in sorted(savers, reverse=bool(i % 2)):
        directory = os.path.join(folder, name)
        # The save must not wait for files that were written before it.
        os.sync()
        times = savers[name](state, directory, 1)
        if name == "flaxshard":
          start = time.perf_counter()
          assert step_files.verify(os.path.join(directory, "1"))
          verified = time.perf_counter() - start
          with fs.Checkpointer(directory) as checkpointer:
            start = time.perf_counter()
            jax.block_until_ready(checkpointer.restore(state))
            restored = time.perf_counter() - start
        shutil.rmtree(directory)
        if not i:
          continue  # the first round starts threads and fills caches
        blocked[name].append(times[0])
        total[name].append(times[1])
        if name == "flaxshard":
          verifying.append(verified)
          restoring.append(restored)
  print(f"{size / 1e6:.0f} MB, {args.rounds} rounds, milliseconds.\n")
  print(
    f"| {'':>18} | {'mean':>7} | ratio | {'5%':>7} | {'25%':>7} | {'50%':>7} | "
    f"{'75%':>7} |"
  )
  for label, times in (("blocked", blocked), ("on disk", total)):
    for name, seconds in times.items():
      print_row(f"{name}, {label}", seconds, times["Orbax"])
  print_row("restore", restoring, restoring)
  print_row("of it, verify", verifying, restoring)


if __name__ == "__main__":
  main()
