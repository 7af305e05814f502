"""Memberships in threads, over links that can be cut."""

import dataclasses
import errno
import os
import subprocess
import sys
import threading
import time

import fake_links
import pytest

from flaxshard.core import local_processes
from flaxshard.workers import membership as membership_lib
from flaxshard.workers import signs_of_life
from flaxshard.workers.messages import Message
from flaxshard.workers.view_log import Member
from flaxshard.workers.view_log import View
from flaxshard.workers.view_log import ViewLog

_HEARTBEAT = 0.5
# What an exclusion may take, as the goal is stated.
_SLACK = 2.0


class Run:
  """The workers of a run, in threads."""

  def __init__(self, directory, num_workers):
    self.directory = str(directory)
    self.num_workers = num_workers
    self.links = fake_links.FakeLinks()
    self.all = []

  def create(self, worker_id, **arguments):
    member = membership_lib.Membership(
      self.directory,
      worker_id,
      **{
        "num_workers": self.num_workers,
        "heartbeat": _HEARTBEAT,
        "address": "fake:0",
        "create_transport": self.links.worker(worker_id),
        **arguments,
      },
    )
    member.register(
      "echo",
      lambda sender, m: Message({"from": sender, "to": worker_id}, m.data),
    )
    self.all.append(member)
    return member

  def start(self, **arguments):
    """Starts all workers, and waits until all know all."""
    workers = [self.create(k, **arguments) for k in range(self.num_workers)]
    for worker in workers:
      worker.join()
    settle(workers)
    return workers

  def close(self):
    for member in self.all:
      member.close()


@pytest.fixture
def run(tmp_path):
  """Creates a run, and closes its workers after the test."""
  runs = []

  def create(num_workers):
    runs.append(Run(tmp_path / "views", num_workers))
    return runs[-1]

  yield create
  for created in runs:
    created.close()


def eventually(condition, seconds=10 * (_HEARTBEAT + _SLACK)):
  """Waits until a condition holds.

  Ten times as long as the goal: other programs may use the machine. Runs of
  processes hold the goal itself.
  """
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end
    time.sleep(0.005)


def settle(workers, seconds=10 * (_HEARTBEAT + _SLACK)):
  """Waits until the workers are the members of one view, and returns it."""
  ids = tuple(sorted(worker.worker_id for worker in workers))

  def is_settled():
    views = {worker.view for worker in workers}
    return len(views) == 1 and views.pop().worker_ids == ids

  eventually(is_settled, seconds)
  return workers[0].view


def in_thread(function):
  """Runs a function in a thread; returns what waits for its result."""
  results = []

  def target():
    try:
      results.append(function())
    except Exception as e:
      results.append(e)

  thread = threading.Thread(target=target, daemon=True)
  thread.start()

  def result():
    thread.join(10.0)
    [found] = results
    return found

  return result


def block(worker):
  """Registers a method that waits; returns events of its begin and its end."""
  began, end = threading.Event(), threading.Event()

  def handle(sender, message):
    began.set()
    end.wait(10.0)
    return Message({"late": True})

  worker.register("block", handle)
  return began, end


# -- Calls.


def test_workers_join_one_after_another(run):
  workers = run(3).start()
  view = workers[0].view
  assert view.epoch == 3 and not view.started
  assert view.worker_ids == (0, 1, 2)
  assert [m.incarnation for m in view.members] == [
    worker.incarnation for worker in workers
  ]
  assert [worker.num_workers for worker in workers] == [3, 3, 3]


@pytest.mark.parametrize("receiver", [0, 1])
def test_call_returns_the_answer(run, receiver):
  workers = run(2).start()
  answer = workers[0].call(receiver, "echo", Message({}, b"data"))
  assert answer == Message({"from": 0, "to": receiver}, b"data")


