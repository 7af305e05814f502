"""The moments at which a view changes during a call."""

import contextlib

import pytest

from flaxshard.workers import calls
from flaxshard.workers import membership as membership_lib
from flaxshard.workers.current_view import CurrentView
from flaxshard.workers.messages import Message
from flaxshard.workers.view_log import Member
from flaxshard.workers.view_log import View

_ME, _OTHER, _THIRD = (Member(k, f"host{k}:1", f"name{k}") for k in range(3))
_VIEW = View(5, (_ME, _OTHER, _THIRD))
_WITHOUT_OTHER = _VIEW.next([_ME, _THIRD], "lost")
_WITHOUT_ME = _VIEW.next([_OTHER, _THIRD], "lost")
_SAME_MEMBERS = _VIEW.next(_VIEW.members, "begun", started=True)

_OK = {"status": "ok", "view": None}


@pytest.fixture
def current():
  created = CurrentView(_ME)
  created.adopt(_VIEW)
  yield created
  created.close()


class Transport:
  """Answers a call after a function has run; counts the calls."""

  def __init__(self, *answers, during=lambda: None):
    self.answers, self.during = list(answers), during
    self.headers = []
    self.cancelled = []

  def call(self, address, header, message, timeout, track):
    self.headers.append(header)
    with track(lambda: self.cancelled.append(address)):
      self.during()
    answer = self.answers.pop(0)
    if isinstance(answer, Exception):
      raise answer
    return answer, Message({"result": 1})


def _send(current, transport, timeout=None):
  call = calls.Call(current, 1, "method", Message(), timeout)
  return call.send(transport)


def test_header_names_both_workers_and_the_view(current):
  transport = Transport(_OK)
  assert _send(current, transport) == Message({"result": 1})
  [header] = transport.headers
  assert (header["to"], header["from"]) == ("name1", "name0")
  assert View.from_fields(header["view"]) == _VIEW
  assert transport.cancelled == []


@pytest.mark.parametrize(
  ("view", "error"),
  [
    (_WITHOUT_OTHER, membership_lib.PeerLost),
    (_WITHOUT_ME, membership_lib.NotAMember),
  ],
)
@pytest.mark.parametrize("learns", ["during the call", "from the answer"])
def test_answer_is_not_used_after_an_exclusion(current, learns, view, error):
  if learns == "during the call":
    transport = Transport(_OK, during=lambda: current.adopt(view))
  else:
    transport = Transport({**_OK, "view": view.to_fields()})
  with pytest.raises(error):
    _send(current, transport)
  cancelled = ["host1:1"] if learns == "during the call" else []
  assert transport.cancelled == cancelled


def test_answer_of_a_member_is_used_in_a_newer_view(current):
  transport = Transport({**_OK, "view": _SAME_MEMBERS.to_fields()})
  assert _send(current, transport).fields == {"result": 1}
  assert current.view == _SAME_MEMBERS
  without_third = _SAME_MEMBERS.next([_ME, _OTHER], "lost")
  transport = Transport(_OK, during=lambda: current.adopt(without_third))
  assert _send(current, transport).fields == {"result": 1}
  assert transport.cancelled == []


@pytest.mark.parametrize(
  ("view", "error"),
  [
    (_SAME_MEMBERS, membership_lib.ViewChanged),
    (_WITHOUT_OTHER, membership_lib.PeerLost),
    (_WITHOUT_ME, membership_lib.NotAMember),
  ],
)
def test_call_with_an_old_view_is_refused(current, view, error):
  transport = Transport({"status": "view", "view": view.to_fields()})
  with pytest.raises(error):
    _send(current, transport)
  assert current.view == view


@pytest.mark.parametrize(
  "failure", [ConnectionError("reset"), {"status": "wrong", "view": None}]
)
def test_call_is_sent_again_while_the_other_one_is_a_member(current, failure):
  assert _send(current, Transport(failure, failure, _OK))
  transport = Transport(
    failure, failure, during=lambda: current.adopt(_WITHOUT_OTHER)
  )
  with pytest.raises(membership_lib.PeerLost):
    _send(current, transport)
  assert len(transport.headers) == 1
  current.adopt(_VIEW)


