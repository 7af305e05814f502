"""A program of one worker, which `worker_processes` starts and disturbs.

It trains a tiny model in a loop of its own, and sends what happens through a
pipe: no file, because the disk of a worker may be full.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import logging
from multiprocessing import connection
import os
import pathlib
import resource
import signal
import sys
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import xla_flags

import flaxshard as fs
from flaxshard.workers import membership


@dataclasses.dataclass(frozen=True)
class Fault:
  """What goes wrong in a worker.

  Attributes:
    kind: "kill", "full disk", "exception", "terminate" (SIGTERM), "slow" (a
      tenth of the speed), or "kill in call": at a call of another worker.
    step: The step at which it happens.
    method: The method of the call.
    count: Number of the call.
    is_answered: Whether the call is handled before the worker is killed, so
      that only its answer is lost.
  """

  kind: str
  step: int = 0
  method: str = ""
  count: int = 1
  is_answered: bool = False


@dataclasses.dataclass(frozen=True)
class Options:
  """What a worker does.

  Attributes:
    folder: A folder of all workers.
    worker: Index of the worker.
    num_workers: Number of workers.
    agn: Arguments of `fs.AGN`.
    step_seconds: Seconds that a step takes at least.
    environment: Environment variables.
    fault: What goes wrong.
    size: Number of parameters; of a config, number of steps.
    start_timeout: Of `fs.Worker`.
    cache: A folder for compiled programs, or None.
  """

  folder: str
  worker: int
  num_workers: int
  agn: dict[str, Any]
  step_seconds: float = 0.04
  environment: dict[str, str] = dataclasses.field(default_factory=dict)
  fault: Fault | None = None
  size: int = 400
  start_timeout: float = 120.0
  cache: str | None = None


def run(
  options: Options, rows: connection.Connection, log: connection.Connection
) -> None:
  """Trains until the step in the file `stop_at`, in a process of its own."""
  set_up(options, log)
  logging.basicConfig(stream=sys.stderr, level=logging.INFO, force=True)
  if options.fault and options.fault.kind == "kill in call":
    _die_in_call(options.fault)

  def send(kind: str, **fields: Any) -> None:
    rows.send({"kind": kind, "time": time.monotonic(), **fields})

  state = create_state(options)
  train = jax.jit(train_step)
  target = np.zeros(options.size, np.float32)
  train(state, target)[1].block_until_ready()  # compiles
  worker = fs.Worker(
    options.folder,
    worker_id=options.worker,
    num_workers=options.num_workers,
    start_timeout=options.start_timeout,
  )
  stop_at = pathlib.Path(options.folder, "stop_at")
  with worker:
    state = worker.start(state)
    step, missed = worker.clock, worker.missed_steps
    send("start", step=step, center=digest(state))
    while not (stop_at.exists() and step >= int(stop_at.read_text() or 1e9)):
      seconds = options.step_seconds
      if options.fault and step >= options.fault.step:
        seconds = fail(options.fault, seconds)
      end = time.monotonic() + seconds
      state, loss = train(state, targets(options.worker, step, options.size))
      state = worker.commit(state)
      step += 1 + worker.missed_steps - missed
      missed = worker.missed_steps
      send("step", step=step, loss=float(loss))
      for record in worker.records():
        send("commit", **dataclasses.asdict(record))
      time.sleep(max(end - time.monotonic(), 0))
    state = worker.finish(state)
    for record in worker.records():
      send("commit", **dataclasses.asdict(record))
    agn = state.wrapper_states["agn"]
    send(
      "end",
      step=step,
      center=digest(state),
      commits=int(agn.commits),
      distance=float(jnp.abs(state.params["w0"]).max()),
    )


def set_up(options: Options, log: connection.Connection) -> None:
  """Sets up a process that was forked."""
  os.dup2(log.fileno(), 1)
  os.dup2(log.fileno(), 2)
  os.environ.update(options.environment, XLA_FLAGS=xla_flags.FAST)
  jax.config.update("jax_compilation_cache_dir", options.cache)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def create_state(options: Options) -> fs.TrainState:
  """Returns a state of three parameters, which are far from their targets."""
  third = options.size // 4
  params = {
    "w0": jnp.full((options.size - 2 * third,), 3.0),
    "w1": jnp.full((third // 5, 5), -3.0),
    "w2": jnp.full((third,), 1.0),
  }
  return fs.TrainState.create(
    apply_fn=None,
    params=params,
    tx=optax.adam(0.1),
    wrappers=[fs.AGN(**options.agn)],
  )


def train_step(state: fs.TrainState, target: jax.Array) -> Any:
  """Takes a step towards a target around zero."""

  def loss_fn(params: Any) -> jax.Array:
    flat = jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(params)])
    return jnp.square(flat - target[: flat.size]).mean()

  return state.minimize(loss_fn)


def targets(worker: int, step: int, size: int) -> np.ndarray:
  """Returns what a worker sees at a step."""
  rng = np.random.default_rng([worker, step])
  return rng.normal(scale=0.1, size=size).astype(np.float32)


def digest(state: fs.TrainState) -> str:
  """Returns a digest of the bits of the center."""
  leaves = jax.tree.leaves(jax.device_get(state.params))
  return hashlib.sha256(b"".join(x.tobytes() for x in leaves)).hexdigest()[:16]


def fail(fault: Fault, seconds: float) -> float:
  """Fails; returns the seconds of a step."""
  if fault.kind == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
  if fault.kind == "terminate":
    signal.raise_signal(signal.SIGTERM)
  if fault.kind == "exception":
    raise RuntimeError("an injected error")
  if fault.kind == "full disk":
    # Each write fails, and Python ignores SIGXFSZ.
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
  return seconds * 10 if fault.kind == "slow" else seconds


def _die_in_call(fault: Fault) -> None:
  """Kills this process at a call of another worker."""
  register = membership.Membership.register
  calls = itertools.count(1)
  lock = threading.Lock()

  def register_faulty(self: Any, method: str, handler: Any) -> None:
    def handle(sender: int, message: Any) -> Any:
      if method != fault.method or sender == self.worker_id:
        return handler(sender, message)
      with lock:
        number = next(calls)
      if number < fault.count:
        return handler(sender, message)
      if fault.is_answered:
        handler(sender, message)
      os.kill(os.getpid(), signal.SIGKILL)
      raise AssertionError

    register(self, method, handle)

  membership.Membership.register = register_faulty
