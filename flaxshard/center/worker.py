"""Worker: commits the local steps of one process to the center in a store."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping
import contextlib
import logging
import math
import os
import time
from typing import Any, Self

import numpy as np

from flaxshard.center import facts as facts_lib
from flaxshard.center import heads
from flaxshard.center import store
from flaxshard.center import train_states
from flaxshard.center.members import Members
from flaxshard.center.merge import Merger
from flaxshard.center.train_states import Layout
from flaxshard.core import checks
from flaxshard.processes import cluster
from flaxshard.wrappers import stack
from flaxshard.wrappers.agn import warn_of_short_period

_log = logging.getLogger("flaxshard")

# Seconds after which a wait asks whether to stop, and those of a last write.
_ASK_SECONDS, _LAST_WRITE_SECONDS = 0.1, 5.0

# Seconds after which a worker says that it waits for others, at the start and
# at the end.
_NOTICE_SECONDS = 15.0


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

  Attributes:
    worker_id: Index of this worker, from 0.
    num_workers: Number of workers of the run, also of those that are not there.
    clock: The step that this worker is at: how many batches are behind it.
      After `start` it says where to go on in the data: at 0, at the step of a
      restored state, or where the others are. It jumps if this worker comes
      back after the others have gone on without it.
    missed_steps: Number of steps of `clock` that others have taken without this
      worker.
    is_closed: Whether this worker has left the run.
    is_finished: Whether the state has the final center, which no step changes.

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
    self._url = store.center_url(os.fspath(directory))
    found = cluster.find(
      os.environ,
      num_processes=num_workers,
      process_id=worker_id,
      needs_coordinator=False,
    )
    self.worker_id, self.num_workers = found.process_id, found.num_processes
    self.clock, self.missed_steps = 0, 0
    self.is_closed = self.is_finished = self._is_started = False
    self._start_timeout = checks.number(
      "Worker: start_timeout", start_timeout, above=0
    )
    self._should_stop = should_stop or (lambda: False)

  @property
  def is_leader(self) -> bool:
    """Whether no worker with a lower index has finished, which it looks up."""
    with contextlib.suppress(store.StoreError):
      self._members.look()
    done = {int(name) for name in self._members.find("done")}
    return min(done, default=self.worker_id) >= self.worker_id

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
        "Worker: start was called before: a Worker takes part in one run."
      )
    agn, own = train_states.find(state)
    if note := stack.divergence(state.wrappers):
      raise ValueError(
        "Worker: the replicas of this process must have equal parameters, "
        f"which are committed. {note}"
      )
    self._options = agn.transport
    self._period = agn.communication_period
    checks.integer(
      f"AGN: num_workers={self.num_workers}: transport: quorum",
      self._options.quorum,
      maximum=self.num_workers,
    )
    warn_of_short_period(agn, self.num_workers, "workers")
    self._layout = Layout(state)
    self._objects = store.Objects(self._url)
    facts_lib.agree(self._objects, self._layout, state, facts or {})
    self._layout.begin(self._objects, state)
    self._last_step = int(own.local_step)
    # The batches of a local step, which an `Accumulate` has.
    self._batches, begun = train_states.batches_per_step(state)
    self.clock = self._last_step * self._batches + begun
    # By fragment: the local step of the last commit.
    self._sent = own.sent.tolist()
    # By fragment: the examples since the last commit; none before the first
    # step. And the commit that is under way.
    self._examples: list[float] = []
    self._exchanges: dict[int, heads.Exchange] = {}
    # Of commits: seconds, versions in between, and workers.
    self._results: list[tuple[float, int, int]] = []
    self._members = Members(
      self._objects, str(self.worker_id), self.num_workers, self._options
    )
    self._merger = Merger(self._objects, self._layout, self._members)
    self._is_started = True
    # Before Python ends: TensorStore's threads would abort it.
    atexit.register(self.close)
    try:
      return self._join(state)
    except BaseException:
      self.close()
      raise

  def commit(self, state: Any, examples: float = 1.0) -> Any:
    """Commits what the last local steps have accumulated, if a commit is due.

    Call it after each step. It waits for the device and for the store only at
    the end of a period, or, with `delay`, of the delay.

    Args:
      state: The state after a local step. Do not use it again.
      examples: Number of examples, or tokens, of the step. Their sums, with
        those of skipped steps, are the weights of commits in a mean. Steps of
        the period that a checkpoint has count as many as the first after it.

    Returns:
      The state to go on with.

    Raises:
      FloatingPointError: The accumulated gradients, or other collections, have
        NaN or infinity. They are not sent.
      DamagedError: The center in the store is damaged.
      RuntimeError: The worker was not started, is closed, or was started again
        in another process; or the state is an older one, or one of several
        steps.
    """
    self._check_running("commit")
    checks.number("Worker: examples", examples, above=0)
    self.clock += 1
    if self.is_finished:
      # This step is not taken: the state is the one that others have saved.
      return self._layout.restart(state, self._last_step)
    if not self._examples:
      # A checkpoint does not say those of its steps.
      before = [self.clock - 1 - sent * self._batches for sent in self._sent]
      self._examples = [examples * batches for batches in before]
    self._examples = [x + examples for x in self._examples]
    # At most: a step may have been skipped, or its gradients accumulated. To
    # ask the device at each step would make it wait.
    self._last_step += 1
    delay = self._options.delay
    if any(
      self._options.last_due(self._period, fragment, step) == step
      for fragment in range(self._options.fragments)
      for step in (self._last_step, self._last_step - delay)
    ):
      state = self._exchange(state, delay)
    return state

  def settle(self, state: Any) -> Any:
    """Returns the state as it is to be saved.

    It waits for commits under way. Worker 0, whose checkpoints are those of the
    run, reads the newest center with its slots, which commits leave in the
    store, and its collections such as `batch_stats`. Outside of `Strategy.run`
    it goes on from these.

    Args:
      state: The state after the last `commit`. Do not use it again.
    """
    self._check_running("settle")
    for fragment in [*self._exchanges]:
      state = self._receive(state, fragment)
    # A step after the end has changed other collections.
    if self.is_finished or not self.worker_id:
      with contextlib.suppress(store.StoreError):  # the store has warned
        found = heads.read(self._objects)
        state = train_states.with_center(self._objects, found, state)
    return state

  def finish(self, state: Any) -> Any:
    """Waits for the other workers, and returns the state with the final center.

    The last worker that is there merges what is left and makes the center the
    final one. There is one, whoever has died. A worker that stops before its
    last step calls `settle` and `close` instead: for the others it has not
    ended.

    Args:
      state: The state after the last `commit`.

    Raises:
      StoreError: The store cannot be reached for `deadline` seconds.
    """
    self._check_running("finish")
    begin = time.monotonic()
    for exchange in self._exchanges.values():
      exchange.is_late = False
    state = self._exchange(state, delay=0)
    if self._due():
      _log.warning(
        "worker %d ends, and its last local steps are not in the center: the "
        "commit before them is not merged: fewer than quorum=%d workers are "
        "there, or the store cannot be reached",
        self.worker_id,
        self._options.quorum,
      )
    for exchange in self._exchanges.values():
      # The end would come without it.
      while not exchange.written.wait(_ASK_SECONDS) and not self._ask():
        self._objects.check(self._options.deadline, begin)
    self._members.announce("done")
    notice = begin + _NOTICE_SECONDS
    # After a signal the others are not waited for: another start of this worker
    # takes the final center, and saves it.
    while not self._ask() or self._members.have_ended:
      self._objects.check(self._options.deadline, begin)
      with contextlib.suppress(store.StoreError):  # the store has warned
        found = heads.read(self._objects)
        if found.finished:
          # Also if the state has it: steps after the end change collections.
          state = train_states.with_center(self._objects, found, state)
          self.is_finished = True
          break
        self._members.look()
      missing = ", ".join(sorted(self._members.find("training", "absent")))
      if missing and time.monotonic() > notice:
        notice = math.inf
        _log.warning(
          "worker %d is at its last step, and waits for worker %s to come "
          "there or to be silent for deadline=%g seconds",
          self.worker_id,
          missing,
          self._options.deadline,
        )
      time.sleep(_ASK_SECONDS)
    self.close()
    return state

  def metrics(self) -> dict[str, float]:
    """Returns figures of the commits since the last call; `{}` without any.

    `commit_seconds` from a commit to its result and `commit_staleness`, the
    versions of the center in between, are means. `commit_workers` is the number
    of workers in the last version. `commit_megabytes` were read and written.
    """
    if not self._results:
      return {}
    seconds, staleness, workers = zip(*self._results, strict=True)
    self._results = []
    num_bytes, self._objects.num_bytes = self._objects.num_bytes, 0
    return {
      "commit_workers": float(workers[-1]),
      "commit_staleness": float(np.mean(staleness)),
      "commit_megabytes": num_bytes / 1e6,
      "commit_seconds": float(np.mean(seconds)),
    }

  def close(self) -> None:
    """Leaves the run without waiting. `with` does it as well."""
    if not self._is_started or self.is_closed:
      return
    self.is_closed = True
    atexit.unregister(self.close)
    end = time.monotonic() + _LAST_WRITE_SECONDS
    for exchange in self._exchanges.values():
      exchange.written.wait(max(end - time.monotonic(), 0.0))
      exchange.watch.close(0.0)
    self._merger.close()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *error: object) -> None:
    self.close()

  # -- Start.

  def _wait_for_all(self) -> None:
    """Waits for the other workers at the beginning of a run."""
    begin = time.monotonic()
    notice, end = begin + _NOTICE_SECONDS, begin + self._start_timeout
    while missing := self._members.find("absent"):
      if any(heads.read(self._objects).versions):
        return
      names = ", ".join(sorted(missing))
      message = (
        f"worker {names} of {self.num_workers} has not come to {self._url}"
      )
      limit = f"start_timeout={self._start_timeout:g} seconds"
      if time.monotonic() > end:
        message = f"{message} within {limit}"
        if self.num_workers - len(missing) < self._options.quorum:
          raise TimeoutError(f"Worker: {message}.")
        _log.warning("%s: the run begins without it", message)
        return
      if time.monotonic() > notice:
        _log.warning("%s: waiting for it, at most %s", message, limit)
        notice = end
      if self._ask():
        raise InterruptedError("Worker: should_stop has ended the wait.")
      time.sleep(_ASK_SECONDS)
      self._members.look()

  def _join(self, state: Any) -> Any:
    """Returns the state at the center of the run."""
    # Of earlier starts of this worker. They may come into the center meanwhile.
    commits, name = heads.find_commits(self._objects), str(self.worker_id)
    steps = [key.step for key in commits if key.worker == name]
    found = heads.read(self._objects)
    if not (found.finished or any(found.versions)):
      # Who is there at the beginning has not missed what others do after it.
      self._wait_for_all()
    step, versions = self._last_step, train_states.find(state)[1].versions
    is_newest = versions.tolist() == found.versions and not found.finished
    if step and is_newest and max(steps, default=0) <= step:
      return state  # as it was left
    return self._go_on(state, found, max(step, found.step, *steps))

  def _go_on(self, state: Any, found: heads.Heads, local_step: int) -> Any:
    """Returns the state that goes on from a center of the store.

    Args:
      state: The state of this worker.
      found: The heads of the center.
      local_step: The step from which local steps go on.
    """
    state = train_states.with_center(self._objects, found, state)
    if found.finished:
      _log.warning(
        "worker %d finds that the run has ended: it takes the final center",
        self.worker_id,
      )
      self.is_finished = True
      self._exchanges.clear()
    missed = local_step - int(train_states.find(state)[1].local_step)
    if missed > 0:
      _log.warning(
        "worker %d goes on from local step %d, where the others are: it has "
        "missed %d",
        self.worker_id,
        local_step,
        missed,
      )
    self.clock += missed * self._batches
    self.missed_steps += missed * self._batches
    self._last_step = local_step
    self._sent = [local_step] * self._options.fragments
    self._examples = [0.0] * self._options.fragments
    return self._layout.restart(state, local_step)

  # -- Commits.

  def _exchange(self, state: Any, delay: int) -> Any:
    """Sends the commits that are due, takes the results, and catches up.

    Args:
      state: The state of this worker.
      delay: The local steps after which a result is waited for.
    """
    self._ask()
    own = train_states.find(state)[1]
    sent, step = own.sent.tolist(), int(own.local_step)
    if sent != self._sent or step > self._last_step:
      raise RuntimeError(
        f"Worker: the state is at local step {step} and has committed those up "
        f"to {min(sent)}, where {self._last_step} and {min(self._sent)} are "
        "expected. Call commit after each step, and go on with the state that "
        "start, commit and settle return; an older one, as of a checkpoint, "
        "needs a new Worker."
      )
    # Steps that were skipped, or are accumulated, do not count.
    self._last_step = step
    for fragment in self._due():
      state = self._send(state, fragment)
    for fragment, exchange in [*self._exchanges.items()]:
      if exchange.key.step + delay <= self._last_step:
        state = self._receive(state, fragment)
    return self._catch_up(state)

  def _catch_up(self, state: Any) -> Any:
    """Returns the state at the step of the others, if they have gone on.

    They have if this worker stood still, or if the run has ended without it.
    """
    exchanges = self._exchanges.values()
    has_ended = any(x.watch.has_ended() and not x.result for x in exchanges)
    if has_ended or (self._members.was_away and not exchanges):
      # If the store cannot be read, at the next commit.
      with contextlib.suppress(store.StoreError):
        found = heads.read(self._objects)
        if found.finished or found.step > self._last_step:
          state = self._go_on(state, found, max(self._last_step, found.step))
        self._members.was_away = False
    return state

  def _send(self, state: Any, fragment: int) -> Any:
    """Takes a commit that is due out of the state and starts its exchange."""
    # One at a time: until its result has come, the next one grows.
    state = self._receive(state, fragment)
    if fragment in self._exchanges or self.is_finished:
      return state
    state, commit = self._layout.take(state, fragment)
    commit["examples"] = self._examples[fragment]
    self._examples[fragment], self._sent[fragment] = 0.0, self._last_step
    key = heads.Key(fragment, self._members.start, self._last_step)
    self._exchanges[fragment] = heads.Exchange(
      self._objects, key, commit, self._merger.watch.wake
    )
    return state

  def _receive(self, state: Any, fragment: int) -> Any:
    """Returns the state that continues from the result of a commit, if any.

    It waits for the result until the deadline, but not for a late one.
    """
    exchange, begin = self._exchanges.get(fragment), time.monotonic()
    if exchange is None:
      return state
    while not (exchange.is_late or exchange.watch.has_ended(_ASK_SECONDS)):
      stops, seconds = self._ask(), self._options.deadline
      if time.monotonic() - begin > (_LAST_WRITE_SECONDS if stops else seconds):
        exchange.is_late = True
        if not stops:
          _log.warning(
            "worker %d goes on alone: its commit of local step %d is not in "
            "the center after deadline=%g seconds",
            self.worker_id,
            exchange.key.step,
            seconds,
          )
    if exchange.result is None:
      return state  # it is late, or the run has ended: see `_catch_up`
    del self._exchanges[fragment]
    head, parts = exchange.result
    took = time.monotonic() - exchange.begin
    versions = max(head.version - exchange.commit["version"] - 1, 0)
    self._results.append((took, versions, head.workers))
    return self._layout.pull(state, fragment, head, parts)

  def _due(self) -> list[int]:
    """Returns the fragments of which a commit is due."""
    return [
      fragment
      for fragment, sent in enumerate(self._sent)
      if sent < self._options.last_due(self._period, fragment, self._last_step)
    ]

  def _ask(self) -> bool:
    """Returns whether to stop; raises what has ended this worker."""
    self._merger.watch.has_ended()
    for exchange in self._exchanges.values():
      exchange.watch.has_ended()
    return self._should_stop()

  def _check_running(self, name: str) -> None:
    if not self._is_started or self.is_closed:
      raise RuntimeError(
        f"Worker: {name} needs a worker that is in the run: call it after "
        "state = worker.start(state), and before finish and close."
      )
