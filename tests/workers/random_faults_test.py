"""Memberships in threads, with random cuts, deaths, full disks and returns."""

import errno
import random
import threading
import time

import fake_links
import pytest

from flaxshard.workers import membership as membership_lib
from flaxshard.workers.messages import Message
from flaxshard.workers.view_log import View

pytestmark = pytest.mark.slow

_HEARTBEAT = 0.4
_NUM_WORKERS = 5
_EVENTS = 30


class _Stopped(Exception):
  pass


class Worker:
  """A worker that calls random members, and comes back when it is excluded."""

  def __init__(self, run, worker_id):
    self.run, self.worker_id = run, worker_id
    self.is_dead = self.is_full = False
    self.answers = 0
    self.member = membership_lib.Membership(
      run.directory,
      worker_id,
      _NUM_WORKERS,
      heartbeat=_HEARTBEAT,
      quorum=run.quorum,
      address="fake:0",
      create_transport=run.links.worker(worker_id),
    )
    self.member.register("call", self._handle)
    self.member.on_view(run.record)
    propose = self.member.log.propose

    def propose_unless_full(view):
      if self.is_full:
        raise OSError(errno.ENOSPC, "no space left")
      return propose(view)

    self.member.log.propose = propose_unless_full
    self.thread = threading.Thread(target=self._work, daemon=True)
    self.thread.start()

  def die(self):
    self.is_dead = True
    self.member.close()

  def _handle(self, sender, message):
    # Some handlers wait, so that views change meanwhile.
    time.sleep(message.fields["seconds"])
    return Message({"incarnation": self.member.incarnation})

  def _work(self):
    rng = random.Random(self.worker_id)
    try:
      self._join(False)
      while True:
        self._wait(0.0)
        try:
          self._call(rng)
        except (membership_lib.PeerLost, membership_lib.ViewChanged):
          pass
        except membership_lib.NotAMember:
          self._join(True)
    except _Stopped:
      pass
    except Exception as e:
      if not self.is_dead:
        self.run.errors.append(e)

  def _call(self, rng):
    member = self.member
    other = rng.choice(member.view.members or (None,))
    if other is None:
      return
    seconds = rng.choice([0.0, 0.0, 0.05, _HEARTBEAT])
    before = member.view
    answer = member.call(other.worker_id, "call", Message({"seconds": seconds}))
    after = member.view
    self.answers += 1
    # The other one was a member when the call returned; since then another
    # view may have come.
    views = (after,) if before == after else (before, after)
    incarnation = answer.fields["incarnation"]
    if not any(view.member_of(incarnation) for view in views):
      self.run.strangers.append((before, after, incarnation))

  def _join(self, started):
    while True:
      try:
        self.member.join(started=started, wait=self._wait)
        return
      except OSError:  # the disk is full
        self._wait(0.1)

  def _wait(self, seconds):
    time.sleep(seconds)
    if self.is_dead:
      raise _Stopped


class Run:
  """A run whose views are all recorded."""

  def __init__(self, directory, quorum):
    self.directory, self.quorum = str(directory), quorum
    self.links = fake_links.FakeLinks()
    self.views: dict[int, View] = {}
    self.errors, self.conflicts, self.strangers = [], [], []
    self.lock = threading.Lock()
    self.workers = {k: Worker(self, k) for k in range(_NUM_WORKERS)}

  def record(self, view):
    with self.lock:
      if self.views.setdefault(view.epoch, view) != view:
        self.conflicts.append(view)

  def settle(self, seconds):
    """Waits until all that live are the members of one view."""
    end = time.monotonic() + seconds
    while True:
      alive = {k: w for k, w in self.workers.items() if not w.is_dead}
      views = {w.member.view for w in alive.values()}
      if len(views) == 1 and views.pop().worker_ids == tuple(sorted(alive)):
        return
      assert time.monotonic() < end, (sorted(alive), views)
      time.sleep(0.02)


@pytest.mark.parametrize("quorum", [1, 3])
@pytest.mark.parametrize("seed", range(1))
def test_random_faults(seed, quorum, tmp_path):
  rng = random.Random(seed)
  run = Run(tmp_path / "views", quorum)
  run.settle(10.0)
  for _ in range(_EVENTS):
    k = rng.randrange(_NUM_WORKERS)
    worker = run.workers[k]
    match rng.choice(["split", "cut", "heal", "die", "die", "full", "back"]):
      case "split":
        ids = rng.sample(range(_NUM_WORKERS), _NUM_WORKERS)
        size = rng.randrange(1, _NUM_WORKERS)
        run.links.split(ids[:size], ids[size:])
      case "cut":
        other = rng.choice([x for x in range(_NUM_WORKERS) if x != k])
        run.links.cut(k, other, one_way=rng.random() < 0.5)
      case "heal":
        run.links.heal()
      case "die":
        worker.die()
      case "full":
        worker.is_full = not worker.is_full
      case "back":
        if worker.is_dead:
          run.workers[k] = Worker(run, k)
    time.sleep(rng.choice([0.0, 0.1, _HEARTBEAT, 3 * _HEARTBEAT]))
  run.links.heal()
  for k, worker in list(run.workers.items()):
    worker.is_full = False
    if worker.is_dead:
      run.workers[k] = Worker(run, k)
  # Those that come back may wait for answers in the directory.
  run.settle(6 * _HEARTBEAT + 15.0)
  before = {k: worker.answers for k, worker in run.workers.items()}
  end = time.monotonic() + 10.0
  while any(w.answers <= before[k] for k, w in run.workers.items()):
    assert time.monotonic() < end, before
    time.sleep(0.02)
  for worker in run.workers.values():
    worker.die()
    worker.thread.join(10.0)
  assert run.errors == []
  assert run.conflicts == []
  assert run.strangers == []
  # Views change one step at a time: each differs from the one before.
  epochs = sorted(run.views)
  assert epochs == list(range(1, len(epochs) + 1))
  for epoch in epochs[1:]:
    view, last = run.views[epoch], run.views[epoch - 1]
    assert view.members != last.members
    removed = len(set(last.members) - set(view.members))
    if "no sign of life" in view.reason:
      assert len(view.members) >= quorum and removed
