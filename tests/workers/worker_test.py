"""Workers in threads: they equal compiled commits, join, and end."""

import contextlib
import functools
import json
import logging
import re
import threading
import time

import compilations
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import worker_threads

import flaxshard as fs
from flaxshard.workers import view_log


def _assert_equal(workers, compiled, local=True, **tolerance):
  """Compares centers, slots, local parameters and accumulators."""
  close = lambda a, b: np.testing.assert_allclose(
    a, b, **{"rtol": 2e-6, "atol": 2e-6, **tolerance}
  )
  wanted = jax.device_get(compiled)
  agn = wanted.wrapper_states["agn"]
  for k, (state, _) in enumerate(workers):
    state = jax.device_get(state)
    own = state.wrapper_states["agn"]
    jax.tree.map(close, state.params, wanted.params)
    assert int(own.commits) == int(agn.commits)
    assert int(own.local_step) == int(agn.local_step)
    if not local:
      continue
    jax.tree.map(close, state.opt_state, wanted.opt_state)
    jax.tree.map(close, own.outer_opt_state, agn.outer_opt_state)
    per_replica = ("local_params", "local_opt_state", "grad_accum")
    for field in per_replica:
      jax.tree.map(
        lambda a, b: close(a, b[k]),  # noqa: B023
        getattr(own, field),
        getattr(agn, field),
      )


