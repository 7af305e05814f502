"""Worker: mistakes, other facts, damage, and stores that are not reachable."""

from concurrent import futures
import functools
import re
import threading
import time

import bucket_servers
import center_workers
from center_workers import warnings_of
from center_workers import Workers
from flax.linen import fp8_ops
import jax
import numpy as np
import optax
import pytest
import quadratic_states

import flaxshard as fs
from flaxshard.center import encoding
from flaxshard.center import merge
from flaxshard.center import store
from flaxshard.center import worker as worker_lib

PARAMS = {"b": np.float32(8), "w": np.arange(6, dtype=np.float32)}
SGD = optax.sgd(1.0)

agn = functools.partial(center_workers.agn, grace=0.4, deadline=2.0)


def create(*wrappers, tx=SGD, params=PARAMS, **fields):
  return quadratic_states.create(wrappers or [agn()], tx, params, **fields)


@jax.jit
def step(state, x):
  return state.minimize(lambda p: p["b"] * x)[0]


def train(worker, state, xs):
  for x in xs:
    state = worker.commit(step(state, np.float32(x)))
  return state


@pytest.fixture
def directory():
  return center_workers.new_directory()


# Mistakes.


def worker(*args, **kwargs):
  return fs.Worker(center_workers.new_directory(), *args, **kwargs)


def begin(*wrappers, num_workers=1, **fields):
  worker(0, num_workers, 0.2).start(create(*wrappers, **fields))


FP8 = {"params": PARAMS, fp8_ops.OVERWRITE_WITH_GRADIENT: {"scale": np.ones(2)}}
TWO_GROUPS = fs.CrossShard("mean", ((0, 1), (2, 3)))
FOUR = fs.Strategy(devices=jax.devices()[:4])
NOT_THERE = "worker 1 of 2 has not come to .* within start_timeout=0.2 seconds"
UNEQUAL = "replicas .* must have equal .* 2 groups of 2 "


@pytest.mark.filterwarnings("ignore:CrossShard. gradients are reduced in")
@pytest.mark.parametrize(
  ("call", "error", "message"),
  [
    (lambda: worker(2, 2), ValueError, "process_id=2 must be less than .*=2"),
    (lambda: worker(0), ValueError, "num_processes"),
    (lambda: fs.Worker("s3://", 0, 1), ValueError, "s3://bucket/name"),
    (lambda: worker(0, 2, 0), ValueError, "Worker: start_timeout must be"),
    (lambda: worker(0, 1).start({}), ValueError, r"store', got \[\]"),
    (lambda: begin(fs.AGN(2)), ValueError, r"store', got \['agn'\]"),
    (lambda: begin(agn(8, fragments=3)), ValueError, "=3 must be at most .* 2"),
    (lambda: begin(agn(quorum=2)), ValueError, "quorum must be at most 1"),
    (lambda: begin(agn(quorum=2), num_workers=2), TimeoutError, NOT_THERE),
    (lambda: begin(params=FP8), ValueError, "fp8"),
    (lambda: begin(tx=optax.polyak_sgd()), ValueError, "a loss, .* uses value"),
    (lambda: begin(TWO_GROUPS, agn(), strategy=FOUR), ValueError, UNEQUAL),
  ],
)
def test_mistakes(call, error, message):
  with pytest.raises(error, match=message):
    call()


def test_the_number_may_come_from_a_launcher(monkeypatch):
  monkeypatch.setattr("os.environ", {"WORLD_SIZE": "3", "RANK": "1"})
  worker = fs.Worker("memory://x")
  assert (worker.worker_id, worker.num_workers) == (1, 3)


def test_calls_in_the_wrong_order():
  state, one = create(), worker(0, 1)

  def check_calls():
    for call in (one.commit, one.settle, one.finish):
      with pytest.raises(RuntimeError, match="needs a worker that"):
        call(state)

  check_calls()
  with one:
    one.start(state)
    with pytest.raises(RuntimeError, match="start was called before"):
      one.start(state)
    with pytest.raises(RuntimeError, match=r"step 4 .* 0, where 4 and 2"):
      for _ in range(4):
        state = step(state, np.float32(1))
        one.commit(state)
  check_calls()
  with worker(0, 1) as one:
    state = step(one.start(create()), np.float32(1))
    with pytest.raises(RuntimeError, match=r"step 3 .* 0, where 2 and 0"):
      train(one, state, [1, 1])


