"""The log of views: one sequence, whoever writes."""

import concurrent.futures
import errno
import json
import os

import bucket_servers
import pytest

from flaxshard.core import files
from flaxshard.workers import view_log
from flaxshard.workers.join_requests import JoinRequests
from flaxshard.workers.view_log import Member
from flaxshard.workers.view_log import View
from flaxshard.workers.view_log import ViewLog

_MEMBERS = (
  Member(0, "host0:1", "a", "machine:10"),
  Member(2, "host2:1", "b"),
)


@pytest.fixture(
  params=[
    "file",
    pytest.param("gs", marks=pytest.mark.slow),
    pytest.param("s3", marks=pytest.mark.slow),
  ]
)
def directory(request, tmp_path):
  """A directory that does not exist yet, of each kind."""
  if request.param == "file":
    return str(tmp_path / "run" / "views")
  request.getfixturevalue("servers")
  name = request.node.name.partition("[")[0]
  return f"{request.param}://{bucket_servers.BUCKET}/{name}/views"


def test_view_is_stored_and_read(directory):
  log = ViewLog(directory)
  assert log.latest() is None
  first = View(1, _MEMBERS, False, "worker 2 has joined")
  assert log.propose(first) == first
  second = first.next(reversed(_MEMBERS), "the run begins", started=True)
  assert second == View(2, _MEMBERS, True, "the run begins")
  assert log.propose(second) == second
  assert ViewLog(directory).latest() == second


def test_view_with_a_number_that_is_taken_is_not_stored(directory):
  log = ViewLog(directory)
  stored = log.propose(View(1, _MEMBERS, False, "first"))
  assert log.propose(View(1, (), False, "second")) == stored
  assert log.latest() == stored


def test_one_of_several_proposals_is_stored(directory):
  def propose(k):
    log = ViewLog(directory)
    return [
      log.propose(View(epoch, (), False, f"by {k}")) for epoch in range(1, 6)
    ]

  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    results = list(pool.map(propose, range(8)))
  log = {}
  for views in results:
    for view in views:
      # Whoever sees a view sees the same one.
      assert log.setdefault(view.epoch, view) == view
  assert ViewLog(directory).latest() == log[5]


def test_requests_to_join(directory):
  ViewLog(directory).propose(View(1, _MEMBERS))
  mine, theirs = JoinRequests(directory), JoinRequests(directory)
  newcomer = Member(1, "host1:1", "c")
  assert theirs.answer_all() == []
  mine.add(newcomer)
  assert not mine.is_answered(newcomer)
  assert theirs.answer_all() == [(1, "host1:1")]
  assert theirs.answer_all() == []
  assert mine.is_answered(newcomer)
  mine.remove(newcomer)
  assert not mine.is_answered(newcomer)
  # It asks again; that it does is known.
  mine.add(newcomer)
  assert theirs.answer_all() == []
  assert mine.is_answered(newcomer)
  assert ViewLog(directory).latest().epoch == 1


def test_old_views_are_removed(directory, monkeypatch):
  monkeypatch.setattr(view_log, "_KEEP", 3)
  log = ViewLog(directory)
  for epoch in range(1, 8):
    log.propose(View(epoch, ()))
  assert sorted(files.list_names(directory)) == [
    "epoch-00000005",
    "epoch-00000006",
    "epoch-00000007",
  ]


def test_proposal_with_a_number_that_was_removed(directory, monkeypatch):
  """The worker has slept through many views: it learns the latest."""
  monkeypatch.setattr(view_log, "_KEEP", 3)
  log = ViewLog(directory)
  for epoch in range(1, 8):
    log.propose(View(epoch, ()))
  latest = log.latest()
  assert log.propose(View(2, _MEMBERS)) == latest
  assert log.latest() == latest


def test_views_are_sorted_by_number(tmp_path):
  log = ViewLog(str(tmp_path))
  for epoch in (99_999_999, 100_000_000):
    log.propose(View(epoch, ()))
  assert log.latest().epoch == 100_000_000


def test_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
  log = ViewLog(str(tmp_path))
  first = log.propose(View(1, _MEMBERS))

  def fail(number):
    raise OSError(errno.ENOSPC, "no space left on device")

  with monkeypatch.context() as patch:
    patch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space left") as error:
      log.propose(View(2, ()))
  assert error.value.filename.startswith(str(tmp_path))
  assert os.listdir(tmp_path) == ["epoch-00000001"]
  assert log.latest() == first
  assert log.propose(View(2, ())).epoch == 2


def test_rename_whose_answer_was_lost_has_succeeded(tmp_path, monkeypatch):
  rename = os.rename

  def lose(source, target):
    rename(source, target)
    raise OSError(errno.ENOENT, "no such file")

  monkeypatch.setattr(os, "rename", lose)
  view = View(1, _MEMBERS)
  assert ViewLog(str(tmp_path)).propose(view) == view


def test_rename_that_fails_is_an_error(tmp_path, monkeypatch):
  def fail(source, target):
    raise OSError(errno.EIO, "input/output error")

  monkeypatch.setattr(os, "rename", fail)
  with pytest.raises(OSError, match="input/output error"):
    ViewLog(str(tmp_path)).propose(View(1, _MEMBERS))
  assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("content", ["", "{", json.dumps({"epoch": 1})])
def test_damaged_view_is_an_error(tmp_path, content):
  log = ViewLog(str(tmp_path))
  log.propose(View(1, _MEMBERS))
  (tmp_path / "epoch-00000001" / "view.json").write_text(content)
  with pytest.raises(OSError, match="epoch-00000001 is damaged"):
    log.latest()


def test_members_of_a_view():
  view = View(1, _MEMBERS)
  assert view.worker_ids == (0, 2)
  assert view.member(2) == view.member_of("b") == _MEMBERS[1]
  assert view.member(1) is view.member_of("c") is None
