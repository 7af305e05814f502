"""Prints the steps per second of the training loop in two processes.

Two processes train on this machine, with one virtual CPU device each and gloo
between them:

  loop          `flaxshard.train.train_and_evaluate`.
  hand-written  `jax.jit` of the same train step, a Grain dataset, and a thread
                that calls `jax.make_array_from_process_local_data` two batches
                ahead. It waits for each step, as flaxshard does on CPUs.
  no wait       The hand-written loop, which waits for a step at a row only.

The step is that of flaxshard's loop, so that the loops are compared and not the
programs. The batches have the same size, and each loop writes a row of metrics
to a file every `--log_every` steps. All loops run in turn: at each row of
flaxshard's loop, in a new random order, the others take as many steps. A round
is `--log_every` steps of each loop with the row, and the ratios compare steps
per second of the same round.

  python benchmarks/processes.py
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
import contextlib
import functools
import json
import logging
import os
import platform
import queue
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import grain
import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
from timing import quartiles

from flaxshard import data
from flaxshard import models
from flaxshard import tasks
from flaxshard import train
from flaxshard.core.policy import Policy
from flaxshard.state.train_state import TrainState
from flaxshard.tasks import steps
from flaxshard.train import report as report_lib

P = jax.sharding.PartitionSpec

_BATCH_SIZE = 64
_LEARNING_RATE = 1e-3
_MODELS = {
  "cnn": {"name": "cnn", "features": (32, 64), "dense": 128},
  "small": {"name": "cnn", "features": (), "dense": 32},
}


def main() -> None:
  """Starts the two processes, which print a table for each model."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--rounds", type=int, default=40)
  parser.add_argument("--log_every", type=int, default=50)
  parser.add_argument("--models", nargs="+", default=list(_MODELS))
  parser.add_argument("--process_id", type=int, help="set by the program")
  parser.add_argument("--port", type=int, help="set by the program")
  parser.add_argument("--folder", help="set by the program")
  args = parser.parse_args()
  if args.process_id is not None:
    run_process(args)
    return
  with socket.socket() as s:
    s.bind(("localhost", 0))
    port = s.getsockname()[1]
  with tempfile.TemporaryDirectory() as folder:
    command = [sys.executable, *sys.argv, f"--port={port}", "--folder", folder]
    processes = [
      subprocess.Popen([*command, "--process_id", str(i)]) for i in range(2)
    ]
    codes = [process.wait() for process in processes]
  sys.exit(any(codes))


def run_process(args: argparse.Namespace) -> None:
  """Times the loops in one process; process 0 prints."""
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", 1)
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  jax.distributed.initialize(f"localhost:{args.port}", 2, args.process_id)
  # No log lines.
  logging.getLogger("flaxshard").setLevel(logging.WARNING)
  if args.process_id == 0:
    print(
      f"two processes, JAX {jax.__version__}, Python "
      f"{platform.python_version()}, {os.cpu_count()} cores; {args.rounds} "
      f"rounds of {args.log_every} steps"
    )
  for name in args.models:
    model_config = _MODELS[name]
    folder = os.path.join(args.folder, name)
    others = {
      "hand-written": HandWritten(model_config, args, wait=True),
      "no wait": HandWritten(model_config, args, wait=False),
    }
    rates = time_loops(model_config, args, folder, others)
    for loop in others.values():
      loop.close()
    if args.process_id == 0:
      report(name, rates)


def time_loops(
  model_config: dict[str, Any],
  args: argparse.Namespace,
  folder: str,
  others: dict[str, HandWritten],
) -> dict[str, list[float]]:
  """Trains with flaxshard and, at each row, with the other loops.

  Args:
    model_config: The config of the model.
    args: The flags.
    folder: The workdir.
    others: The other loops.

  Returns:
    The steps per second of each loop in each round.
  """
  rates: dict[str, list[float]] = {loop: [] for loop in (*others, "loop")}
  rng = random.Random(0)  # all processes draw the same orders
  start = 0.0

  def run_others() -> None:
    nonlocal start
    rates["loop"].append(args.log_every / (time.perf_counter() - start))
    for name in rng.sample(list(others), len(others)):
      multihost_utils.sync_global_devices(name)
      rates[name].append(others[name].steps_per_second())
    multihost_utils.sync_global_devices("loop")
    start = time.perf_counter()

  open_report = report_lib.open_report

  @contextlib.contextmanager
  def open_report_and_run_others(*given: Any) -> Iterator[Any]:
    with open_report(*given) as write_row:

      def write(*row: Any, **options: Any) -> None:
        write_row(*row, **options)
        run_others()

      yield write

  report_lib.open_report = open_report_and_run_others
  try:
    train.train_and_evaluate(create_config(model_config, args), folder)
  finally:
    report_lib.open_report = open_report
  # The first round compiles, and the last one evaluates.
  return {loop: values[1:-1] for loop, values in rates.items()}