def test_should_stop_ends_every_wait(caplog, monkeypatch):
  monkeypatch.setattr(worker_lib, "_LAST_WRITE_SECONDS", 0.2)
  monkeypatch.setattr(worker_lib, "_NOTICE_SECONDS", 0.0)
  stops = threading.Event()
  with worker(0, 2, 0.2, stops.is_set) as first:
    state = first.start(create(agn(grace=300, deadline=600)))
    notice, begins = warnings_of(caplog)
    assert "waiting for it" in notice and "the run begins without it" in begins
    threading.Timer(0.2, stops.set).start()
    start = time.monotonic()
    first.finish(first.settle(train(first, state, [1, 1])))
  with pytest.raises(InterruptedError, match="should_stop"):
    worker(0, 2, should_stop=stops.is_set).start(create())
  assert time.monotonic() - start < 100


def test_a_worker_tells_for_whom_it_waits_at_the_end(caplog, monkeypatch):
  pair = Workers([create(), create()], step)
  monkeypatch.setattr(worker_lib, "_NOTICE_SECONDS", 0.0)
  with pair, futures.ThreadPoolExecutor() as pool:
    finish = lambda k: pair.workers[k].finish(pair.states[k])
    waits = pool.submit(finish, 0)
    while not warnings_of(caplog):
      time.sleep(0.01)
    finish(1)
    waits.result()
  # Worker 1 may have waited for a moment, too.
  [told] = [x for x in warnings_of(caplog) if x.startswith("worker 0 ")]
  assert "worker 0 is at its last step, and waits for worker 1 to" in told


# What all workers have in common.


def schedule(last):
  return optax.sgd(optax.linear_schedule(0.0, last, 10))


TX = schedule(1.0)
FACTS = {"config": {"seed": 1, "name": "a"}}
SEVEN = {"params": {**PARAMS, "w": np.zeros(7, np.float16)}}
OTHER_ARRAY = r"arrays.params/w is 'float16\[7\]' here, and 'float32\[6\]'"
# What differs from the first worker: arguments of AGN, the state, other facts.
DIFFERENT = [
  ({"period": 3}, {}, FACTS, "AGN.communication_period is 3 here, and 2 in"),
  ({"commit": "sum"}, {}, FACTS, "AGN.commit is 'sum' here, and 'mean'"),
  ({"delay": 1}, {}, FACTS, r"AGN.transport.delay is 1 here, and 0"),
  ({"commit_dtype": "int8"}, {}, FACTS, "commit_dtype is 'int8' here, and No"),
  ({"outer_tx": None}, {}, FACTS, "AGN.outer_tx is False here, and True"),
  ({"outer_tx": optax.adam(0.2)}, {}, FACTS, r"an update by\.outer_tx is"),
  ({}, {"tx": optax.sgd(0.99)}, FACTS, r"an update by\.tx is"),
  ({}, {"tx": schedule(0.5)}, FACTS, r"an update by\.tx is"),
  ({}, SEVEN, FACTS, OTHER_ARRAY),
  ({}, {"params": {"b": PARAMS["b"]}}, FACTS, "params/w is .*missing.* here"),
  # What LoRA does not train.
  ({}, {"frozen": np.zeros(2, "f")}, FACTS, "do not change.frozen is .* here"),
  ({}, {}, {"config": {"seed": 2, "name": "a"}}, "config.seed is 2 here"),
  ({}, {}, {}, "config.* is .*missing.* here"),
]


def test_who_differs_is_refused_and_the_others_go_on(directory):
  first = {"outer_tx": optax.adam(0.1)}
  start = {"tx": TX, "frozen": np.ones(2, "f")}
  with fs.Worker(directory, 0, 1) as worker:
    state = worker.start(create(agn(**first), **start), FACTS)
    for kwargs, fields, facts, message in DIFFERENT:
      other = create(agn(**{**first, **kwargs}), **{**start, **fields})
      with pytest.raises(ValueError, match=message):
        fs.Worker(directory, 1, 2).start(other, facts)
    worker.finish(train(worker, state, [1, 1]))
    assert worker.is_finished


# Damage.


GOOD = {
  "steps": 2,
  "examples": 2.0,
  "version": 0,
  "arrays": {"params/b": np.float32(4), "stats/m": np.ones(2, np.float32)},
}


def with_arrays(**arrays):
  return encoding.pack({**GOOD, "arrays": {**GOOD["arrays"], **arrays}})


BAD = {
  "empty": b"",
  "cut": encoding.pack(GOOD)[:-1],
  "list": encoding.pack([1, 2]),
  "lacks": encoding.pack({"arrays": GOOD["arrays"]}),
  "steps": encoding.pack({**GOOD, "steps": 0}),
  "version": encoding.pack({**GOOD, "version": "a"}),
  "examples": encoding.pack({**GOOD, "examples": float("inf")}),
  "unknown": with_arrays(**{"params/c": np.float32(4)}),
  "shape": with_arrays(**{"params/b": np.ones(2, np.float32)}),
  "nan": with_arrays(**{"params/b": np.float32(np.nan)}),
  "code": with_arrays(**{"params/b": {"numbers": 1}}),
  "text": with_arrays(**{"stats/m": "x"}),
  "no collection": encoding.pack({**GOOD, "arrays": {"params/b": np.ones(())}}),
}