@pytest.mark.parametrize("receiver", [0, 1])
def test_errors_of_a_handler_fail_the_call(run, receiver):
  workers = run(2).start()

  def fail(sender, message):
    raise ValueError("reason")

  workers[receiver].register("fail", fail)
  with pytest.raises(membership_lib.CallFailed, match="ValueError: reason"):
    workers[0].call(receiver, "fail", Message())
  with pytest.raises(membership_lib.CallFailed, match="no handler of 'x'"):
    workers[0].call(receiver, "x", Message())


@pytest.mark.parametrize("receiver", [0, 1])
def test_call_times_out(run, receiver):
  workers = run(2).start()
  _, end = block(workers[receiver])
  with pytest.raises(TimeoutError, match=r"not answered 'block' within 0\.05"):
    workers[0].call(receiver, "block", Message(), timeout=0.05)
  end.set()


def test_call_is_sent_again_after_a_failure_of_the_connection(run):
  created = run(2)
  workers = created.start()
  transport, failures = workers[0]._transport, iter([True, True, False])
  call = transport.call

  def fail_twice(*args):
    if next(failures):
      raise ConnectionError("reset")
    return call(*args)

  transport.call = fail_twice
  assert workers[0].call(1, "echo", Message()).fields["to"] == 1


def test_call_of_a_worker_that_is_no_member(run):
  workers = [run(3).create(0)]
  workers[0].join()
  with pytest.raises(membership_lib.PeerLost, match="worker 2 is no member"):
    workers[0].call(2, "echo", Message())


def test_call_before_join(run):
  with pytest.raises(membership_lib.NotAMember, match="worker 0 is no member"):
    run(2).create(0).call(0, "echo", Message())


def test_caller_with_an_older_view_learns_the_newer_one(run):
  created = run(3)
  workers = created.start()
  # Worker 1 gets no answers with views for a while.
  ask = workers[1]._transport.ask
  workers[1]._transport.ask = lambda *args: None
  created.links.cut(0, 1, one_way=True)
  created.links.cut(2, 1, one_way=True)
  workers[0].begin()
  eventually(lambda: workers[2].view.started)
  assert not workers[1].view.started
  created.links.heal()
  workers[0]._transport.ask = workers[2]._transport.ask = lambda *args: None
  with pytest.raises(membership_lib.ViewChanged):
    workers[1].call(2, "echo", Message())
  assert workers[1].view == workers[0].view
  workers[1]._transport.ask = ask


def test_owners_of_parts(run):
  workers = run(4).start()
  assert [workers[0].owner_of(k) for k in range(4)] == [0, 1, 2, 3]
  workers[1].leave()
  workers[3].leave()
  settle([workers[0], workers[2]])
  assert [workers[0].owner_of(k) for k in range(4)] == [0, 2, 2, 0]


# -- Deaths.


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_others_go_on_after_a_death(run, victim):
  workers = run(3).start()
  began, end = block(workers[victim])
  others = [worker for worker in workers if worker.worker_id != victim]
  result = in_thread(lambda: others[0].call(victim, "block", Message()))
  assert began.wait(5.0)
  killed = time.monotonic()
  workers[victim].close()
  error = result()
  assert time.monotonic() - killed < _HEARTBEAT + _SLACK
  assert isinstance(error, membership_lib.PeerLost)
  assert f"no sign of life from worker {victim} for 0.5 s" in str(error)
  settle(others)
  assert others[1].call(others[0].worker_id, "echo", Message())
  end.set()


@pytest.mark.slow
def test_two_of_three_die_at_once(run):
  workers = run(3).start()
  workers[0].close()
  workers[2].close()
  assert settle([workers[1]]).worker_ids == (1,)


@pytest.mark.slow
def test_death_below_the_quorum_changes_nothing(run, caplog):
  created = run(3)
  workers = created.start(quorum=3)
  view = workers[0].view
  workers[1].close()
  signs = workers[0]._signs
  eventually(lambda: signs.silence(view.members[1]) > _HEARTBEAT + 1.2, 5.0)
  assert workers[0].view == view
  assert "worker 0: no sign of life from 1; waiting for them" in caplog.text
  # It may come back all the same.
  workers[1] = created.create(1, quorum=3)
  workers[1].join()
  settle(workers)


