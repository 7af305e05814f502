"""Sequential commits of workers in threads of one process."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import worker_threads

import flaxshard as fs
from flaxshard.workers import center as center_lib
from flaxshard.workers import view_log

NUM_WORKERS = 3
WEIGHTS = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)


@jax.jit
def train_step(state, x):
  return state.minimize(
    lambda p: jnp.mean((x @ p["w"] + p["b"] - x @ WEIGHTS) ** 2)
  )


def train(directory, worker_id, results, arguments):
  state = fs.TrainState.create(
    apply_fn=None,
    params={"w": jnp.zeros((8, 3)), "b": jnp.zeros(3)},
    tx=optax.adam(0.05),
    wrappers=[fs.AGN(4, "sequential", transport="host", **arguments)],
  )
  rng = np.random.default_rng(worker_id)
  with fs.Worker(directory, worker_id, NUM_WORKERS) as worker:
    state = worker.start(state)
    for _ in range(80):
      x = rng.normal(size=(16, 8)).astype(np.float32)
      state, _ = train_step(state, x)
      state = worker.commit(state)
    results[worker_id] = worker.finish(state), worker.records()


@pytest.mark.parametrize(
  "arguments",
  [
    pytest.param({}, marks=pytest.mark.slow),
    pytest.param(
      {"fragments": 2, "delay": 1, "blend": 0.5}, marks=pytest.mark.slow
    ),
    pytest.param({"commit_dtype": "int8"}, marks=pytest.mark.slow),
  ],
  ids=["plain", "fragments and delay", "int8"],
)
def test_all_workers_end_with_one_trained_center(tmp_path, arguments):
  results = {}
  threads = [
    threading.Thread(
      target=train, args=(str(tmp_path), k, results, arguments), daemon=True
    )
    for k in range(NUM_WORKERS)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(60)
  assert sorted(results) == list(range(NUM_WORKERS))
  first = results[0][0]
  per_period = arguments.get("fragments", 1)
  for k, (state, records) in results.items():
    jax.tree.map(np.testing.assert_array_equal, state.params, first.params)
    jax.tree.map(
      np.testing.assert_array_equal, state.opt_state, first.opt_state
    )
    assert [record.workers for record in records] == [(k,)] * 20 * per_period
    agn = state.wrapper_states["agn"]
    assert int(agn.commits) == 20 * per_period
    assert int(agn.center_commits) == NUM_WORKERS * 20 * per_period
    # Every commit of every worker has advanced Adam's count.
    assert int(state.opt_state[0].count) == 20 * NUM_WORKERS
  assert np.abs(first.params["w"] - WEIGHTS).max() < 0.3


def create_one(**arguments):
  return fs.TrainState.create(
    apply_fn=None,
    params={"w": jnp.ones(3)},
    tx=optax.sgd(0.1),
    wrappers=[fs.AGN(2, "sequential", transport="host", **arguments)],
  )


@jax.jit
def step_to_zero(state):
  return state.minimize(lambda p: (p["w"] ** 2).sum() / 2)[0]


@pytest.mark.slow  # waits five seconds for the answer
def test_a_worker_that_shall_stop_does_not_wait_for_the_last_center(
  tmp_path, monkeypatch
):
  stop, asked, end = (threading.Event() for _ in range(3))

  def pull(self, center):
    # As of an owner that does not answer, and cannot be excluded.
    asked.set()
    stop.set()
    end.wait(60)

  with fs.Worker(str(tmp_path), 0, 1, should_stop=stop.is_set) as worker:
    state = worker.start(create_one())
    monkeypatch.setattr(center_lib.Center, "pull", pull)
    state = worker.settle(state)
    assert asked.is_set() and not end.is_set()
    np.testing.assert_array_equal(state.params["w"], np.ones(3))
    end.set()


@pytest.mark.parametrize("delay", [0, 1])
def test_a_stop_during_a_commit_waits_for_its_answer(
  tmp_path, monkeypatch, delay
):
  stop, commit = threading.Event(), center_lib.Center.commit

  def commit_late(self, *args):
    updated = commit(self, *args)
    stop.set()
    time.sleep(0.2)
    return updated

  monkeypatch.setattr(center_lib.Center, "commit", commit_late)
  with fs.Worker(str(tmp_path), 0, 1, should_stop=stop.is_set) as worker:
    state = worker.start(create_one(delay=delay))
    for _ in range(2 + delay):
      if delay:
        stop.wait(0.1)
      state = worker.commit(step_to_zero(state))
    assert len(worker.records()) == 1
  # The second gradient is that of the local parameters, 0.9.
  np.testing.assert_allclose(state.params["w"], np.full(3, 1 - 0.095), 1e-6)
  agn = state.wrapper_states["agn"]
  left = np.full(3, 0.81) if delay else np.zeros(3)
  np.testing.assert_allclose(agn.grad_accum["w"], left, 1e-6)


@pytest.mark.slow  # waits five seconds for the answer
def test_a_commit_without_an_answer_is_not_sent_again(
  tmp_path, monkeypatch, caplog
):
  stop, end = threading.Event(), threading.Event()

  def commit(self, *args):
    stop.set()
    end.wait(60)

  monkeypatch.setattr(center_lib.Center, "commit", commit)
  with fs.Worker(str(tmp_path), 0, 1, should_stop=stop.is_set) as worker:
    state = worker.start(create_one())
    for _ in range(2):
      state = worker.commit(step_to_zero(state))
    end.set()
  assert "without an answer to its commit at local step 2" in caplog.text
  agn = state.wrapper_states["agn"]
  np.testing.assert_array_equal(agn.grad_accum["w"], np.zeros(3))


@pytest.mark.parametrize("commit", ["mean", "sequential"])
def test_a_commit_with_nan_ends_its_worker_alone(tmp_path, commit):
  """The other worker has the center without it."""

  def train(k):
    state = fs.TrainState.create(
      apply_fn=None,
      params={"a": jnp.ones(2), "w": jnp.ones(3)},
      tx=optax.sgd(0.1),
      wrappers=[fs.AGN(2, commit, transport="host")],
    )
    with fs.Worker(str(tmp_path), k, 2) as worker:
      state = worker.start(state)
      for number in range(6):
        is_bad = k == 1 and number == 3
        scale = np.array([1, np.nan if is_bad else 1, 1], np.float32)
        state = worker.commit(step_with_scale(state, scale))
      return worker.finish(state), worker.records()

  (state, records), error = worker_threads.run_threads(
    [lambda: train(0), lambda: train(1)]
  )
  assert isinstance(error, FloatingPointError)
  assert "worker 1 at local step 4" in str(error) and "'w'" in str(error)
  assert len(records) == 3
  assert np.isfinite(state.params["w"]).all()
  if commit == "mean":
    assert [r.workers for r in records] == [(0, 1), (0,), (0,)]


@jax.jit
def step_with_scale(state, scale):
  loss_fn = lambda p: (p["a"] ** 2).sum() + (scale * p["w"] ** 2).sum()
  return state.minimize(loss_fn)[0]


def test_workers_start_again_from_the_center_with_most_commits(tmp_path):
  agn = {"commit": "sequential", "transport": "host", "heartbeat": 5.0}

  def saved(value, commits, center_commits):
    state = worker_threads.create(agn, params={"w": np.full(3, value)})
    own = state.wrapper_states["agn"]._replace(
      commits=jnp.int32(commits), center_commits=jnp.int32(center_commits)
    )
    return state.replace(wrapper_states={"agn": own})

  def start(k, state):
    with fs.Worker(str(tmp_path), k, 2) as worker:
      return worker.finish(worker.start(state))

  # The first one was faster, and has died earlier.
  results = worker_threads.raise_errors(
    worker_threads.run_threads(
      [
        lambda: start(0, saved(1.0, 480, 500)),
        lambda: start(1, saved(2.0, 370, 850)),
      ]
    )
  )
  for state in results:
    np.testing.assert_array_equal(state.params["w"], np.full(3, 2.0))
    assert int(state.wrapper_states["agn"].center_commits) == 850


def test_a_worker_that_is_lost_while_it_waits_ends_with_the_last_center(
  tmp_path,
):
  agn = {"communication_period": 2, "commit": "sequential", "heartbeat": 3.0}
  agn |= {"transport": "host"}
  waits = threading.Event()

  def should_stop():
    if threading.current_thread().name == "finishing":
      waits.set()
    return False

  def train_worker(k):
    with fs.Worker(str(tmp_path), k, 2, should_stop=should_stop) as worker:
      state = worker.start(worker_threads.create(agn))
      state = worker_threads.take_steps(worker, state, range(4))
      if k == 0:
        threading.current_thread().name = "finishing"
      else:
        assert waits.wait(30)
        worker_threads.exclude(tmp_path, 0)
        log = view_log.ViewLog(str(tmp_path / "views"))
        while log.latest().worker_ids != (0, 1):
          time.sleep(0.01)
        state = worker_threads.take_steps(worker, state, range(4, 8))
      return worker.finish(state)

  one, two = worker_threads.raise_errors(
    worker_threads.run_threads(
      [lambda: train_worker(0), lambda: train_worker(1)]
    )
  )
  jax.tree.map(np.testing.assert_array_equal, one.params, two.params)
  for state in (one, two):
    assert int(state.wrapper_states["agn"].center_commits) == 6