def write_foreign(directory, content, worker_id=1):
  """Writes a commit of local step 1 that no worker has made."""
  folder = directory / f"center/commit/0/{worker_id}-foreign"
  folder.mkdir(parents=True)
  (folder / "000000001").write_bytes(content)
  return folder


@pytest.mark.parametrize("commit", ["mean", "sequential"])
def test_a_malformed_commit_is_set_aside(tmp_path, caplog, commit):
  stats = {"m": np.zeros(2, np.float32)}
  with fs.Worker(str(tmp_path), 0, 1) as worker:
    state = worker.start(create(agn(commit=commit), stats=stats))
    for k, content in enumerate(BAD.values()):
      folder = write_foreign(tmp_path, content, k)
    (folder / "no number").write_bytes(b"a")
    state = worker.finish(train(worker, state, [1, 1, 2, 2]))
  assert float(state.params["b"]) == 8 - 1 - 2
  np.testing.assert_array_equal(state.stats["m"], stats["m"])
  key = r"a commit of worker (\d+) is set aside: commit/0/\1-foreign/0"
  aside = re.findall(key, "\n".join(warnings_of(caplog)))
  assert sorted(map(int, aside)) == [*range(len(BAD))]


def test_a_mean_of_commits_is_weighted_by_examples(tmp_path):
  state = create(agn(grace=30), stats={"m": np.zeros(2, np.float32)})
  for _ in range(2):
    # The second one continues in the middle of the period.
    with fs.Worker(str(tmp_path), 0, 1) as worker:
      state = worker.start(state)
      if worker.clock == 1:
        write_foreign(tmp_path, encoding.pack(GOOD))
      state = worker.commit(step(state, np.float32(1)), examples=3)
      end = worker.settle if worker.clock == 1 else worker.finish
      state = end(state)
  # Two examples of two steps whose gradients are 4 beside six of 1 a step.
  assert float(state.params["b"]) == 8 - (2 * 2 + 6 * 1) / 8
  np.testing.assert_array_equal(state.stats["m"], [2 / 8] * 2)


@pytest.mark.parametrize("pattern", ["center/0/*", "slots/0/*", "head"])
@pytest.mark.parametrize("way", ["damaged", "missing"])
def test_a_damaged_center_is_an_error_that_names_it(tmp_path, pattern, way):
  with fs.Worker(str(tmp_path), 0, 1) as worker:
    train(worker, worker.start(create()), [1, 1])
  for file in (tmp_path / "center").glob(pattern):
    content = file.read_bytes()
    file.unlink()
    if way == "damaged":
      file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
  message = f"{pattern[:4]}.* is {way}"
  with fs.Worker(str(tmp_path), 0, 1) as worker:
    with pytest.raises(encoding.DamagedError, match=message):
      worker.start(create())


@pytest.mark.parametrize(
  ("x", "stat", "path"), [(np.nan, 0, "params/b"), (1, np.inf, "stats")]
)
def test_nan_is_not_written_and_the_others_end(x, stat, path):
  with Workers([create(stats=np.zeros(1))] * 2, step) as group:
    first, second = group.workers
    group.step([np.float32(1)] * 2)
    _, grads = group.states[0].value_and_grad(lambda p: p["b"] * x)
    bad = group.states[0].apply_gradients(grads=grads, stats=np.float32([stat]))
    with pytest.raises(FloatingPointError, match=f"{path} .* local step 2"):
      first.commit(bad)
    first.close()
    state = second.finish(train(second, group.states[1], [3]))
  assert float(state.params["b"]) == 8 - 2


# Several starts, and workers that end.


@pytest.mark.parametrize("call", ["commit", "finish"])
def test_a_second_start_of_a_worker_ends_the_first(directory, call):
  # A partner that does not finish.
  wrapper = agn(commit="sequential", deadline=30)
  with Workers([create(wrapper)] * 2, step, directory) as group:
    first, state = group.workers[0], group.states[0]
    with fs.Worker(directory, 0, 2) as second:
      new = second.start(create(wrapper))
      with pytest.raises(RuntimeError, match=r"worker 0 of .* started again"):
        if call == "finish":
          first.finish(state)
        for _ in range(200):
          state = train(first, state, [1])
          time.sleep(0.02)
      train(second, new, [1, 1])
      assert not second.is_finished