def test_proposer_dies_after_the_write(run):
  """Nobody was told the view: it is found in the log."""
  created = run(3)
  workers = created.start()
  view = workers[0].view
  written = view.next(view.members[1:], "worker 0 has left")
  workers[0].close()
  assert ViewLog(created.directory).propose(written) == written
  eventually(lambda: workers[1].view == workers[2].view == written)


def test_excluded_worker_notices_and_comes_back(run):
  created = run(3)
  workers = created.start()
  first = workers[2].incarnation
  views = []
  workers[2].on_view(views.append)
  began, end = block(workers[0])
  result = in_thread(lambda: workers[2].call(0, "block", Message()))
  assert began.wait(5.0)
  created.links.split([0, 1], [2])
  assert isinstance(result(), membership_lib.NotAMember)
  settle(workers[:2])
  end.set()
  with pytest.raises(membership_lib.NotAMember):
    workers[2].owner_of(0)
  with pytest.raises(membership_lib.NotAMember):
    workers[2].begin()
  # Members live, so it does not go on alone.
  with pytest.raises(TimeoutError, match="the members live, but cannot be"):
    workers[2].join(timeout=0.1)
  created.links.heal()
  view = workers[2].join()
  assert view.worker_ids == (0, 1, 2) and workers[2].incarnation != first
  assert view.member(2).incarnation == workers[2].incarnation
  settle(workers)
  eventually(lambda: views[-1] == view)
  assert (0, 1) in [x.worker_ids for x in views]
  epochs = [x.epoch for x in views]
  assert epochs == sorted(set(epochs))


def test_answer_that_comes_after_the_exclusion_is_not_used(run):
  created = run(3)
  workers = created.start(quorum=2)
  began, end = block(workers[2])
  result = in_thread(lambda: workers[0].call(2, "block", Message()))
  assert began.wait(5.0)
  created.links.split([0, 1], [2])
  end.set()  # the answer is on its way, and arrives when the link is healed
  eventually(lambda: workers[0].view.worker_ids == (0, 1))
  created.links.heal()
  assert isinstance(result(), membership_lib.PeerLost)


def test_process_that_was_stopped_excludes_nobody(run, monkeypatch):
  """Time in which it did not run does not count as silence of the others."""
  workers = run(2).start()
  view = workers[0].view

  class Clock:
    offset = 0.0

    def monotonic(self):
      return time.monotonic() + self.offset

  clock = Clock()
  monkeypatch.setattr(signs_of_life, "time", clock)
  for _ in range(3):
    clock.offset += 1000.0
    time.sleep(_HEARTBEAT / 4)
  assert workers[0].view == workers[1].view == view


# -- A network that is split.


@pytest.mark.slow
def test_half_with_the_lowest_index_goes_on(run):
  created = run(4)
  workers = created.start()
  created.links.split([0, 1], [2, 3])
  settle(workers[:2])
  for worker in workers[2:]:
    eventually(lambda worker=worker: worker.view == workers[0].view)
  results = [in_thread(worker.join) for worker in workers[2:]]
  created.links.heal()
  for result in results:
    assert isinstance(result(), View)
  settle(workers)


@pytest.mark.slow
def test_majority_goes_on_without_the_lowest_index(run):
  created = run(3)
  workers = created.start()
  created.links.split([0], [1, 2])
  settle(workers[1:])
  eventually(lambda: 0 not in workers[0].view.worker_ids)


@pytest.mark.slow
def test_no_half_goes_on_below_the_quorum(run):
  created = run(4)
  workers = created.start(quorum=3)
  view = workers[0].view
  created.links.split([0, 1], [2, 3])
  signs = workers[2]._signs
  eventually(lambda: signs.silence(view.members[0]) > _HEARTBEAT + 1.5)
  assert {worker.view for worker in workers} == {view}
  created.links.heal()
  # Whoever hears two others again may go on before it hears the third.
  eventually(lambda: min(map(signs.silence, view.members[:2])) == 0.0)
  assert len(workers[2].view.members) >= 3


