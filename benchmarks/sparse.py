"""Times training steps of a model with a large embedding table.

A step looks up rows of the table, computes a small loss, differentiates it, and
updates table and optimizer:

  dense        `jax.value_and_grad`, Flax's TrainState and optax: the reference.
  lazy, tf     flaxshard with `sparse=["table"]` and these semantics.
  lazy+scale   "lazy" with `LossScale("dynamic")`.
  torch        PyTorch: `Embedding(sparse=True)` and `SparseAdam`, in a process
               of its own; only with --torch.

The variants are timed in rounds, each in a new random order. Other programs
slow a whole round down, which hardly changes the ratios of that round. Then
each variant is timed alone with tables of other sizes.

  python benchmarks/sparse.py --torch=/path/to/python
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
import contextlib
import os
import pathlib
import platform
import random
import statistics
import subprocess
import time
from typing import Any, Protocol

from flax.training import train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import timing

import flaxshard as fs

FEATURES = 64
LEARNING_RATE = 1e-3
# Different ids in each step: rows of a step that was just taken are in caches.
NUM_BATCHES = 16
_TORCH_SCRIPT = pathlib.Path(__file__).with_name("sparse_torch.py")
_SEMANTICS = ("lazy", "tf")


class Variant(Protocol):
  """A training program with its state.

  Attributes:
    temporaries: Bytes of temporary memory of a step, or None.
  """

  temporaries: int | None

  def run(self, steps: int) -> float:
    """Takes steps, and returns the seconds of one."""
    ...


# -- Data.


def draw_ids(kind: str, rows: int, number: int) -> np.ndarray:
  """Returns row numbers, int32 `[NUM_BATCHES, number]`.

  Args:
    kind: `"uniform"`, or `"power"`: row r is used in proportion to 1 / (r + 1).
    rows: Number of rows of the table.
    number: Number of ids of a step.
  """
  draws = np.random.default_rng(0).random((NUM_BATCHES, number))
  if kind == "uniform":
    ids = draws * rows
  else:
    ids = np.expm1(draws * np.log1p(rows))
  # Scattered over the table, as ids of a hash are.
  return (ids.astype(np.int64) * 2_654_435_761 % rows).astype(np.int32)


# -- Variants.


class JaxVariant:
  """A compiled step of JAX, whose state is donated."""

  def __init__(self, name: str, rows: int, ids: np.ndarray, tx: Any):
    self._state = jax.jit(lambda: _create(name, rows, tx))()
    self._batches = [jax.device_put(x) for x in ids]
    step = _dense_step if name == "dense" else _step
    jitted = jax.jit(step, donate_argnums=0)
    self._compiled = jitted.lower(self._state, self._batches[0]).compile()
    memory = self._compiled.memory_analysis()
    self.temporaries = getattr(memory, "temp_size_in_bytes", None)
    self._taken = 0

  def run(self, steps: int) -> float:
    """Takes steps, and returns the seconds of one."""
    start = time.perf_counter()
    for _ in range(steps):
      batch = self._batches[self._taken % len(self._batches)]
      self._state, loss = self._compiled(self._state, batch)
      self._taken += 1
    jax.block_until_ready((self._state, loss))
    return (time.perf_counter() - start) / steps


def _create(name: str, rows: int, tx: Any) -> Any:
  """Returns a train state of a table and a linear layer."""
  table_key, kernel_key = jax.random.split(jax.random.key(0))
  params = {
    "table": jax.random.normal(table_key, (rows, FEATURES)),
    "kernel": jax.random.normal(kernel_key, (FEATURES, 1)) / FEATURES,
  }
  fields = {"apply_fn": None, "params": params, "tx": tx}
  if name == "dense":
    return train_state.TrainState.create(**fields)
  semantics, _, scale = name.partition("+")
  wrappers = [fs.LossScale("dynamic")] if scale else []
  return fs.TrainState.create(
    **fields, wrappers=wrappers, sparse=["table"], sparse_semantics=semantics
  )


def _loss_fn(params: Any, ids: jax.Array) -> jax.Array:
  outputs = params["table"][ids] @ params["kernel"]
  return jnp.square(outputs - 1).mean()


def _dense_step(state: Any, ids: jax.Array) -> Any:
  loss, grads = jax.value_and_grad(_loss_fn)(state.params, ids)
  return state.apply_gradients(grads=grads), loss


def _step(state: Any, ids: jax.Array) -> Any:
  return state.minimize(_loss_fn, ids)


class TorchVariant:
  """PyTorch in a process, which takes steps when it is asked to."""

  temporaries: int | None = None

  def __init__(self, python: str, rows: int, ids: np.ndarray, threads: int):
    arguments = [str(x) for x in (rows, FEATURES, LEARNING_RATE, threads)]
    self._process = subprocess.Popen(
      [python, str(_TORCH_SCRIPT), *arguments],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
    )
    self._ask(f"{ids.shape[0]} {ids.shape[1]}\n".encode() + ids.tobytes())

  def _ask(self, request: bytes) -> str:
    stdin, stdout = self._process.stdin, self._process.stdout
    assert stdin is not None and stdout is not None
    stdin.write(request)
    stdin.flush()
    answer = stdout.readline().decode().strip()
    if not answer:
      raise RuntimeError(f"{_TORCH_SCRIPT.name} ended; see its error above.")
    return answer

  def run(self, steps: int) -> float:
    """Takes steps, and returns the seconds of one."""
    return float(self._ask(f"{steps}\n".encode()))

  def close(self) -> None:
    """Ends the process."""
    assert self._process.stdin is not None
    self._process.stdin.close()
    self._process.wait(timeout=60)


@contextlib.contextmanager
def create(
  name: str, rows: int, ids: np.ndarray, args: argparse.Namespace
) -> Iterator[Variant]:
  """Yields a variant; its memory is freed afterwards."""
  if name == "torch":
    torch = TorchVariant(args.torch, rows, ids, args.threads)
    try:
      yield torch
    finally:
      torch.close()
  else:
    yield JaxVariant(name, rows, ids, optax.adam(LEARNING_RATE))


# -- Measuring.


def compare(names: list[str], args: argparse.Namespace) -> None:
  """Times all variants in turn, and prints a table."""
  for kind in ("uniform", "power"):
    ids = draw_ids(kind, args.rows, args.ids)
    distinct = statistics.mean(len(np.unique(x)) for x in ids)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with contextlib.ExitStack() as stack:
      variants = {
        name: stack.enter_context(create(name, args.rows, ids, args))
        for name in names
      }
      for variant in variants.values():
        variant.run(3)
      for _ in range(args.rounds):
        for name in random.sample(names, len(names)):
          steps = args.steps if name in ("dense", "tf") else 10 * args.steps
          seconds[name].append(variants[name].run(steps))
      temporaries = {k: v.temporaries for k, v in variants.items()}
      del variants
    print(
      f"\n{args.rows:,} x {FEATURES}, {args.ids:,} ids ({kind}; "
      f"{distinct:,.0f} distinct), Adam:\n\n"
      "| variant    |  ms, min | dense / it, median | quartiles | min/min | "
      "temporaries, MiB |\n|---|--:|--:|--:|--:|--:|"
    )
    for name in names:
      low, middle, high = timing.quartiles(seconds["dense"], seconds[name])
      best = min(seconds[name])
      cells = [
        f"{name:<10}",
        f"{1e3 * best:8.2f}",
        f"{middle:.1f}",
        f"{low:.1f}-{high:.1f}",
        f"{min(seconds['dense']) / best:.1f}",
        _mebibytes(temporaries[name]),
      ]
      print("| " + " | ".join(cells) + " |", flush=True)


def sizes(names: list[str], args: argparse.Namespace) -> None:
  """Times each variant alone with tables of several sizes."""
  print(
    f"\nMilliseconds of a step (the fastest of {args.rounds} rounds), and MiB "
    "of temporaries,\nby rows of the table (uniform ids):\n\n| variant    | "
    + " | ".join(f"{rows:,}" for rows in args.sizes)
    + " |\n|---|"
    + "--:|" * len(args.sizes)
  )
  for name in names:
    cells = []
    for rows in args.sizes:
      if name in ("dense", "tf") and rows > args.max_dense_rows:
        cells.append("-")
        continue
      ids = draw_ids("uniform", rows, args.ids)
      with create(name, rows, ids, args) as variant:
        variant.run(3)
        best = min(variant.run(args.steps) for _ in range(args.rounds))
        cells.append(f"{1e3 * best:.2f}, {_mebibytes(variant.temporaries)}")
      del variant
    print(f"| {name:<10} | " + " | ".join(cells) + " |", flush=True)


def _mebibytes(size: int | None) -> str:
  return "-" if size is None else f"{size / 2**20:.1f}"


def main() -> None:
  """Reads the flags, measures, prints."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  add = parser.add_argument
  ours = [*_SEMANTICS, "lazy+scale"]
  add("--variants", nargs="+", choices=ours, default=ours)
  add("--rows", type=int, default=10**6)
  add("--ids", type=int, default=4096)
  add("--sizes", type=int, nargs="*", default=[10**5, 10**6, 10**7])
  add("--max-dense-rows", type=int, default=10**6, help="in --sizes")
  add("--rounds", type=int, default=20)
  add("--steps", type=int, default=3, help="ten times as many of fast ones")
  add("--torch", default="", help="a Python that has PyTorch")
  add("--threads", type=int, default=os.cpu_count(), help="of PyTorch")
  args = parser.parse_args()

  device = jax.devices()[0]
  print(
    f"{device.device_kind} ({device.platform}), {os.cpu_count()} cores, JAX "
    f"{jax.__version__}, Python {platform.python_version()}; {args.rounds} "
    f"rounds; load {os.getloadavg()[0]:.1f}"
  )
  names = ["dense", *args.variants]
  if args.torch:
    command = "import torch; print(torch.__version__)"
    found = subprocess.run(
      [args.torch, "-c", command], capture_output=True, text=True
    )
    if found.returncode == 0:
      print(f"PyTorch {found.stdout.strip()}, {args.threads} threads")
      names.append("torch")
    else:
      print(f"torch is skipped: {args.torch} cannot import it")
  else:
    print("torch is skipped: no --torch")
  compare(names, args)
  if args.sizes:
    sizes(names, args)


if __name__ == "__main__":
  main()