def create_config(
  model_config: dict[str, Any], args: argparse.Namespace
) -> ml_collections.ConfigDict:
  """Returns the config of flaxshard's loop."""
  num_steps = args.log_every * (args.rounds + 2)
  return ml_collections.ConfigDict(
    dict(
      model=model_config,
      data={"name": "digits"},
      batch_size=_BATCH_SIZE,
      seed=0,
      num_train_steps=num_steps,
      learning_rate=_LEARNING_RATE,
      optimizer={"name": "adamw"},
      precision="float32",
      wrappers=(),
      mesh={"replica": -1},
      on_nonfinite="stop",
      log_every_steps=args.log_every,
      eval_every_steps=num_steps,
      checkpoint_every_steps=num_steps,
      writer="none",
    )
  )


def report(name: str, rates: dict[str, list[float]]) -> None:
  """Prints the steps per second, and the ratios to the hand-written loop."""
  print(f"\n{name}, load of the machine {os.getloadavg()[0]:.1f}\n")
  print("| loop | steps per second | ratio (quartiles) |\n|---|--:|--:|")
  for loop, values in rates.items():
    low, middle, high = quartiles(values, rates["hand-written"])
    print(
      f"| {loop} | {statistics.median(values):.0f} "
      f"| {middle:.3f} ({low:.3f}-{high:.3f}) |"
    )


class HandWritten:
  """A training loop in plain JAX, Flax, optax and Grain.

  Args:
    model_config: The config of the model.
    args: The flags.
    wait: Whether to wait for each step.
  """

  def __init__(
    self, model_config: dict[str, Any], args: argparse.Namespace, wait: bool
  ):
    self._num_steps = args.log_every
    self._wait = wait
    self._mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    self._replicated = jax.sharding.NamedSharding(self._mesh, P())
    task = tasks.adapt(tasks.Classification(num_classes=10))
    model = models.create(
      ml_collections.ConfigDict(model_config),
      num_classes=10,
      policy=Policy("float32"),
      seed=0,
    )

    def create() -> Any:
      variables = model.init(jax.random.key(0), jnp.ones((1, 8, 8, 1)))
      state = TrainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        tx=optax.adamw(_LEARNING_RATE),
      )
      return state, jax.random.key(1)

    placed = jax.jit(create, out_shardings=self._replicated)()
    self._state, self._rng = placed
    self._step = 0
    self._jitted = jax.jit(
      functools.partial(steps.train_step, task),
      donate_argnums=(0, 1),
      out_shardings=self._replicated,
    )
    self._zeros = jax.device_get(steps.init_progress(task))
    self._batches: queue.Queue[Any] = queue.Queue(2)
    self._closed = False
    threading.Thread(target=self._read_ahead, daemon=True).start()
    is_first = jax.process_index() == 0
    self._file = tempfile.TemporaryFile("w") if is_first else None

  def _read_ahead(self) -> None:
    index, count = jax.process_index(), jax.process_count()
    dataset = (
      grain.MapDataset.source(data.digits().train)
      .seed(0)
      .shuffle()
      .repeat()[index::count]
      .batch(_BATCH_SIZE // count, drop_remainder=True)
      .to_iter_dataset(
        grain.ReadOptions(num_threads=4, prefetch_buffer_size=16)
      )
    )
    sharding = jax.sharding.NamedSharding(self._mesh, P("data"))
    for batch in dataset:
      arrays = jax.make_array_from_process_local_data(sharding, batch)
      self._batches.put(arrays)
      if self._closed:
        return

  def _init_progress(self) -> steps.Progress:
    return jax.tree.map(
      lambda x: jax.make_array_from_callback(
        x.shape, self._replicated, lambda index: x[index]
      ),
      self._zeros._replace(step=np.array(self._step, np.int32)),
    )

  def steps_per_second(self) -> float:
    """Trains up to the next row; returns the steps per second."""
    start = time.perf_counter()
    progress = self._init_progress()
    for _ in range(self._num_steps):
      self._state, progress = self._jitted(
        self._state, progress, self._batches.get(), self._rng
      )
      if self._wait:
        jax.block_until_ready(self._state)
    self._step += self._num_steps
    metrics = jax.device_get(progress).metrics.compute()
    if self._file:
      row = {name: float(value) for name, value in metrics.items()}
      self._file.write(json.dumps({"step": int(self._step), **row}) + "\n")
      self._file.flush()
    return self._num_steps / (time.perf_counter() - start)

  def close(self) -> None:
    """Ends the thread, which may wait for a free place."""
    self._closed = True
    self._batches.get()


if __name__ == "__main__":
  main()