def test_worker_that_a_member_cannot_reach_is_not_admitted(run):
  """It would be excluded again and again."""
  created = run(3)
  workers = [created.create(k) for k in range(3)]
  workers[0].join()
  workers[1].join()
  created.links.cut(1, 2, one_way=True)
  with pytest.raises(TimeoutError, match="worker 1 cannot reach worker 2"):
    workers[2].join(timeout=0.1)
  created.links.heal()
  workers[2].join()
  settle(workers)


# -- Storage that fails.


def _fill_disk(worker):
  def propose(view):
    raise OSError(errno.ENOSPC, "no space left", worker.log.directory)

  worker.log.propose = propose


def test_others_exclude_when_the_disk_of_one_is_full(run):
  workers = run(3).start()
  _fill_disk(workers[0])
  workers[2].close()
  settle(workers[:2])


def test_others_admit_when_the_disk_of_one_is_full(run):
  created = run(3)
  workers = [created.create(k) for k in range(3)]
  workers[0].join()
  workers[1].join()
  settle(workers[:2])
  _fill_disk(workers[0])
  workers[2].join()
  settle(workers)


def test_full_disk_of_the_only_one_ends_a_join(run):
  worker = run(2).create(0)
  _fill_disk(worker)
  with pytest.raises(OSError, match="no space left"):
    worker.join()


def test_leave_with_a_full_disk_is_a_death(run, caplog):
  workers = run(2).start()
  _fill_disk(workers[1])
  workers[1].leave()
  workers[1].close()
  assert "worker 1 cannot leave" in caplog.text
  settle(workers[:1])


# -- Joining.


def test_restarted_worker_replaces_its_old_incarnation(run):
  created = run(3)
  workers = created.start(heartbeat=2.0)
  workers[1].close()
  began = time.monotonic()
  workers[1] = created.create(1, heartbeat=2.0)
  view = workers[1].join()
  # Sooner than the death is noticed.
  assert time.monotonic() - began < 2.0
  assert view.member(1).incarnation == workers[1].incarnation
  settle(workers)
  assert workers[0].call(1, "echo", Message())


@pytest.mark.slow
def test_two_workers_with_one_index(run):
  created = run(2)
  created.start()
  other = created.create(1)
  with pytest.raises(ValueError, match="worker_id=1 is in use by a worker at"):
    other.join()


@pytest.mark.slow
def test_only_member_has_the_index_of_another_process(run):
  created = run(2)
  created.create(0).join()
  with pytest.raises(ValueError, match="worker_id=0 is in use by a worker at"):
    created.create(0).join()


def test_another_number_of_workers(run):
  created = run(2)
  created.create(0).join()
  with pytest.raises(ValueError, match="worker 1 has num_workers=3, worker 0"):
    created.create(1, num_workers=3).join()


@pytest.mark.slow
def test_views_of_an_earlier_run_whose_workers_are_dead(run):
  created = run(2)
  for worker in created.start():
    worker.close()
  began = time.monotonic()
  workers = [created.create(k) for k in range(2)]
  results = [in_thread(worker.join) for worker in workers]
  assert all(isinstance(result(), View) for result in results)
  # They might have been cut off, and had time to answer.
  assert _HEARTBEAT < time.monotonic() - began < 2 * (_HEARTBEAT + 1) + 2
  assert settle(workers).epoch == 4


