"""Workers in threads of one process, and the compiled run they are to equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import flaxshard as fs
from flaxshard.workers import view_log

RNG = np.random.default_rng(0)
# "w" has more than one block of 256 numbers, "s" is a scalar.
PARAMS = {
  "b": RNG.normal(size=7).astype(np.float32),
  "s": np.float32(0.5),
  "t": RNG.normal(size=(3, 50)).astype(np.float32),
  "w": RNG.normal(size=(20, 31)).astype(np.float32),
}


def loss_fn(params: Any, target: jax.Array) -> jax.Array:
  """Returns a loss that is smallest where all parameters are the target."""
  return sum(((p - target) ** 2).sum() for p in jax.tree.leaves(params)) / 2


def step(state: Any, target: jax.Array) -> Any:
  """Takes a train step."""
  return state.minimize(loss_fn, target)


jit_step = jax.jit(step, donate_argnums=0)


def target_of(worker: int, number: int) -> np.ndarray:
  """Returns the target of a worker's step."""
  return np.float32(np.sin(7.0 * worker + number))


def create(
  agn: dict[str, Any],
  tx: Any = None,
  strategy: Any = None,
  params: Any = PARAMS,
  **collections: Any,
) -> Any:
  """Returns a state with AGN."""
  return fs.TrainState.create(
    apply_fn=None,
    params=jax.tree.map(jnp.array, params),
    tx=tx or optax.sgd(0.1),
    wrappers=[fs.AGN(**agn)],
    strategy=strategy,
    **collections,
  )


def run_threads(functions: Sequence[Callable[[], Any]]) -> list[Any]:
  """Runs functions in threads; returns results, or the exceptions raised."""
  results: list[Any] = [None] * len(functions)

  def run(k: int) -> None:
    try:
      results[k] = functions[k]()
    except BaseException as e:
      results[k] = e

  threads = [
    threading.Thread(target=run, args=(k,), daemon=True)
    for k in range(len(functions))
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(60)
  assert not any(thread.is_alive() for thread in threads)
  return results


def raise_errors(results: list[Any]) -> list[Any]:
  """Raises the first of the exceptions among results."""
  for result in results:
    if isinstance(result, BaseException):
      raise result
  return results


def take_steps(worker: fs.Worker, state: Any, numbers: Sequence[int]) -> Any:
  """Takes the steps of some numbers, with a call of `commit` after each."""
  for number in numbers:
    state, _ = jit_step(state, target_of(worker.worker_id, number))
    state = worker.commit(state)
  return state


def train(
  worker: fs.Worker, state: Any, steps: int, start: Any = None
) -> tuple[Any, Any]:
  """Trains up to a step; returns the last state, and the commits."""
  with worker:
    state = worker.start(state)
    state = take_steps(worker, state, range(worker.clock, steps))
    state = worker.finish(state)
  return state, worker.records()


def run_workers(
  directory: Any,
  count: int,
  steps: int,
  agn: dict[str, Any],
  tx: Any = None,
) -> list[tuple[Any, Any]]:
  """Trains workers in threads."""
  agn = {"heartbeat": 5.0, **agn, "transport": "host"}
  return raise_errors(
    run_threads(
      [
        functools.partial(
          train, fs.Worker(str(directory), k, count), create(agn, tx), steps
        )
        for k in range(count)
      ]
    )
  )


def run_compiled(count: int, steps: int, agn: dict[str, Any], tx: Any = None):
  """Trains replicas whose commits are part of the compiled step."""
  strategy = fs.Strategy(devices=jax.devices()[:count])
  state = create(agn, tx, strategy)
  compiled = strategy.jit(step, donate_argnums=0)
  for number in range(steps):
    targets = strategy.distribute_values_from_function(
      lambda context, n=number: target_of(context.replica_id_in_sync_group, n)
    )
    state, _ = compiled(state, targets)
  return state


def exclude(directory: Any, worker: int) -> None:
  """Proposes a view without a worker, as others do that do not hear it."""
  log = view_log.ViewLog(str(directory / "views"))
  while True:
    view = log.latest()
    assert view is not None
    members = tuple(m for m in view.members if m.worker_id != worker)
    new = view_log.View(view.epoch + 1, members, view.started)
    if log.propose(new) == new:
      return
