"""Worker: commits the local steps of one process to the center in a store."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping
import contextlib
import logging
import os
import threading
import time
import types
from typing import Any, Self

import jax
import numpy as np

from flaxshard.center import facts as facts_lib
from flaxshard.center import heads
from flaxshard.center import train_states
from flaxshard.center import update as update_lib
from flaxshard.center.exchange import Exchange
from flaxshard.center.heads import Head
from flaxshard.center.members import Members
from flaxshard.center.merge import Merger
from flaxshard.center.store import center_url
from flaxshard.center.store import Objects
from flaxshard.center.store import StoreError
from flaxshard.center.update import CenterUpdate
from flaxshard.core import checks
from flaxshard.processes import cluster
from flaxshard.wrappers import agn_store
from flaxshard.wrappers import stack
from flaxshard.wrappers.agn import warn_of_short_period

_log = logging.getLogger("flaxshard")

# Seconds after which a wait asks `should_stop`.
_ASK_SECONDS = 0.1


class Worker:
  """Commits a train state with `AGN(transport="store")` to a center.

  Each worker is one process with any number of devices, and a JAX world of its
  own. It takes local steps alone. After each step `commit` looks whether a
  commit is due, and if so writes it to the store. One of the workers merges
  what they have committed. Workers may die, and come back or join at any time.

  Args:
    directory: What all workers of the run share: a folder, `gs://bucket/run`,
      `s3://bucket/run`, or `memory://run` for threads of one process. The
      center lies in `directory/center`.
    worker_id: Index of this worker, from 0. None: from the variables of a
      launcher, as `flaxshard.initialize` finds them; no coordinator is needed.
    num_workers: Number of workers of the run. None: as for `worker_id`.
    start_timeout: Seconds that the first `start` waits for all workers. After
      that the run goes on with those that are there, if they are `quorum`.
    should_stop: A function that returns True when this worker shall stop, as
      after a signal. Then nothing is waited for any more. None: never.

  Raises:
    TypeError: An argument is of a wrong type.
    ValueError: `worker_id` is not below `num_workers`, or they are not given
      and no variables of a launcher are set.

  Example:
    >>> import flaxshard as fs, jax.numpy as jnp, optax
    >>> state = fs.TrainState.create(
    ...     apply_fn=None, params={"w": jnp.ones(())}, tx=optax.sgd(0.25),
    ...     wrappers=[fs.AGN(2, "mean", transport="store")])
    >>> with fs.Worker("memory://example_run", 0, num_workers=1) as worker:
    ...   state = worker.start(state)
    ...   while worker.clock < 4:
    ...     state, loss = state.minimize(lambda p: 2 * p["w"])
    ...     state = worker.commit(state)
    ...   state = worker.finish(state)
    >>> float(state.params["w"])
    0.0

  References:
    Hermans, Accumulated Gradient Normalization, 2017 (arXiv:1710.02368), for
    the center; Decoupled DiLoCo, 2026 (arXiv:2604.21428), for quorum, grace and
    the synchronizer.
  """

  def __init__(
    self,
    directory: str,
    worker_id: int | None = None,
    num_workers: int | None = None,
    start_timeout: float = 300.0,
    should_stop: Callable[[], bool] | None = None,
  ):
    self._url = center_url(checks.path("Worker: directory", directory))
    if num_workers is not None:
      checks.integer("Worker: num_workers", num_workers, minimum=1)
      if worker_id is not None:
        last = num_workers - 1
        checks.integer("Worker: worker_id", worker_id, minimum=0, maximum=last)
    found = cluster.find(
      os.environ,
      num_processes=num_workers,
      process_id=worker_id,
      needs_coordinator=False,
    )
    self._worker_id, self._num_workers = found.process_id, found.num_processes
    self._start_timeout = checks.number(
      "Worker: start_timeout", start_timeout, above=0
    )
    self._should_stop = should_stop or (lambda: False)
    self._closed = threading.Event()
    self._is_started = False
    self._is_finished = False
    self._clock = 0
    self._missed_steps = 0

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
    """The step that this worker is at: how many batches are behind it.

    After `start` it says where to go on in the data: at 0, at the step of a
    restored state, or where the others are. It jumps if this worker comes back
    after the others have gone on without it.
    """
    return self._clock

  @property
  def missed_steps(self) -> int:
    """Number of steps of `clock` that others have taken without this one."""
    return self._missed_steps

  @property
  def is_closed(self) -> bool:
    """Whether this worker has left the run."""
    return self._closed.is_set()

  @property
  def is_finished(self) -> bool:
    """Whether the state has the final center, which no step changes."""
    return self._is_finished

  @property
  def is_leader(self) -> bool:
    """Whether no worker with a lower index has finished, which it looks up."""
    with contextlib.suppress(StoreError):
      self._members.look()
    done = {int(name) for name in self._members.in_phase("done")}
    return min(done, default=self._worker_id) == self._worker_id

  def start(self, state: Any, facts: Mapping[str, Any] | None = None) -> Any:
    """Joins the other workers, and returns the state to begin with.

    The first worker writes its center to the store. The others take it over. If
    the run is under way, the state continues from its center.

    Args:
      state: A TrainState with `AGN(transport="store")`.
      facts: What must be the same for all workers, such as the config of the
        run: values for JSON by name, which may be nested dicts.

    Returns:
      The state; it is not donated.

    Raises:
      ValueError: The state has no such wrapper, or this worker differs from
        the run in its arguments, in the parameters, in the optimizer or in
        `facts`. The others go on.
      StoreError: The store cannot be read or written.
      TimeoutError: Fewer workers than `quorum` came within `start_timeout`.
      RuntimeError: The worker was started already.
      InterruptedError: `should_stop` has ended the wait for the others.
    """
    if self._is_started:
      raise RuntimeError(
        "Worker: start was called before: a Worker takes part in one run. "
        "Create another one."
      )
    self._is_started = True
    agn, own = _find_agn(state)
    store = self._store = agn.transport
    if store.quorum > self._num_workers:
      raise ValueError(
        f"AGN: transport: quorum={store.quorum} must be at most num_workers="
        f"{self._num_workers}."
      )
    warn_of_short_period(agn, self._num_workers, "workers")
    self._agn = agn
    self._update = CenterUpdate(state)
    self._objects = Objects(self._url)
    facts_lib.agree(
      self._objects, facts_lib.describe(self._update, state, facts or {})
    )
    self._members = Members(
      self._objects,
      str(self._worker_id),
      self._num_workers,
      store.grace,
      store.deadline,
    )
    self._merger = Merger(self._objects, self._update, self._members)
    self._exchange = Exchange(
      self._objects,
      f"{self._worker_id}-{self._members.start}",
      store.deadline,
      self._merger.wake,
    )
    self._last_step = self._clock = int(own.local_step)
    # Calls of `commit` until there may be something to do.
    self._calls_left = 1
    # By fragment: the examples since the last commit.
    self._examples = [0.0] * store.fragments
    # Fragments whose commit was due while the one before was under way.
    self._overdue: set[int] = set()
    # Before Python ends: TensorStore's threads would abort it.
    atexit.register(self.close)
    try:
      for fragment in range(store.fragments):
        self._create_head(state, fragment)
      self._members.enter()
      self._merger.start()
      found = self._read_heads()
      is_new = not any(head.version or head.finished for head in found)
      if is_new:
        self._wait_for_all()
      return self._join(state, is_new)
    except BaseException:
      self.close()
      raise

  def commit(self, state: Any, examples: float = 1.0) -> Any:
    """Commits what the last local steps have accumulated, if a commit is due.

    Call it after each step. It waits for the device and for the store only at
    the end of a period, or, with `delay`, of the delay.

    Args:
      state: The state after a local step. Do not use it again.
      examples: Number of examples, or tokens, of the step. Their sums are the
        weights of commits in a mean.

    Returns:
      The state to go on with.

    Raises:
      FloatingPointError: The accumulated gradients have NaN or infinity. They
        are not sent.
      DamagedError: The center in the store is damaged.
      RuntimeError: The worker was not started, is closed, or was started again
        in another process.
    """
    self._check_running("commit")
    checks.number("Worker: examples", examples, above=0)
    self._clock += 1
    if self._is_finished:
      # This step is not taken: the state is the one that others have saved.
      return train_states.restart(state, [], self._last_step)
    self._examples = [x + examples for x in self._examples]
    self._calls_left -= 1
    if self._calls_left:
      return state
    local_step = int(update_lib.find(state)[1].local_step)
    self._calls_left = self._steps_to_next(local_step)
    if local_step == self._last_step:
      return state  # the step was skipped, or is accumulated
    self._last_step = local_step
    self._members.check()
    due = agn_store.due(self._agn, local_step)
    if self._store.delay:
      for fragment in agn_store.due(self._agn, local_step - self._store.delay):
        state = self._receive(state, fragment)
    for fragment in due:
      # One commit at a time: until its result has come, the next one grows.
      state = self._receive(state, fragment, wait=False)
      state = self._send(state, fragment)
    if not self._store.delay:
      for fragment in due:
        state = self._receive(state, fragment)
    if self._members.was_away and not self._exchange.under_way:
      # If the store cannot be read, at the next commit.
      with contextlib.suppress(StoreError):
        if not self._is_finished and self._step_of_all() > local_step:
          state = self._take_newest(state, self._step_of_all())
        self._members.was_away = False
    return state

  def settle(self, state: Any) -> Any:
    """Returns the state as it is to be saved.

    It waits for commits under way. Worker 0, whose checkpoints are those of the
    run, reads the newest center with its slots, which commits leave in the
    store.

    Args:
      state: The state after the last `commit`. Do not use it again.
    """
    self._check_running("settle")
    for fragment in self._exchange.under_way:
      state = self._receive(state, fragment)
    if self._is_finished or self._worker_id:
      return state
    with contextlib.suppress(StoreError):  # the store has warned
      return self._take_newest(state)
    return state

  def finish(self, state: Any) -> Any:
    """Waits for the other workers, and returns the state with the final center.

    The last worker that is there merges what is left and makes the center the
    final one. There is one, whoever has died.

    Args:
      state: The state after the last `commit`.

    Raises:
      StoreError: The store cannot be reached for `deadline` seconds.
    """
    self._check_running("finish")
    self._exchange.retry()
    for fragment in range(self._store.fragments):
      state = self._receive(state, fragment)
      if fragment in self._overdue:
        state = self._receive(self._send(state, fragment), fragment)
    if self._overdue:
      _log.warning(
        "worker %d ends, and its last local steps are not in the center: the "
        "commit before them is not merged: fewer than quorum=%d workers are "
        "there, or the store cannot be reached",
        self._worker_id,
        self._store.quorum,
      )
    self._exchange.wait_until_written(self._ask)
    if not self._is_finished:
      self._members.announce("done")
      state = self._wait_for_end(state)
    self.close()
    return state

  def metrics(self) -> dict[str, float]:
    """Returns figures of the commits since the last call; `{}` without any.

    `commit_seconds` from a commit to its result and `commit_staleness`, the
    versions of the center in between, are means. `commit_workers` is the number
    of workers in the last version. `commit_megabytes` were read and written.
    """
    return self._exchange.metrics()

  def close(self) -> None:
    """Leaves the run without waiting. `with` does it as well."""
    if not self._is_started or self._closed.is_set():
      return
    self._closed.set()
    atexit.unregister(self.close)
    if hasattr(self, "_exchange"):
      self._exchange.close()
      self._merger.close()
      self._members.leave()

  def __enter__(self) -> Self:
    return self

  def __exit__(
    self,
    exc_type: type[BaseException] | None,
    exc: BaseException | None,
    traceback: types.TracebackType | None,
  ) -> None:
    self.close()

  # -- Start.

  def _create_head(self, state: Any, fragment: int) -> None:
    """Writes the center of a state, unless the store has one as new."""
    head, generation = heads.read(self._objects, fragment)
    _, own = update_lib.find(state)
    if head is None or head.version < int(own.versions[fragment]):
      center = train_states.first_center(self._update, state, fragment)
      heads.publish(self._objects, center, generation)

  def _read_heads(self) -> list[Head]:
    return heads.read_every(self._objects, self._store.fragments)

  def _wait_for_all(self) -> None:
    """Waits for the other workers at the beginning of a run."""
    end = time.monotonic() + self._start_timeout
    while (
      missing := self._members.in_phase("absent")
    ) and time.monotonic() < end:
      if any(head.version for head in self._read_heads()):
        return
      if self._ask():
        raise InterruptedError("Worker: should_stop has ended the wait.")
      time.sleep(_ASK_SECONDS)
      self._members.look()
    if not missing:
      return
    names = ", ".join(sorted(missing))
    message = (
      f"worker {names} of {self._num_workers} has not come to {self._url} "
      f"within start_timeout={self._start_timeout:g} seconds"
    )
    if self._num_workers - len(missing) < self._store.quorum:
      raise TimeoutError(f"Worker: {message}.")
    _log.warning("%s: the run begins without it", message)

  def _join(self, state: Any, is_new: bool) -> Any:
    """Returns the state at the center of the run.

    Args:
      state: The state of this worker.
      is_new: Whether this worker was there at the beginning: it has not missed
        what others have done since.
    """
    _, own = update_lib.find(state)
    found = self._read_heads()
    if heads.have_ended(found):
      return self._take_final(state)
    step, versions = int(own.local_step), own.versions.tolist()
    # Else it is the state of another transport or of other fragments.
    is_own = step <= self._agn.communication_period or bool(own.sent.any())
    is_own &= self._find_last_step() <= step
    if step and is_own and versions == [head.version for head in found]:
      return state  # as it was left
    newest = step if is_new else max(step, self._step_of_all())
    return self._take_newest(state, newest)

  def _take_newest(self, state: Any, local_step: int | None = None) -> Any:
    """Returns the state with the newest center and its slots.

    Args:
      state: The state of this worker.
      local_step: The step from which local steps go on, from the center; None:
        they stay as they are.
    """
    centers = [
      heads.read_center(self._objects, fragment, head, slots=True)[1]
      for fragment, head in enumerate(self._read_heads())
    ]
    if local_step is None:
      for center in centers:
        state = train_states.put_center(state, center)
      return state
    missed = local_step - int(update_lib.find(state)[1].local_step)
    if missed > 0:
      _log.warning(
        "worker %d goes on from local step %d, where the others are: it has "
        "missed %d",
        self._worker_id,
        local_step,
        missed,
      )
    self._clock += missed
    self._missed_steps += missed
    self._last_step = local_step
    self._calls_left = self._steps_to_next(local_step)
    return train_states.restart(state, centers, local_step)

  def _step_of_all(self) -> int:
    """Returns the largest local step of a commit in the store."""
    steps = [head.step for head in self._read_heads()]
    return max(*steps, self._find_last_step())

  def _find_last_step(self) -> int:
    """Returns the local step of the last commit of this worker in the store."""
    keys = [
      key
      for fragment in range(self._store.fragments)
      for key in self._objects.list(f"commit/{fragment}/{self._worker_id}-")
    ]
    return max((int(key.rpartition("/")[2]) for key in keys), default=0)

  # -- Commits.

  def _steps_to_next(self, local_step: int) -> int:
    """Returns in how many steps there may be something to send or receive."""
    delays = {0, self._store.delay}
    return next(
      n
      for n in range(1, self._agn.communication_period + 1)
      if any(agn_store.due(self._agn, local_step + n - d) for d in delays)
      or n == self._agn.communication_period
    )

  def _send(self, state: Any, fragment: int) -> Any:
    """Takes a commit out of the state and starts its exchange."""
    if fragment in self._exchange.under_way:
      self._overdue.add(fragment)
      return state
    self._overdue.discard(fragment)
    if self._is_finished:
      return state
    base = None
    if self._store.commit_dtype is not None:
      _, own = update_lib.find(state)
      center = update_lib.center_of(state, own)
      arrays = self._update.arrays_of(fragment, center)
      # Copies: the state may be donated.
      arrays = {path: np.array(x) for path, x in arrays.items()}
      base = int(own.versions[fragment]), arrays
    state, commit = train_states.take(self._update, state, fragment)
    if commit["steps"]:
      commit["examples"] = self._examples[fragment]
      self._exchange.send(fragment, commit, base)
    self._examples[fragment] = 0.0
    return state

  def _receive(self, state: Any, fragment: int, wait: bool = True) -> Any:
    """Returns the state that continues from the result of a commit, if any."""
    found = self._exchange.receive(fragment, wait, self._ask)
    if found is None:
      return state
    head, center = found
    if head.finished:
      return self._take_final(state)
    return train_states.pull(self._update, state, center)

  def _ask(self) -> bool:
    """Returns whether to stop; raises what has ended this worker."""
    self._members.check()
    if self._merger.error is not None:
      raise self._merger.error
    return self._should_stop()

  # -- The end.

  def _wait_for_end(self, state: Any) -> Any:
    """Waits until the center is the final one, or makes it so."""
    last = time.monotonic()
    while True:
      try:
        if heads.have_ended(self._read_heads()):
          return self._take_final(state)
        self._members.look()
        if self._members.over() | {str(self._worker_id)} >= self._members.names:
          self._merger.finish()
          continue
        last = time.monotonic()
      except StoreError:
        if time.monotonic() - last > self._store.deadline:
          raise
      if self._ask():
        return state
      time.sleep(_ASK_SECONDS)

  def _take_final(self, state: Any) -> Any:
    """Returns the state with the final center, at the last step of the run."""
    is_late = not self._members.is_done
    self._exchange.drop()
    self._members.announce("done")
    # Another start of this worker takes the final center, and saves it.
    self._members.check()
    with self._objects.patient(self._closed, self._store.deadline):
      # One that died may have begun it.
      self._merger.finish()
      self._is_finished = True
      if not is_late:
        return self._take_newest(state)
      _log.warning(
        "worker %d finds that the run has ended: it takes the final center",
        self._worker_id,
      )
      newest = max(self._last_step, self._step_of_all())
      return self._take_newest(state, newest)

  def _check_running(self, name: str) -> None:
    if not self._is_started:
      raise RuntimeError(
        f"Worker: {name} before start: call state = worker.start(state) first."
      )
    if self._closed.is_set():
      raise RuntimeError(
        f"Worker: {name} after finish or close: this worker has left the run."
      )


def _find_agn(state: Any) -> tuple[Any, Any]:
  """Returns the AGN of a state that commits to a store, and its state.

  Raises:
    TypeError: It is no TrainState.
    ValueError: It has none, or its replicas differ.
    RuntimeError: JAX connects several processes.
  """
  if not hasattr(state, "wrappers"):
    raise TypeError(
      "Worker: state must be a flaxshard.TrainState, got "
      f"{checks.describe(state)}."
    )
  found = update_lib.find(state)
  if note := stack.divergence(state.wrappers):
    raise ValueError(
      "Worker: the replicas of this process must have equal parameters, which "
      f"are committed. {note}"
    )
  if jax.process_count() > 1:
    raise RuntimeError(
      f"Worker: JAX connects {jax.process_count()} processes, but each worker "
      "is one process alone. Leave out flaxshard.initialize() and "
      "jax.distributed.initialize()."
    )
  return found
