"""Prints the steps per second of the training loop in two processes.

Two processes train on this machine, with one virtual CPU device each and gloo
between them. In every round each loop trains from its first step:

  loop          `flaxshard.train.train_and_evaluate`.
  hand-written  `jax.jit`, Flax's TrainState, a Grain dataset, and a thread that
                calls `jax.make_array_from_process_local_data` two batches
                ahead. It waits for each step, as flaxshard does on CPUs.
  no wait       The hand-written loop, which waits for a step at a row only.

The model, the optimizer and the batches have the same sizes, and each loop
writes a row of metrics to a file every `--log_every` steps. The time is that
between the first row and the last one, rows included, so without compilation.
The loops are timed in rounds, each in a new random order, and the ratios
compare steps per second of the same round.

  python benchmarks/processes.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
import itertools
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

from flax.training import train_state
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
from flaxshard import train
from flaxshard.core.policy import Policy

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
  parser.add_argument("--rounds", type=int, default=10)
  parser.add_argument("--steps", type=int, default=400)
  parser.add_argument("--log_every", type=int, default=50)
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
  if args.process_id == 0:
    print(
      f"two processes, JAX {jax.__version__}, Python "
      f"{platform.python_version()}, {os.cpu_count()} cores, load "
      f"{os.getloadavg()[0]:.1f}; {args.rounds} rounds of {args.steps} steps, "
      f"a row every {args.log_every}"
    )
  numbers = itertools.count()
  for name, model_config in _MODELS.items():
    loops: dict[str, Callable[[str], list[float]]] = {
      "hand-written": HandWritten(model_config, args, wait=True),
      "no wait": HandWritten(model_config, args, wait=False),
      "loop": lambda path, model=model_config: run_loop(model, args, path),
    }
    rates: dict[str, list[float]] = {loop: [] for loop in loops}
    # All processes draw the same orders.
    rng = random.Random(0)
    for _ in range(args.rounds + 1):
      for loop in rng.sample(list(loops), len(loops)):
        multihost_utils.sync_global_devices(loop)
        path = os.path.join(args.folder, str(next(numbers)))
        os.makedirs(path, exist_ok=True)
        times = loops[loop](path)
        if args.process_id == 0:
          num_steps = args.log_every * (len(times) - 1)
          rates[loop].append(num_steps / (times[-1] - times[0]))
    if args.process_id == 0:
      report(name, {loop: r[1:] for loop, r in rates.items()})


def report(name: str, rates: dict[str, list[float]]) -> None:
  """Prints the steps per second, and the ratios to the hand-written loop."""
  print(f"\n{name}, load {os.getloadavg()[0]:.1f}\n")
  print("| loop | steps per second | ratio (quartiles) |\n|---|--:|--:|")
  for loop, values in rates.items():
    low, middle, high = quartiles(values, rates["hand-written"])
    print(
      f"| {loop} | {statistics.median(values):.0f} "
      f"| {middle:.3f} ({low:.3f}-{high:.3f}) |"
    )


class RowTimes(logging.Handler):
  """Notes when rows of metrics are logged."""

  def __init__(self) -> None:
    super().__init__()
    self.times: list[float] = []

  def emit(self, record: logging.LogRecord) -> None:
    """Notes the time of a row."""
    # An evaluation has a line of its own.
    message = record.getMessage()
    if message.startswith("step ") and "eval_" not in message:
      self.times.append(time.perf_counter())


def run_loop(
  model: dict[str, Any], args: argparse.Namespace, path: str
) -> list[float]:
  """Trains with flaxshard; returns the times of the rows, in process 0."""
  config = ml_collections.ConfigDict(
    dict(
      model=model,
      data={"name": "digits"},
      batch_size=_BATCH_SIZE,
      seed=0,
      # The last row comes after an evaluation, and is not counted.
      num_train_steps=args.steps + 1,
      learning_rate=_LEARNING_RATE,
      optimizer={"name": "adamw"},
      precision="float32",
      wrappers=(),
      mesh={"replica": -1},
      on_nonfinite="stop",
      log_every_steps=args.log_every,
      eval_every_steps=10**9,
      checkpoint_every_steps=10**9,
      writer="none",
    )
  )
  handler = RowTimes()
  log = logging.getLogger("flaxshard")
  log.addHandler(handler)
  log.setLevel(logging.INFO)
  log.propagate = False
  train.train_and_evaluate(config, path)
  log.removeHandler(handler)
  return handler.times[:-1]


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
    self._args = args
    self._wait = wait
    self._model = models.create(
      ml_collections.ConfigDict(model_config),
      num_classes=10,
      policy=Policy("float32"),
      seed=0,
    )
    self._splits = data.digits()
    self._mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    self._jitted = jax.jit(
      train_step,
      donate_argnums=(0, 1),
      out_shardings=jax.sharding.NamedSharding(self._mesh, P()),
    )

  def _create_state(self) -> train_state.TrainState:
    def create() -> train_state.TrainState:
      params = self._model.init(jax.random.key(0), jnp.ones((1, 8, 8, 1)))
      return train_state.TrainState.create(
        apply_fn=self._model.apply,
        params=params["params"],
        tx=optax.adamw(_LEARNING_RATE),
      )

    replicated = jax.sharding.NamedSharding(self._mesh, P())
    return jax.jit(create, out_shardings=replicated)()

  def _read_ahead(self, stop: threading.Event) -> Iterator[Any]:
    size = _BATCH_SIZE // jax.process_count()
    dataset = (
      grain.MapDataset.source(self._splits.train)
      .seed(0)
      .shuffle()
      .repeat()[jax.process_index() :: jax.process_count()]
      .batch(size, drop_remainder=True)
      .to_iter_dataset(
        grain.ReadOptions(num_threads=4, prefetch_buffer_size=16)
      )
    )
    sharding = jax.sharding.NamedSharding(self._mesh, P("data"))
    batches: queue.Queue[Any] = queue.Queue(2)

    def read() -> None:
      for batch in dataset:
        arrays = jax.make_array_from_process_local_data(sharding, batch)
        batches.put(arrays)
        if stop.is_set():
          return

    threading.Thread(target=read, daemon=True).start()
    while True:
      yield batches.get()

  def __call__(self, path: str) -> list[float]:
    """Trains; returns the times of the rows."""
    state = self._create_state()
    zeros = np.zeros(3, np.float32)
    replicated = jax.sharding.NamedSharding(self._mesh, P())
    empty = lambda: jax.make_array_from_callback(
      (3,), replicated, lambda _: zeros
    )
    totals = empty()
    stop = threading.Event()
    times = []
    batches = self._read_ahead(stop)
    file = os.path.join(path, f"metrics.{jax.process_index()}.jsonl")
    with open(file, "a") as f:
      for step in range(1, self._args.steps + 1):
        state, totals = self._jitted(state, totals, next(batches))
        if self._wait:
          jax.block_until_ready((state, totals))
        if step % self._args.log_every == 0:
          loss, correct, count = jax.device_get(totals)
          totals = empty()
          if jax.process_index() == 0:  # as in flaxshard
            row = {"loss": loss / count, "accuracy": correct / count}
            row = {key: float(value) for key, value in row.items()}
            f.write(json.dumps({"step": step, **row}) + "\n")
            f.flush()
          times.append(time.perf_counter())
    stop.set()
    # The thread may wait for a free place.
    for _ in itertools.islice(batches, 3):
      pass
    return times


def train_step(state: Any, totals: jax.Array, batch: Any) -> Any:
  """Takes a step; returns the state and the sums of the metrics."""

  def loss_fn(params: Any) -> Any:
    logits = state.apply_fn({"params": params}, batch["inputs"], train=True)
    losses = optax.softmax_cross_entropy_with_integer_labels(
      logits, batch["labels"]
    )
    return losses.mean(), logits

  grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
  (loss, logits), grads = grad_fn(state.params)
  count = len(batch["labels"])
  correct = (logits.argmax(-1) == batch["labels"]).sum()
  new = jnp.stack(
    [loss * count, correct.astype(jnp.float32), jnp.float32(count)]
  )
  return state.apply_gradients(grads=grads), totals + new


if __name__ == "__main__":
  main()
