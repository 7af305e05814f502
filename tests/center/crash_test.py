"""Operations of a center's store that fail, and workers that end at them."""

import atexit
import collections
from concurrent import futures
import dataclasses
import functools
import random
import threading
from typing import Any

import center_workers
import jax
import numpy as np
import optax
import pytest
import quadratic_states
from tree_equality import assert_trees_equal

import flaxshard as fs
from flaxshard.center import encoding
from flaxshard.center import heads
from flaxshard.center import members
from flaxshard.center import store

STEPS = 6
START = {"a": np.zeros(3, np.float32), "b": np.ones(5, np.float32)}

KINDS = {
  "": {},
  "fragments": {"fragments": 2},
  "int8 delay": {"fragments": 2, "delay": 1, "commit_dtype": "int8"},
  # Both workers merge at the same time.
  "race": {"commit_dtype": "int8"},
}

pytestmark = [
  pytest.mark.filterwarnings("ignore:AGN. communication_period"),
  pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"
  ),
]

_local = threading.local()


class Killed(BaseException):
  """As kill -9: no line of the worker comes after it."""


@dataclasses.dataclass(frozen=True)
class Fault:
  """A failure at the `count`-th operation of a kind.

  `how`: "error": it fails; "lost": it is done, and its answer is lost; "kill":
  the worker has ended before it.
  """

  worker: int
  kind: tuple[str, str]
  count: int
  how: str


class Host:
  """A `KvStore` as one start of a worker sees it: with a fault, or none."""

  def __init__(self, run, fault):
    self.kv = None
    self.is_dead = False
    self.seen = collections.Counter()
    self._run, self._fault = run, fault
    self._lock = threading.Lock()

  def __getattr__(self, operation):
    return functools.partial(self._call, operation)

  def _call(self, operation, key, *content, **condition):
    name = key if isinstance(key, str) else key.inclusive_min.decode()
    kind = "delete" if content == (None,) else operation, name.partition("/")[0]
    start = functools.partial(self._start, operation, key, *content)
    with self._lock:
      if self.is_dead:
        raise Killed
      self.seen[kind] += 1
      fault = self._fault
      if fault is None or (kind, self.seen[kind]) != (fault.kind, fault.count):
        return start(**condition)
      if fault.how == "kill":
        self.is_dead = True
        raise Killed
    if fault.how == "lost":
      start(**condition)
    raise OSError(f"{fault}")

  def _start(self, operation, key, *content, **condition):
    future = getattr(self.kv, operation)(key, *content, **condition)
    if operation == "write" and content != (None,):
      if not condition:
        self._run.written[key] = content[0]
      elif key == "head" and future.result().generation:
        self._run.heads.append(encoding.unpack(key, content[0]))
    return future


@pytest.fixture(autouse=True)
def guarded(request, monkeypatch):
  """Operations of threads that are workers go through their `Host`."""
  create = store.Objects.__init__

  def init(self, url):
    create(self, url)
    if host := getattr(_local, "host", None):
      host.kv, self._kv = self._kv, host

  monkeypatch.setattr(store.Objects, "__init__", init)
  if "race" in request.node.name:
    monkeypatch.setattr(members.Members, "merges", lambda self, fragment: True)


def loss_fn(params, x):
  return (params["a"] * x).sum() - 2 * (params["b"] * x).sum()


STEP = jax.jit(lambda state, x: state.minimize(loss_fn, x)[0])


