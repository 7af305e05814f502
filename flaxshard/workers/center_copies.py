"""Copies of the center for workers that join, or that are behind.

Only the main thread of a worker may read its state: a step donates it. So a
request waits until the main thread takes a copy, in the next `Worker.commit`.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
import threading
import time
from typing import Any
import uuid

import jax
import numpy as np

from flaxshard.core import trees
from flaxshard.workers.messages import Message
from flaxshard.workers.peers import PeerLost
from flaxshard.workers.peers import Peers
from flaxshard.workers.peers import ViewChanged

PyTree = Any

_METHOD = "center"

# A request that is not repeated for so many seconds is forgotten.
_FORGET_SECONDS = 60.0
_POLL_SECONDS = 0.02
# A call waits for a worker that is dead as long as it is a member.
_CALL_SECONDS = 1.0
# How long a copy is kept after it was sent.
_KEEP_SECONDS = 60.0


class CenterCopies:
  """Answers requests for this worker's center, and requests those of others.

  Args:
    peers: The other workers.
  """

  def __init__(self, peers: Peers):
    self._peers = peers
    self._mutex = threading.Lock()
    # The requests: when they were last repeated, and their answers.
    self._asked: dict[str, float] = {}
    self._answers: dict[str, Message] = {}
    self._fetched: dict[str, float] = {}
    self._offered: Message | None = None
    # The commits of this worker's center while it may get another one.
    self._pulling: int | None = None
    peers.register(_METHOD, self._handle)

  @property
  def is_wanted(self) -> bool:
    """Whether a request waits for the main thread."""
    return bool(self._asked)

  def hold(self, commits: int) -> None:
    """Answers no requests, until `release` or the end of a pull.

    Others may have a newer center than a worker that joins.

    Args:
      commits: The number of commits of this worker's center.
    """
    with self._mutex:
      self._asked.clear()
      self._pulling = commits

  def release(self) -> None:
    """Takes note that this worker's center is one of the run."""
    self._pulling = None

  def forget_old(self) -> None:
    """Drops copies that were sent some time ago."""
    if not self._fetched:
      return  # as before nearly every step
    with self._mutex:
      now = time.monotonic()
      for k in [k for k, t in self._fetched.items() if now - t > _KEEP_SECONDS]:
        del self._fetched[k]
        self._answers.pop(k, None)

  def offer(self, copy: Message | None) -> None:
    """Answers all requests with a copy at once, until it is replaced by None.

    Args:
      copy: The result of `pack`.
    """
    with self._mutex:
      self._offered = copy

  def answer(self, make: Callable[[], Message]) -> None:
    """Answers the requests that wait.

    Args:
      make: Returns the copy, the result of `pack`.
    """
    with self._mutex:
      now = time.monotonic()
      asked = [k for k, t in self._asked.items() if now - t < _FORGET_SECONDS]
      self._asked.clear()
    if not asked:
      return
    copy = make()
    with self._mutex:
      self._answers |= dict.fromkeys(asked, copy)
      self._fetched |= dict.fromkeys(asked, time.monotonic())

  def pull(
    self,
    sources: Sequence[int] | None,
    commits: int,
    wait: Callable[[float], None],
    least_step: int = 0,
  ) -> Message | None:
    """Returns a copy of the center of another worker.

    Args:
      sources: The workers to ask, as long as one is a member; None: all others.
      commits: The number of commits of this worker's center.
      wait: Waits for some seconds, or raises if this worker shall stop.
      least_step: The least local step of the copy.

    Returns:
      The result of `pack`. None if this worker's center is the newest: no other
      worker is there, or all of them ask others too, or are before
      `least_step`.

    Raises:
      NotAMember: The others have lost this worker.
    """
    self._pulling = commits
    try:
      return self._pull(sources, commits, wait, least_step)
    finally:
      self._pulling = None

  def _pull(
    self,
    sources: Sequence[int] | None,
    commits: int,
    wait: Callable[[float], None],
    least_step: int,
  ) -> Message | None:
    requests: dict[int, str] = collections.defaultdict(lambda: uuid.uuid4().hex)
    me = self._peers.worker_id
    while True:
      view = self._peers.view
      others = [k for k in view.worker_ids if k != me]
      pulling = []
      for k in [k for k in others if k in (sources or others)] or others:
        try:
          fields = {"request": requests[k], "fetch": False}
          answer = self._peers.call(
            k, _METHOD, Message(fields), timeout=_CALL_SECONDS
          )
          is_old = answer.fields.get("local_step", least_step) < least_step
          if answer.fields["ready"] and not is_old:
            # However long that takes: it may be large.
            fields = {"request": requests[k], "fetch": True}
            answer = self._peers.call(k, _METHOD, Message(fields))
        except (PeerLost, ViewChanged, TimeoutError):
          break
        if is_old:
          # As old as this worker's, which is of no use: it may be next to ask.
          requests[k] = uuid.uuid4().hex
          pulling.append((-1, -k))
          continue
        if answer.fields["ready"]:
          return answer
        if answer.fields["pulling"] is None:
          break  # its main thread will answer
        pulling.append((answer.fields["pulling"], -k))
      if len(pulling) == len(others) and (commits, -me) > max(
        pulling, default=(-1, 0)
      ):
        with self._mutex:
          # In a newer view others may have been told that this worker asks.
          if self._peers.view.epoch == view.epoch:
            self._pulling = None
            return None
      wait(_POLL_SECONDS)

  def _handle(self, sender: int, message: Message) -> Message:
    del sender
    request, fetch = message.fields["request"], message.fields["fetch"]
    with self._mutex:
      pulling = self._pulling
      answer = self._offered or self._answers.get(request)
      if answer is not None:
        if not fetch:
          step = answer.fields["local_step"]
          return Message({"ready": True, "local_step": step})
        # Kept: an answer that was lost on its way is asked for again.
        self._fetched[request] = time.monotonic()
        return answer
      if pulling is None:
        self._asked[request] = time.monotonic()
    return Message({"ready": False, "pulling": pulling})


def pack(tree: PyTree, **fields: Any) -> Message:
  """Returns a message with the arrays of a tree, in its order.

  Args:
    tree: A tree of arrays.
    **fields: Further fields of the message.
  """
  leaves = [np.ascontiguousarray(x).tobytes() for x in _raw_leaves(tree)]
  return Message({"ready": True, **fields}, b"".join(leaves))


def unpack(message: Message, like: PyTree) -> PyTree:
  """Returns the tree of `pack`.

  Args:
    message: The message.
    like: A tree with the same structure, shapes and dtypes.
  """
  leaves, start = [], 0
  for x in jax.tree.leaves(like):
    is_key = trees.is_prng_key(x)
    raw = jax.eval_shape(jax.random.key_data, x) if is_key else x
    size = int(np.prod(raw.shape, dtype=np.int64)) * raw.dtype.itemsize
    data = np.frombuffer(message.data[start : start + size], raw.dtype)
    value: Any = data.reshape(raw.shape)
    if is_key:
      value = jax.random.wrap_key_data(value, impl=jax.random.key_impl(x))
    leaves.append(value)
    start += size
  return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _raw_leaves(tree: PyTree) -> list[np.ndarray]:
  leaves = []
  for x in jax.tree.leaves(tree):
    if trees.is_prng_key(x):
      x = jax.random.key_data(x)
    leaves.append(x)
  for x in leaves:
    if isinstance(x, jax.Array):
      x.copy_to_host_async()
  return [np.asarray(x) for x in leaves]