def test_nobody_waits_for_a_worker_that_does_not_come_back(directory):
  new = create(agn(commit="sum", grace=0.2, deadline=1.0), stats=np.zeros(2))
  with Workers([new] * 2, step, directory) as group:
    group.step([np.float32(1)] * 2)
    group.step([np.float32(1)] * 2)
    lost, other = group.workers
    # No sign of life, no commit, and nothing is merged.
    lost._members.watch.close()
    lost._merger.watch.close()
    start = time.monotonic()
    state = other.finish(train(other, group.states[1], [2, 2]))
    assert other.is_finished
  assert float(state.params["b"]) == 8 - 2 - 2
  assert time.monotonic() - start < 100
  # Whoever comes late finds the final center, which no step changes.
  with fs.Worker(directory, 0, 2) as late:
    state = late.start(new)
    assert (late.is_finished, late.clock) == (True, 4)
    state = train(late, state.replace(stats=np.ones(2)), [5])
    for last in (late.settle(state), late.finish(state)):
      assert (float(last.params["b"]), last.stats.tolist()) == (4, [0, 0])


def test_a_synchronizer_merges_in_a_bucket_of_s3_while_it_lives():
  state = create(agn(commit="sum"))
  with (
    bucket_servers.start_s3() as server,
    Workers([state] * 2, step, "s3://bucket/run") as group,
  ):
    center = store.Objects("s3://bucket/run/center")
    synchronizer = merge.synchronizer(center, state)
    while any(worker._members.merges(0) for worker in group.workers):
      time.sleep(0.05)
    for i in range(4):
      if i == 2:
        # The workers merge again.
        synchronizer.close()
      group.step([np.float32(1), np.float32(2)])
    states = group.finish()
    assert [float(state.params["b"]) for state in states] == [8 - 3 - 3] * 2
    # Commits are deleted.
    kinds = {name.split("/")[3] for name in server.objects}
    assert kinds == {"run", "head", "center", "slots", "worker"}


# Stores that are not reachable.


@pytest.fixture
def cable(monkeypatch):
  """An event: while it is clear, no store can be read or written."""
  monkeypatch.setattr(store, "_FAILED_PAUSES", (0.1, 0.1))
  monkeypatch.setattr(worker_lib, "_LAST_WRITE_SECONDS", 0.2)
  plugged = threading.Event()
  plugged.set()
  run = store.Objects._run

  def fail(_):
    raise OSError("no route to host")

  def run_if_plugged(self, verb, start, *args):
    return run(self, verb, start if plugged.is_set() else fail, *args)

  monkeypatch.setattr(store.Objects, "_run", run_if_plugged)
  return plugged


def settled(worker, state, center):
  """Returns the state once its center has a value, which may come late."""
  while float(state.params["b"]) != center:
    state = worker.settle(state)
    time.sleep(0.05)
  return state


def test_training_goes_on_without_the_store(directory, cable, caplog):
  with fs.Worker(directory, 0, 1) as worker:
    state = worker.start(create(agn(deadline=2.0)))
    state = settled(worker, train(worker, state, [1, 1]), 8 - 1)
    cable.clear()
    state = train(worker, state, [2, 4, 5, 6, 7, 8])
    # The second commit is under way, the third one grows.
    assert float(state.params["b"]) == 8 - 1
    assert float(state.wrapper_states["agn"].grad_accum["b"]) == 5 + 6 + 7 + 8
    cable.set()
    state = settled(worker, state, 8 - 1 - 3)
    # Nothing is lost if it comes back at the end.
    cable.clear()
    state = train(worker, state, [9, 1])
    threading.Timer(0.2, cable.set).start()
    state = worker.finish(state)
    assert worker.is_finished
  # A commit is the mean of its six steps.
  assert float(state.params["b"]) == 8 - 1 - 3 - 6
  found = warnings_of(caplog)
  assert [x for x in found if "now: no route" in x]
  assert [x for x in found if "goes on alone: its commit of local step 4" in x]
  assert [x for x in found if " again, after" in x]
  assert len(found) < 12


# With a commit that is due, and without.
@pytest.mark.parametrize("xs", [[1], []])
def test_at_the_end_it_is_an_error(directory, cable, xs):
  with fs.Worker(directory, 0, 1) as worker:
    state = train(worker, worker.start(create(agn(deadline=0.4))), [1, 1, 1])
    cable.clear()
    time.sleep(0.6)
    state = train(worker, state, xs)
    start = time.monotonic()
    with pytest.raises(store.StoreError, match=r"cannot be (read|written)"):
      worker.finish(state)
    cable.set()
    assert time.monotonic() - start > 0.4


def test_a_wrong_address_is_an_error_within_seconds(monkeypatch):
  monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", "http://127.0.0.1:1")
  start = time.monotonic()
  with pytest.raises(fs.center.StoreError, match="gs://no-such-bucket/run"):
    fs.Worker("gs://no-such-bucket/run", 0, 1).start(create())
  assert time.monotonic() - start < 20