def test_views_of_processes_that_have_ended(run):
  """On this machine it is known, and nobody waits."""
  created = run(2)
  ended = subprocess.Popen([sys.executable, "-c", ""])
  ended.wait()
  process = f"{local_processes.space()}:{ended.pid}"
  old = [Member(k, "fake:9", f"old{k}", process) for k in range(2)]
  ViewLog(created.directory).propose(View(7, tuple(old), True))
  worker = created.create(1)
  began = time.monotonic()
  view = worker.join()
  assert time.monotonic() - began < _HEARTBEAT
  assert (view.epoch, view.worker_ids, view.started) == (8, (1,), False)


def test_join_ends_when_wait_raises(run):
  created = run(2)
  created.start()[0].close()
  created.links.cut(1, 2)

  def stop(seconds):
    raise InterruptedError

  created.all[1].close()
  with pytest.raises(InterruptedError):
    created.create(0).join(wait=stop)
  assert not [x for x in os.listdir(created.directory) if "request" in x]


# -- The end, and the beginning of a run.


def test_worker_that_leaves_is_not_waited_for(run):
  workers = run(3).start(heartbeat=60.0)
  began, _ = block(workers[2])
  result = in_thread(lambda: workers[0].call(2, "block", Message()))
  assert began.wait(5.0)
  workers[2].leave()
  assert isinstance(result(), membership_lib.PeerLost)
  assert settle(workers[:2], 1.0).reason == "worker 2 has left"
  with pytest.raises(membership_lib.NotAMember):
    workers[2].call(0, "echo", Message())


def test_all_leave_and_another_run_begins_at_once(run):
  created = run(2)
  workers = created.start(heartbeat=60.0)
  workers[0].begin()
  workers[0].leave()
  workers[1].leave()
  assert ViewLog(created.directory).latest().members == ()
  view = created.create(1, heartbeat=60.0).join()
  assert view.worker_ids == (1,) and not view.started


def test_begin_marks_the_run_as_started_for_all(run):
  workers = run(2).start()
  workers[0].begin()
  eventually(lambda: workers[1].view.started)
  epoch = workers[1].view.epoch
  with pytest.raises(membership_lib.ViewChanged, match="has begun"):
    workers[1].begin()
  assert workers[1].view.epoch == epoch


def test_a_worker_that_comes_back_says_that_the_run_has_begun(run):
  created = run(2)
  workers = [created.create(k) for k in range(2)]
  assert not workers[0].join().started
  assert workers[1].join(started=True).started
  eventually(lambda: workers[0].view.started)


def test_begin_after_a_change_of_the_members(run):
  created = run(3)
  workers = [created.create(k) for k in range(2)]
  for worker in workers:
    worker.join()
  view = settle(workers)
  other = dataclasses.replace(view.members[0], worker_id=2, incarnation="x")
  stored = view.next([*view.members, other], "worker 2 has joined")
  workers[0].log.propose(stored)
  with pytest.raises(membership_lib.ViewChanged):
    workers[0].begin()
  assert not workers[0].view.started


def test_worker_that_goes_on_alone_says_that_the_run_has_begun(run):
  assert run(2).create(0).join(started=True).started


def test_failing_callback_does_not_stop_the_others(run, caplog):
  worker = run(2).create(0)
  views = []
  worker.on_view(lambda view: 1 / 0)
  worker.on_view(views.append)
  worker.join()
  eventually(lambda: views == [worker.view])
  assert "a callback of view 1 has failed" in caplog.text


def test_calls_end_when_the_worker_is_closed(run):
  workers = run(2).start()
  began, end = block(workers[1])
  result = in_thread(lambda: workers[0].call(1, "block", Message()))
  assert began.wait(5.0)
  workers[0].close()
  assert isinstance(result(), membership_lib.NotAMember)
  end.set()


@pytest.mark.parametrize(
  "variable", ["FLAXSHARD_WORKER_ADDRESS", "FLAXSHARD_WORKER_BIND"]
)
def test_address_without_a_port_raises(run, monkeypatch, variable):
  monkeypatch.setenv(variable, "10.0.0.3")
  with pytest.raises(ValueError, match=f"{variable} .*'10.0.0.3'"):
    run(2).create(0, address=None)