def test_call_that_fails_until_the_timeout(current):
  failures = [ConnectionError("reset")] * 100
  with pytest.raises(TimeoutError, match="worker 1 has not answered 'method'"):
    _send(current, Transport(*failures), timeout=0.1)


def test_call_of_an_older_incarnation_is_not_a_call_of_the_newer_one(current):
  newer = Member(1, "host1:2", "newer")
  view = _VIEW.next([_ME, newer, _THIRD], "worker 1 has joined")
  transport = Transport(_OK, during=lambda: current.adopt(view))
  with pytest.raises(membership_lib.PeerLost):
    _send(current, transport)


# -- The worker that answers.


def _answer(current, header=None, during=lambda: None):
  """Returns the status, the view and how many messages were read."""
  read = []

  def handle(sender, message):
    during()
    return Message({"sender": sender})

  def receive():
    read.append(True)
    return Message()

  header = {
    "to": "name0",
    "from": "name1",
    "view": _VIEW.to_fields(),
    "method": "method",
    **(header or {}),
  }
  answer, message = calls.answer(current, {"method": handle}, header, receive)
  view = answer["view"] and View.from_fields(answer["view"])
  if answer["status"] == "ok":
    assert message == Message({"sender": 1})
  return answer["status"], view, len(read)


def test_member_of_the_same_view_is_answered(current):
  assert _answer(current) == ("ok", None, 1)


def test_newer_view_of_the_caller_is_adopted(current):
  header = {"view": _SAME_MEMBERS.to_fields()}
  assert _answer(current, header) == ("ok", None, 1)
  assert current.view == _SAME_MEMBERS


def test_older_view_is_refused_before_the_message_is_read(current):
  current.adopt(_SAME_MEMBERS)
  assert _answer(current) == ("view", _SAME_MEMBERS, 0)


def test_caller_that_excludes_this_worker_is_refused(current):
  header = {"view": _WITHOUT_ME.to_fields()}
  assert _answer(current, header) == ("view", _WITHOUT_ME, 0)
  assert not current.is_member


@pytest.mark.parametrize("header", [{"to": "name1"}, {"to": ""}])
def test_call_for_another_process_learns_nothing(current, header):
  assert _answer(current, header) == ("wrong", None, 0)


def test_caller_that_is_no_member_is_refused(current):
  assert _answer(current, {"from": "stranger"}) == ("view", _VIEW, 0)


@pytest.mark.parametrize("view", [_WITHOUT_OTHER, _WITHOUT_ME])
def test_answer_after_an_exclusion_is_withheld(current, view):
  during = lambda: current.adopt(view)
  assert _answer(current, during=during) == ("view", view, 1)


def test_answer_tells_a_view_that_came_meanwhile(current):
  during = lambda: current.adopt(_SAME_MEMBERS)
  assert _answer(current, during=during) == ("ok", _SAME_MEMBERS, 1)


def test_older_views_are_not_adopted(current):
  assert not current.adopt(View(4, ()))
  assert current.view == _VIEW


def test_calls_under_way_are_cancelled_with_the_incarnation(current):
  cancelled = []
  with contextlib.ExitStack() as stack:
    for member in (_OTHER, _THIRD):
      stack.enter_context(
        current.cancel_if_lost(
          _ME, member, lambda member=member: cancelled.append(member)
        )
      )
    current.adopt(_WITHOUT_OTHER)
    assert cancelled == [_OTHER]
    current.become(Member(0, "host0:1", "next"))
    assert cancelled == [_OTHER, _OTHER, _THIRD]
  with pytest.raises(membership_lib.NotAMember):
    calls.Call(current, 2, "method", Message(), None)
