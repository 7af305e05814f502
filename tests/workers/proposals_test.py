"""Who proposes which view, by whom it does not hear."""

import pytest

from flaxshard.workers import proposals
from flaxshard.workers.view_log import Member
from flaxshard.workers.view_log import View


def _propose(num_workers, silence, quorum=1):
  """Returns the members of the view that is proposed, None for none."""
  members = tuple(Member(k, f"host{k}:1", str(k)) for k in range(num_workers))
  view = proposals.without_silent(
    View(3, members, True),
    lambda member: silence.get(member.worker_id, 0.0),
    10.0,
    quorum,
  )
  if view is None:
    return None
  assert (view.epoch, view.started) == (4, True)
  return view.worker_ids


@pytest.mark.parametrize(
  ("silence", "expected"),
  [
    ({}, None),
    ({3: 9.9}, None),
    ({3: 10.0}, (0, 1, 2)),
    ({0: 10.0}, (1, 2, 3)),
    # Of two halves, the one with the lowest index goes first.
    ({2: 10.0, 3: 10.0}, (0, 1)),
    ({0: 10.0, 1: 10.0}, None),
    ({0: 11.0, 1: 11.0}, (2, 3)),
    # The majority goes first.
    ({0: 10.9, 1: 10.9, 2: 10.9}, None),
    ({1: 10.9, 2: 10.9, 3: 10.9}, None),
    ({1: 11.0, 2: 11.0, 3: 11.0}, (0,)),
    ({1: 11.0, 2: 11.0, 3: 10.0}, (0, 3)),
    # Whoever is cut off hears the last sign of each at another time.
    ({1: 10.0, 2: 9.9, 3: 9.8}, None),
    ({1: 11.0, 2: 10.9, 3: 10.8}, (0, 2, 3)),
    ({0: 9.9, 2: 10.0, 3: 4.9}, None),
    ({2: 10.0, 3: 5.0}, (0, 1, 3)),
    ({0: 10.0, 1: 5.0}, None),
    ({0: 10.0, 1: 4.9}, (1, 2, 3)),
  ],
)
def test_silent_members_are_excluded(silence, expected):
  assert _propose(4, silence) == expected


@pytest.mark.parametrize(
  ("quorum", "expected"), [(1, (0, 1)), (2, (0, 1)), (3, None)]
)
def test_no_view_has_fewer_members_than_the_quorum(quorum, expected):
  assert _propose(4, {2: 99.0, 3: 99.0}, quorum) == expected


def test_of_two_workers_the_one_that_is_left_goes_on():
  assert _propose(2, {1: 10.0}) == (0,)
  assert _propose(2, {0: 10.0}) is None
  assert _propose(2, {0: 11.0}) == (1,)


def test_reason_names_the_lost_workers():
  members = tuple(Member(k, "host:1", str(k)) for k in range(4))
  view = proposals.without_silent(
    View(1, members), lambda m: 20.0 * (m.worker_id > 1), 10.0, 1
  )
  assert view.reason == "no sign of life from workers 2, 3 for 10 s"