HOST = {"communication_period": 2, "commit": "mean", "transport": "host"}
DILOCO = {
  "commit_delta": True,
  "outer_tx": optax.sgd(0.7, momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize(
  ("count", "agn"),
  [
    pytest.param(2, {"commit": "mean"}, id="mean"),
    pytest.param(3, {"commit": "mean"}, id="three", marks=pytest.mark.slow),
    pytest.param(2, {"commit": "sum"}, id="sum", marks=pytest.mark.slow),
    pytest.param(
      2,
      {"commit": "mean", **DILOCO},
      id="DiLoCo",
      marks=pytest.mark.slow,
    ),
    pytest.param(
      2,
      {"commit": "mean", "fragments": 3},
      id="fragments",
      marks=pytest.mark.slow,
    ),
    pytest.param(
      2,
      {"commit": "mean", "fragments": 2, "fragment_offset": 0},
      id="fragments together",
      marks=pytest.mark.slow,
    ),
    pytest.param(
      2,
      {"commit": "mean", "share_step_count": True},
      id="one step count",
      marks=pytest.mark.slow,
    ),
  ],
)
def test_workers_equal_compiled_commits(tmp_path, count, agn):
  agn = {"communication_period": 4, **agn}
  tx = optax.adam(0.05)
  workers = worker_threads.run_workers(tmp_path, count, 13, agn, tx)
  _assert_equal(workers, worker_threads.run_compiled(count, 13, agn, tx))


@pytest.mark.slow
@pytest.mark.parametrize(
  ("fragments", "delay", "steps"), [(1, 2, 14), (2, 1, 13)]
)
def test_a_delay_with_blend_equals_compiled_commits(
  tmp_path, fragments, delay, steps
):
  agn = {
    "communication_period": 4,
    "commit": "mean",
    "delay": delay,
    "blend": 0.25,
    "fragments": fragments,
  }
  workers = worker_threads.run_workers(tmp_path, 2, steps, agn)
  _assert_equal(workers, worker_threads.run_compiled(2, steps, agn))


@pytest.mark.parametrize(
  "fmt",
  [
    pytest.param("bfloat16", marks=pytest.mark.slow),
    "int8",
    pytest.param("int4", marks=pytest.mark.slow),
  ],
)
def test_quantized_commits_lose_nothing(tmp_path, fmt):
  agn = {"communication_period": 4, "commit": "mean", "commit_delta": True}
  agn |= {"outer_tx": optax.sgd(1.0)}
  agn |= {"commit_dtype": fmt}
  workers = worker_threads.run_workers(tmp_path, 2, 4, agn)
  plain = worker_threads.run_compiled(2, 4, {**agn, "commit_dtype": None})
  # Center and accumulators together have all of both deltas.
  one, two = (jax.device_get(state) for state, _ in workers)
  for name, p in worker_threads.PARAMS.items():
    rests = [s.wrapper_states["agn"].grad_accum[name] for s in (one, two)]
    np.testing.assert_allclose(
      one.params[name] - sum(rests) / 2, plain.params[name], atol=1e-5
    )
    np.testing.assert_array_equal(one.params[name], two.params[name])
    assert (p.ndim > 0) == bool(np.abs(rests[0]).max() + np.abs(rests[1]).max())
  # Two parts of two blocks, and what is not quantized: a scalar and flags.
  size = {"bfloat16": 1024, "int8": 520, "int4": 264}[fmt]
  [record] = workers[0][1]
  # An owner's answer to the other worker may count for a later commit.
  assert size + 12 <= record.bytes_sent <= 2 * (size + 12)
  assert record.bytes_received == 2 * (size + 12)


def test_a_single_worker_commits_alone(tmp_path):
  agn = {"communication_period": 2, "commit": "mean"}
  [(state, records)] = worker_threads.run_workers(tmp_path, 1, 4, agn)
  _assert_equal([(state, records)], worker_threads.run_compiled(1, 4, agn))
  assert [r.commit for r in records] == [1, 2]
  assert [r.workers for r in records] == [(0,), (0,)]
  lines = (tmp_path / "0" / "commits.jsonl").read_text().splitlines()
  assert [json.loads(line)["local_step"] for line in lines] == [2, 4]


@pytest.mark.parametrize(
  ("agn", "tx"),
  [
    pytest.param({}, optax.adam(0.05), id="adam"),
    pytest.param(DILOCO, optax.sgd(0.1), id="DiLoCo", marks=pytest.mark.slow),
    pytest.param(
      {"fragments": 2},
      optax.adam(0.05),
      id="fragments",
      marks=pytest.mark.slow,
    ),
    pytest.param(
      {},
      optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
      id="one owner",
      marks=pytest.mark.slow,
    ),
    pytest.param(
      {"share_step_count": True},
      optax.adam(0.05),
      id="one count",
      marks=pytest.mark.slow,
    ),
  ],
)
def test_sequential_commits_in_order_equal_compiled_ones(tmp_path, agn, tx):
  agn = {"communication_period": 4, "commit": "sequential", **agn}
  turns = Turns(2)

  def train(k):
    with fs.Worker(str(tmp_path), k, 2) as worker:
      state = worker.start(
        worker_threads.create({**agn, "transport": "host"}, tx)
      )
      for number in range(13):
        state, _ = worker_threads.jit_step(
          state, worker_threads.target_of(k, number)
        )
        with turns.take(k):
          state = worker.commit(state)
      return worker.finish(state), worker.records()

  workers = worker_threads.raise_errors(
    worker_threads.run_threads([functools.partial(train, k) for k in range(2)])
  )
  compiled = worker_threads.run_compiled(2, 13, agn, tx)
  wanted = jax.device_get(compiled)
  for k, (state, records) in enumerate(workers):
    state = jax.device_get(state)
    close = functools.partial(np.testing.assert_allclose, rtol=5e-6, atol=5e-6)
    jax.tree.map(close, state.params, wanted.params)
    jax.tree.map(close, state.opt_state, wanted.opt_state)
    own, theirs = (s.wrapper_states["agn"] for s in (state, wanted))
    jax.tree.map(close, own.outer_opt_state, theirs.outer_opt_state)
    jax.tree.map(
      lambda a, b, k=k, close=close: close(a, b[k]),
      own.local_params,
      theirs.local_params,
    )
    # Worker 1 has pulled before the next commit of worker 0, and the reverse.
    assert {r.staleness for r in records[2:]} == {1}


class Turns:
  """Lets threads do something one after another, again and again."""

  def __init__(self, count):
    self._changed = threading.Condition()
    self._count, self._turn = count, 0

  @contextlib.contextmanager
  def take(self, k):
    with self._changed:
      assert self._changed.wait_for(lambda: self._turn == k, 30)
    yield
    with self._changed:
      self._turn = (self._turn + 1) % self._count
      self._changed.notify_all()


@pytest.mark.slow
def test_sequential_workers_with_a_delay_and_int8_end_with_one_center(tmp_path):
  agn = {
    "communication_period": 4,
    "commit": "sequential",
    "delay": 2,
    "blend": 0.25,
    "fragments": 2,
    "commit_dtype": "int8",
  }
  workers = worker_threads.run_workers(tmp_path, 3, 17, agn)
  first = workers[0][0]
  for state, records in workers:
    jax.tree.map(np.testing.assert_array_equal, state.params, first.params)
    jax.tree.map(
      np.testing.assert_array_equal, state.opt_state, first.opt_state
    )
    assert [r.commit for r in records] == list(range(1, 9))


# -- Checkpoints.


@pytest.mark.parametrize(
  "commit", ["mean", pytest.param("sequential", marks=pytest.mark.slow)]
)
def test_a_restored_run_ends_the_same(tmp_path, commit):
  agn = {**HOST, "communication_period": 4, "commit": commit}
  tx = optax.adam(0.05)

  def run(folder, first, last, states):
    in_order = commit == "sequential"
    turn = Turns(2).take if in_order else contextlib.nullcontext

    def train(k):
      with fs.Worker(str(tmp_path / folder), k, 2) as worker:
        state = worker.start(states[k])
        for number in range(first, last):
          state, _ = worker_threads.jit_step(
            state, worker_threads.target_of(k, number)
          )
          with turn(k):
            state = worker.commit(state)
        state = worker.settle(state)
        saved = jax.tree.map(np.array, state)
        return saved, worker.finish(state)

    return worker_threads.raise_errors(
      worker_threads.run_threads(
        [functools.partial(train, k) for k in range(2)]
      )
    )

  create = lambda: [worker_threads.create(agn, tx) for _ in range(2)]
  whole = run("whole", 0, 14, create())
  saved = [s for s, _ in run("first", 0, 6, create())]
  restored = [jax.tree.map(jnp.asarray, s) for s in saved]
  resumed = run("second", 6, 14, restored)
  for (_, a), (_, b) in zip(whole, resumed, strict=True):
    jax.tree.map(np.testing.assert_array_equal, a, b)


# -- Who comes later, and who is behind.


def test_a_worker_that_joins_pulls_the_center(tmp_path, caplog):
  caplog.set_level(logging.INFO, "flaxshard")
  agn = {
    "communication_period": 4,
    "commit": "mean",
    "transport": "host",
    "heartbeat": 5.0,
  }
  has_begun, has_come = threading.Event(), threading.Event()
  centers = {}

  def first():
    with fs.Worker(str(tmp_path), 0, 2, start_timeout=0.3) as worker:
      with pytest.warns(UserWarning, match="workers 1 of 2 have not come"):
        state = worker.start(worker_threads.create(agn))
      state = worker_threads.take_steps(worker, state, range(6))
      has_begun.set()
      # Steps that are skipped: the other one asks for the center.
      while not has_come.is_set():
        state = worker.commit(state)
        time.sleep(0.01)
      state = worker_threads.take_steps(worker, state, range(6, 16))
      return worker.finish(state), worker.records()

  def second():
    assert has_begun.wait(30)
    with fs.Worker(str(tmp_path), 1, 2) as worker:
      state = worker.start(worker_threads.create(agn))
      has_come.set()
      assert worker.clock == worker.missed_steps == 6
      centers[1] = jax.device_get(state.params)
      state = worker_threads.take_steps(worker, state, range(6, 16))
      return worker.finish(state), worker.records()

  (one, records), (two, later) = worker_threads.raise_errors(
    worker_threads.run_threads([first, second])
  )
  assert [r.workers for r in records] == [(0,), (0, 1), (0, 1), (0, 1)]
  assert [r.commit for r in later] == [2, 3, 4]
  jax.tree.map(np.testing.assert_array_equal, one.params, two.params)
  assert int(two.step) == int(one.step) == 16


def test_a_worker_that_is_behind_gets_the_newest_center(tmp_path):
  agn = {"communication_period": 2, "commit": "mean"}
  [(ahead, _)] = worker_threads.run_workers(tmp_path / "a", 1, 4, agn)
  agn |= {"transport": "host", "heartbeat": 5.0}

  def continue_from(k, state):
    with fs.Worker(str(tmp_path / "b"), k, 2) as worker:
      state = worker.start(state)
      missed = worker.missed_steps
      return worker.finish(state), missed

  (one, missed_one), (two, missed_two) = worker_threads.raise_errors(
    worker_threads.run_threads(
      [
        functools.partial(continue_from, 0, worker_threads.create(agn)),
        functools.partial(continue_from, 1, ahead),
      ]
    )
  )
  assert (missed_one, missed_two) == (4, 0)
  jax.tree.map(np.testing.assert_array_equal, one.params, two.params)
  assert int(one.step) == 4


# -- Errors.


def _start_errors(directory, states, facts=({}, {}), **kwargs):
  def start(k):
    with fs.Worker(str(directory), k, len(states), **kwargs) as worker:
      return worker.start(states[k], facts[k])

  return worker_threads.run_threads(
    [functools.partial(start, k) for k in range(len(states))]
  )


@pytest.mark.parametrize(
  ("first", "second", "message"),
  [
    pytest.param(
      {"agn": HOST},
      {"agn": {**HOST, "communication_period": 3}},
      "AGN.communication_period is 2 at worker 0 and 3 at worker 1",
      id="arguments",
    ),
    pytest.param(
      {"agn": HOST},
      {"agn": HOST, "params": {"w": np.ones(3, np.float32)}},
      "state.params/b is 'float32[7]' at worker 0 and (missing) at worker 1",
      id="parameters",
    ),
    pytest.param(
      {"agn": HOST},
      {"agn": HOST, "params": {**worker_threads.PARAMS, "s": np.float32(0)}},
      "the centers of workers 0 and 1 differ, but have both 0 commits",
      id="values",
    ),
  ],
)
def test_workers_that_differ_raise(tmp_path, first, second, message):
  states = [worker_threads.create(**kwargs) for kwargs in (first, second)]
  for error in _start_errors(tmp_path, states):
    assert isinstance(error, ValueError), error
    assert message in str(error)


def test_facts_that_differ_raise(tmp_path):
  states = [worker_threads.create(HOST) for _ in range(2)]
  facts = [{"config": {"seed": 1}}, {"config": {"seed": 2}}]
  for error in _start_errors(tmp_path, states, facts):
    assert isinstance(error, ValueError), error
    assert "facts.config.seed is 1 at worker 0 and 2 at worker 1" in str(error)


def test_too_few_workers_raise(tmp_path):
  state = worker_threads.create({**HOST, "quorum": 2})
  with fs.Worker(str(tmp_path), 1, 3, start_timeout=0.2) as worker:
    with pytest.raises(TimeoutError, match=r"quorum=2. Missing: 0, 2"):
      worker.start(state)


def test_a_request_to_stop_ends_the_start(tmp_path):
  state = worker_threads.create(HOST)
  with fs.Worker(str(tmp_path), 0, 2, should_stop=lambda: True) as worker:
    with pytest.raises(InterruptedError, match="should_stop"):
      worker.start(state)


def test_a_request_to_stop_ends_the_wait_to_join(tmp_path):
  agn = {**HOST, "heartbeat": 30.0}
  with fs.Worker(str(tmp_path), 0, 1) as worker:
    worker.start(worker_threads.create(agn))
    # Its index is in use.
    with fs.Worker(str(tmp_path), 0, 1, should_stop=lambda: True) as other:
      with pytest.raises(InterruptedError, match="should_stop"):
        other.start(worker_threads.create(agn))


def test_a_request_to_stop_keeps_what_is_not_committed(tmp_path):
  agn = {**HOST, "quorum": 2, "deadline": 30.0}
  stop = threading.Event()

  def first():
    worker = fs.Worker(str(tmp_path), 0, 2, should_stop=stop.is_set)
    with worker:
      state = worker.start(worker_threads.create(agn))
      for number in range(2):
        state, _ = worker_threads.jit_step(
          state, worker_threads.target_of(0, number)
        )
        threading.Timer(0.2, stop.set).start()
        state = worker.commit(state)
      return worker.finish(state)

  def second():
    with fs.Worker(str(tmp_path), 1, 2) as worker:
      worker.start(worker_threads.create(agn))
      assert stop.wait(30)

  state, _ = worker_threads.raise_errors(
    worker_threads.run_threads([first, second])
  )
  own = state.wrapper_states["agn"]
  assert int(own.commits) == 0
  assert float(abs(own.grad_accum["w"]).sum()) > 0


def test_misuse_raises(tmp_path):
  state = worker_threads.create(HOST)
  worker = fs.Worker(str(tmp_path), 0, 1)
  with pytest.raises(RuntimeError, match="commit before start: call state ="):
    worker.commit(state)
  with worker:
    state = worker.start(state)
    with pytest.raises(RuntimeError, match="start was called before"):
      worker.start(state)
    state = worker.finish(state)
  with pytest.raises(RuntimeError, match="commit after finish or close"):
    worker.commit(state)
  assert worker.records() == []


@pytest.mark.parametrize(
  ("wrappers", "message"),
  [
    ([fs.AGN(2, "mean")], "Create the state with AGN(..., transport='host')"),
    ([fs.EMA(0.9)], "must have an AGN with transport='host', got ['ema']"),
    ([], "must have an AGN with transport='host', got []"),
  ],
)
def test_a_state_without_commits_on_the_host_raises(
  tmp_path, wrappers, message
):
  state = fs.TrainState.create(
    apply_fn=None,
    params={"w": np.ones(2, np.float32)},
    tx=optax.sgd(0.1),
    wrappers=wrappers,
  )
  with fs.Worker(str(tmp_path), 0, 1) as worker:
    with pytest.raises(ValueError, match=re.escape(message)):
      worker.start(state)


@pytest.mark.parametrize(
  ("args", "message"),
  [
    ((2, 2), "worker_id=2 must be below num_workers=2"),
    ((0, 0), "num_workers must be at least 1, got 0"),
    ((-1, 2), "worker_id must be at least 0, got -1"),
  ],
)
def test_invalid_arguments_raise(tmp_path, args, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    fs.Worker(str(tmp_path), *args)


def test_index_from_the_environment(tmp_path, monkeypatch):
  monkeypatch.setenv("JAX_NUM_PROCESSES", "3")
  monkeypatch.setenv("JAX_PROCESS_ID", "2")
  worker = fs.Worker(str(tmp_path))
  assert (worker.worker_id, worker.num_workers) == (2, 3)


def test_a_deadline_below_a_step_raises(tmp_path):
  state = worker_threads.create({**HOST, "deadline": 0.01})
  with fs.Worker(str(tmp_path), 0, 1) as worker:
    state = worker.start(state)
    with pytest.raises(ValueError, match=r"deadline=0.01 must be above"):
      for number in range(4):
        state, _ = worker_threads.jit_step(state, np.float32(number))
        state = worker.commit(state)
        time.sleep(0.05)


def test_a_missed_step_raises(tmp_path):
  state = worker_threads.create(HOST)
  with fs.Worker(str(tmp_path), 0, 1) as worker:
    state = worker.start(state)
    for number in range(3):
      state, _ = worker_threads.jit_step(state, np.float32(number))
    with pytest.raises(ValueError, match=r"3 local steps .* and step 2 is one"):
      worker.commit(state)


# -- What a commit costs.


@pytest.mark.parametrize("commit", ["mean", "sequential"])
def test_commits_compile_nothing_after_the_start(tmp_path, commit):
  agn = {**HOST, "fragments": 2, "delay": 1, "communication_period": 4}
  agn["commit"] = commit
  state = worker_threads.create(agn)
  targets = [worker_threads.target_of(0, number) for number in range(12)]
  state, _ = worker_threads.jit_step(state, targets[0])
  with fs.Worker(str(tmp_path), 0, 1) as worker:
    state = worker.start(state)
    with compilations.count() as compiled:
      for target in targets[1:]:
        state, _ = worker_threads.jit_step(state, target)
        state = worker.commit(state)
    # The update of each cell, in a thread of its owner.
    assert compiled.total == (2 if commit == "sequential" else 0)
    worker.finish(state)


def test_a_worker_that_was_lost_comes_back(tmp_path, caplog):
  agn = {**HOST, "heartbeat": 3.0, "communication_period": 4}
  both_at_six = threading.Barrier(2)

  def is_back():
    return "goes on from the center of the others" in caplog.text

  def train(k):
    with fs.Worker(str(tmp_path), k, 2) as worker:
      state = worker.start(worker_threads.create(agn))
      waited = False
      while worker.clock < 16:
        state, _ = worker_threads.jit_step(
          state, worker_threads.target_of(k, worker.clock)
        )
        state = worker.commit(state)
        if worker.clock != 6 or waited:
          continue
        waited = True
        both_at_six.wait(30)
        if k == 0:
          worker_threads.exclude(tmp_path, 1)
        end = time.monotonic() + 30
        while not is_back() and time.monotonic() < end:
          state = worker.commit(state)  # worker 0 answers worker 1
          time.sleep(0.01)
      return worker.finish(state), worker.records()

  caplog.set_level(logging.INFO, "flaxshard")
  (one, records), (two, _) = worker_threads.raise_errors(
    worker_threads.run_threads([functools.partial(train, k) for k in range(2)])
  )
  jax.tree.map(np.testing.assert_array_equal, one.params, two.params)
  assert [r.workers for r in records] == [(0, 1)] * 4
  assert "worker 1: the others have lost it" in caplog.text
  assert "its last 2 local steps are lost" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("commit", ["mean", "sequential"])
def test_a_worker_that_starts_again_does_not_bring_its_old_center(
  tmp_path, caplog, commit
):
  agn = {**HOST, "commit": commit, "heartbeat": 3.0}
  has_trained, has_joined = threading.Event(), threading.Event()

  def first():
    with fs.Worker(str(tmp_path), 0, 2, start_timeout=0.3) as worker:
      with pytest.warns(UserWarning, match="workers 1 of 2 have not come"):
        state = worker.start(worker_threads.create(agn))
      state = worker_threads.take_steps(worker, state, range(8))
      # As if it were stopped, and the other one did not reach it.
      before = jax.device_get(state.params)
      worker_threads.exclude(tmp_path, 0)
      has_trained.set()
      assert has_joined.wait(30)
      while "the others have lost it" not in caplog.text:
        state = worker.commit(state)
        time.sleep(0.01)
      jax.tree.map(np.testing.assert_array_equal, state.params, before)
      state = worker_threads.take_steps(worker, state, range(8, 12))
      return worker.finish(state)

  def second():
    assert has_trained.wait(30)

    def should_stop():
      has_joined.set()
      return False

    with fs.Worker(str(tmp_path), 1, 2, should_stop=should_stop) as worker:
      state = worker.start(worker_threads.create(agn))
      assert worker.clock >= 8
      numbers = range(worker.clock, 12)
      state = worker_threads.take_steps(worker, state, numbers)
      return worker.finish(state)

  one, two = worker_threads.raise_errors(
    worker_threads.run_threads([first, second])
  )
  jax.tree.map(np.testing.assert_array_equal, one.params, two.params)


@pytest.mark.slow
@pytest.mark.parametrize("commit", ["mean", "sequential"])
def test_a_worker_that_was_lost_at_its_start_joins_again(
  tmp_path, caplog, commit
):
  agn = {**HOST, "commit": commit, "heartbeat": 3.0}
  waiting = threading.Semaphore(0)

  def should_stop():
    waiting.release()  # asked again and again while a worker waits
    return False

  def train(k):
    with fs.Worker(str(tmp_path), k, 3, should_stop=should_stop) as worker:
      state = worker.start(worker_threads.create(agn))
      state = worker_threads.take_steps(worker, state, range(4))
      return worker.finish(state)

  def exclude_and_train():
    log = view_log.ViewLog(str(tmp_path / "views"))
    for _ in range(50):
      assert waiting.acquire(timeout=30)
    end = time.monotonic() + 30
    while len(log.latest().members) < 2 and time.monotonic() < end:
      time.sleep(0.01)
    worker_threads.exclude(tmp_path, 1)
    return train(2)

  one, two, three = worker_threads.raise_errors(
    worker_threads.run_threads(
      [lambda: train(0), lambda: train(1), exclude_and_train]
    )
  )
  assert "worker 1: the others have lost it" in caplog.text
  for other in (two, three):
    jax.tree.map(np.testing.assert_array_equal, one.params, other.params)


def test_short_period_of_sequential_commits_warns(tmp_path):
  agn = {"commit": "sequential", "communication_period": 1, "quorum": 2}
  state = worker_threads.create({**agn, "transport": "host"})
  with fs.Worker(str(tmp_path), 0, 2, start_timeout=0.1) as worker:
    with (
      pytest.warns(UserWarning, match=r"of 2 workers.*0.64 \* 2 = 1.3"),
      pytest.raises(TimeoutError, match="quorum=2"),
    ):
      worker.start(state)
