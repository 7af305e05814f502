"""Worker: commits the local steps of one process to the center of all."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping
import importlib
import os
import types
from typing import Any, Self

import jax

from flaxshard.core import checks
from flaxshard.core import files
from flaxshard.processes import cluster
from flaxshard.processes import tpu
from flaxshard.state import host_commits
from flaxshard.workers.commit_log import CommitRecord
from flaxshard.workers.session import Session
from flaxshard.wrappers import agn_arguments
from flaxshard.wrappers import base
from flaxshard.wrappers.agn import AGN


class Worker:
  """Connects a train state with `AGN(transport="host")` to other workers.

  Each worker is one process with any number of devices, and a JAX world of its
  own. It takes local steps alone. After each step `commit` looks whether a
  commit is due, and if so exchanges it with the other workers, from host to
  host. Workers find each other through a directory that all of them can reach:
  a folder of a shared file system, or of a bucket. Workers may die, and come
  back or join at any time.

  Commits, membership and errors are those of `AGN`'s arguments: `commit`,
  `quorum`, `deadline`, `heartbeat`, and so on. See docs/guides/agn.md.

  Args:
    directory: Directory that all workers of the run share, such as
      `"gs://bucket/run/workers"`. It holds the list of members, and for each
      worker the file `ID/commits.jsonl` with one line per commit.
    worker_id: Index of this worker, from 0. None: from the variables of a
      launcher, as `flaxshard.initialize` finds them; no coordinator is needed.
    num_workers: Number of workers of the run. None: as for `worker_id`.
    start_timeout: Seconds that the first `start` waits for all workers. After
      that the run goes on with those that are there, if they are `quorum`.
    should_stop: A function that returns True when this worker shall stop, as
      after a signal. Whatever waits for other workers asks it a few times a
      second: `commit` and `finish` then return the state without waiting on,
      with what is not committed in its accumulators, and `start` raises
      `InterruptedError`. None: never.

  Raises:
    ImportError: gRPC is not installed: `pip install 'flaxshard[host]'`.
    TypeError: An argument is of a wrong type.
    ValueError: `worker_id` is not below `num_workers`, or they are not given
      and no variables of a launcher are set.

  Example:
    >>> import flaxshard as fs, jax.numpy as jnp, optax, tempfile
    >>> state = fs.TrainState.create(
    ...     apply_fn=None, params={"w": jnp.ones(())}, tx=optax.sgd(0.25),
    ...     wrappers=[fs.AGN(2, "mean", transport="host")])
    >>> with fs.Worker(tempfile.mkdtemp(), 0, num_workers=1) as worker:
    ...   state = worker.start(state)
    ...   for _ in range(4):
    ...     state, loss = state.minimize(lambda p: 2 * p["w"])
    ...     state = worker.commit(state)
    ...   state = worker.finish(state)
    >>> float(state.params["w"]), [r.commit for r in worker.records()]
    (0.0, [1, 2])
  """

  def __init__(
    self,
    directory: str,
    worker_id: int | None = None,
    num_workers: int | None = None,
    start_timeout: float = 300.0,
    should_stop: Callable[[], bool] | None = None,
  ):
    # gRPC is imported with it. If it is missing, say so before a model is made.
    importlib.import_module("flaxshard.workers.transport")
    self._directory = files.absolute(
      checks.path("Worker: directory", directory)
    )
    self._worker_id, self._num_workers = _find_rank(worker_id, num_workers)
    self._start_timeout = checks.number(
      "Worker: start_timeout", start_timeout, above=0
    )
    if should_stop is not None and not callable(should_stop):
      raise TypeError(
        "Worker: should_stop must be a function or None, got "
        f"{checks.describe(should_stop)}."
      )
    self._should_stop = should_stop or (lambda: False)
    self._session: Session | None = None
    self._is_finished = False
    self._records: list[CommitRecord] = []

  @property
  def worker_id(self) -> int:
    """Index of this worker, from 0."""
    return self._worker_id

  @property
  def num_workers(self) -> int:
    """Number of workers of the run, also of those that are not there."""
    return self._num_workers

  @property
  def clock(self) -> int:
    """The local step that this worker is at.

    After `start` it says where to go on in the data: at 0, at the step of a
    restored state, or where the others are. It is counted without asking the
    device, so steps that were skipped since the last commit count as well.
    """
    return self._running("clock").clock

  @property
  def missed_steps(self) -> int:
    """Local steps that the run has taken without this worker.

    The number grows when the worker joins a run that is ahead, in `start`, and
    when it comes back, in `commit`, after the others had lost it. A loop skips
    so many batches, and ends at the same step as the others.
    """
    return 0 if self._session is None else self._session.missed_steps

  @property
  def members(self) -> tuple[int, ...]:
    """The workers that take part now, in ascending order."""
    return self._running("members").members

  def start(self, state: Any, facts: Mapping[str, Any] | None = None) -> Any:
    """Joins the other workers, and returns the state to begin with.

    If the run has not begun, waits for all workers. Those whose center is
    behind, as after a restore of an older checkpoint, receive the newest. If
    the run is under way, the state continues from its center.

    Args:
      state: A TrainState with `AGN(transport="host")`.
      facts: What must be the same for all workers, such as the config of the
        run: values for JSON by name, which may be nested dicts. A difference is
        an error that names the path, both values and both workers.

    Returns:
      The state; it is not donated.

    Raises:
      ValueError: The state has no such wrapper, or workers differ in its
        arguments, in the parameters, in `facts`, or in centers with the same
        number of commits. All of these workers raise.
      TimeoutError: Fewer workers than `quorum` came within `start_timeout`.
      RuntimeError: The worker was started already.
    """
    if self._session is not None or self._is_finished:
      raise RuntimeError(
        "Worker: start was called before: a Worker takes part in one run. "
        "Create another one."
      )
    agn = _find_agn(state)
    agn_arguments.warn_of_short_period(agn, self._num_workers, "workers")
    self._session = Session(
      self._directory,
      self._worker_id,
      self._num_workers,
      self._start_timeout,
      self._should_stop,
      agn,
    )
    # Others wait for this worker until it leaves: also if it is not closed.
    atexit.register(self.close)
    try:
      return self._session.start(state, facts or {})
    except BaseException:
      self.close()
      raise

  def commit(self, state: Any) -> Any:
    """Commits what the last local steps have accumulated, if a commit is due.

    Call it after each step. It waits for the device and for other workers only
    at the end of a period, or, with `delay`, of the delay.

    Args:
      state: The state after a local step. Do not use it again.

    Returns:
      The state to go on with.

    Raises:
      FloatingPointError: This worker's commit has NaN or infinity. It is not
        sent.
      RuntimeError: The worker was not started, or is finished.
    """
    return self._running("commit").commit(state)

  def settle(self, state: Any) -> Any:
    """Applies the commits that are under way now, rather than `delay` later.

    Call it before a state is saved: a commit under way is in no state, and
    would be lost if the run were restored from it. Without `delay` there is
    none.

    Args:
      state: The state after the last `commit`. Do not use it again.

    Returns:
      The state with all results.
    """
    return self._running("settle").settle(state)

  def finish(self, state: Any) -> Any:
    """Waits for the other workers, and returns the last state.

    Until all are done, this worker answers their commits. Commits that are
    under way are applied.

    Args:
      state: The state after the last `commit`.

    Returns:
      The state with the last center in `params`.
    """
    state = self._running("finish").finish(state)
    self.close()
    return state

  def records(self) -> list[CommitRecord]:
    """Returns the commits since the last call, in order."""
    records, self._records = self._records, []
    if self._session is not None:
      records += self._session.records()
    return records

  def close(self) -> None:
    """Leaves the run without waiting. `with` does it as well."""
    session, self._session = self._session, None
    if session is None:
      return
    atexit.unregister(self.close)
    self._is_finished = True
    self._records += session.records()
    session.close()

  def __enter__(self) -> Self:
    return self

  def __exit__(
    self,
    exc_type: type[BaseException] | None,
    exc: BaseException | None,
    traceback: types.TracebackType | None,
  ) -> None:
    self.close()

  def _running(self, name: str) -> Session:
    if self._session is not None:
      return self._session
    if self._is_finished:
      raise RuntimeError(
        f"Worker: {name} after finish or close: this worker has left the run."
      )
    raise RuntimeError(
      f"Worker: {name} before start: call state = worker.start(state) first."
    )


def _find_agn(state: Any) -> AGN:
  """Returns the AGN of a state that commits on the host.

  Raises:
    TypeError: It is no TrainState.
    ValueError: It has none.
    RuntimeError: JAX connects several processes.
  """
  if not hasattr(state, "wrappers"):
    raise TypeError(
      "Worker: state must be a flaxshard.TrainState, got "
      f"{checks.describe(state)}."
    )
  agn = host_commits.find(state.wrappers)
  if agn is None:
    compiled = any(isinstance(w, AGN) for w in state.wrappers)
    names = [base.name_of(w) for w in state.wrappers]
    raise ValueError(
      "Worker: state.wrappers must have an AGN with transport='host', got "
      + (
        "one with transport='compiled', whose commits are part of the train "
        "step. Create the state with AGN(..., transport='host')."
        if compiled
        else f"{names}."
      )
    )
  if jax.process_count() > 1:
    raise RuntimeError(
      f"Worker: JAX connects {jax.process_count()} processes, but each worker "
      "is one process alone. Leave out flaxshard.initialize() and "
      "jax.distributed.initialize()."
    )
  return agn


def _find_rank(
  worker_id: int | None, num_workers: int | None
) -> tuple[int, int]:
  """Returns the index of this worker and the number of workers."""
  if num_workers is not None:
    num_workers = checks.integer("Worker: num_workers", num_workers, minimum=1)
  if worker_id is not None:
    worker_id = checks.integer("Worker: worker_id", worker_id, minimum=0)
  if worker_id is None or num_workers is None:
    found = cluster.find(
      os.environ,
      num_processes=num_workers,
      process_id=worker_id,
      num_tpu_hosts=tpu.num_hosts(os.environ),
      needs_coordinator=False,
    )
    return found.process_id, found.num_processes
  if worker_id >= num_workers:
    raise ValueError(
      f"Worker: worker_id={worker_id} must be below num_workers={num_workers}."
    )
  return worker_id, num_workers