class Run:
  """Two workers with integer gradients, of which one has a fault."""

  def __init__(self, state, fault=None):
    self.state, self.fault = state, fault
    self.directory = center_workers.new_directory()
    self.written: dict[str, bytes] = {}
    self.heads: list[dict[str, Any]] = []
    self.hosts: dict[int, Host] = {}
    self.missed = {}

  def train(self, k):
    fault = self.fault if self.fault and self.fault.worker == k else None
    while True:
      host = _local.host = Host(self, fault)
      self.hosts.setdefault(k, host)
      fault, is_started = None, False
      worker = fs.Worker(self.directory, k, 2, start_timeout=60)
      try:
        state = worker.start(self.state)
        is_started = True
        while worker.clock < STEPS and not worker.is_finished:
          if host.is_dead:
            raise Killed
          x = np.float32(1 + 10 * k + worker.clock)
          state = worker.commit(STEP(state, x))
        state = worker.finish(state)
        self.missed[str(k)] = worker.missed_steps
        return jax.device_get(state.params)
      except Killed:
        atexit.unregister(worker.close)
      except store.StoreError:
        if is_started:
          raise
      # Another start of the same worker.

  def check(self):
    """Trains, and asserts that each commit is in the center once."""
    pool = futures.ThreadPoolExecutor(2)
    params, other = pool.map(self.train, range(2), timeout=90)
    assert_trees_equal(params, other)
    assert sum(head["finished"] for head in self.heads) == 1
    agn = self.state.wrappers[0]
    for fragment in range(agn.transport.fragments):
      self._check_fragment(agn, fragment, params)
    return self

  def _check_fragment(self, agn, fragment, params):
    versions = [heads.Head(**head["heads"][fragment]) for head in self.heads]
    versions.sort(key=lambda head: (head.version, sum(head.taken.values())))
    commits = {}
    for path, content in self.written.items():
      if path.startswith(f"commit/{fragment}/"):
        key = heads.Key(fragment, path.split("/")[2], int(path[-9:]))
        commits[key] = encoding.unpack(path, content)
    exact = {f"params/{k}": x.astype(np.float64) for k, x in START.items()}
    steps = collections.Counter()
    before = versions[0]
    for head in versions:
      new = [k for k in commits if k.is_in(head) and not k.is_in(before)]
      total = sum(commits[key]["examples"] for key in new)
      for key in new:
        commit = commits[key]
        steps[key.worker] += commit["steps"]
        weight = commit["examples"] / total if agn.commit == "mean" else 1.0
        for path, x in commit["arrays"].items():
          exact[path] -= weight * encoding.decode(x)
      before = head
    key = before.keys(fragment, "slots")[0]
    slots = encoding.unpack(key, self.written[key])
    atol = 1e-3 if agn.transport.commit_dtype or agn.commit == "mean" else 0
    for path in commit["arrays"]:
      found = slots.get(path, params[path.removeprefix("params/")])
      np.testing.assert_allclose(found, exact[path], rtol=0, atol=atol)
    period = agn.communication_period
    last = agn.transport.last_due(period, fragment, STEPS)
    if self.fault is None or self.fault.how != "kill":
      # Who came after all steps has missed more than this fragment's last due.
      for k, missed in self.missed.items():
        assert steps[k] == max(last - missed, 0), "steps were lost"


def check(commit, kind, most, sample):
  """Lets some of the operations fail: of each kind, one of the first `most`."""
  agn = center_workers.agn(
    2, commit, True, optax.sgd(1.0), grace=0.5, deadline=30, **KINDS[kind]
  )
  state = quadratic_states.create([agn], optax.sgd(1.0), START)
  faults = [
    Fault(k, operation, n, how)
    for k, host in Run(state).check().hosts.items()
    for operation, count in sorted(host.seen.items())
    for n in range(1, min(count, most) + 1)
    for how in ("error", "lost", "kill")
  ]
  faults = random.Random(f"{commit} {kind}").sample(faults, sample)
  with futures.ThreadPoolExecutor(6) as pool:
    runs = {fault: pool.submit(Run(state, fault).check) for fault in faults}
  failed = {f: run.exception() for f, run in runs.items() if run.exception()}
  assert not failed, "\n".join(f"{f}: {e!r}" for f, e in failed.items())


def test_some_operations_that_fail():
  check("mean", "int8 delay", most=3, sample=8)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["", "fragments", "int8 delay", "race"])
@pytest.mark.parametrize("commit", ["sum", "mean", "sequential"])
def test_more_operations_that_fail(commit, kind):
  check(commit, kind, most=8, sample=16)
