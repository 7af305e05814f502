"""Workers of AGN as threads of one process, with a center in memory."""

from concurrent import futures
import itertools
import logging

import flaxshard as fs

_NUMBERS = itertools.count()


def new_directory():
  return f"memory://tests_{next(_NUMBERS)}"


def agn(period=2, commit="mean", commit_delta=False, outer_tx=None, **options):
  """Returns an AGN with a center in a store, which has the `options`."""
  transport = fs.Store(**options)
  return fs.AGN(
    period,
    commit,
    commit_delta=commit_delta,
    outer_tx=outer_tx,
    transport=transport,
  )


def warnings_of(caplog):
  """Returns the warnings that were logged."""
  return [
    r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING
  ]


class Workers:
  """Workers that take each step together.

  Args:
    states: The state of each worker.
    step: `step(state, *args)` returns the new state.
    directory: Where the center lies; None: a new one.
    in_turn: Whether they commit one after another, in order.
  """

  def __init__(self, states, step, directory=None, in_turn=False):
    self._step = step
    self._in_turn = in_turn
    self._pool = futures.ThreadPoolExecutor(len(states))
    directory = directory or new_directory()
    self.workers = [
      fs.Worker(directory, k, len(states)) for k in range(len(states))
    ]
    self.states = self._all(fs.Worker.start, self.workers, states)

  def step(self, *args):
    """Takes a step; each argument has a value for each worker."""
    new = list(map(self._step, self.states, *args))
    call = map if self._in_turn else self._all
    self.states = list(call(fs.Worker.commit, self.workers, new))

  def settle(self):
    """Returns the states with the newest center."""
    return self._all(fs.Worker.settle, self.workers, self.states)

  def finish(self):
    self.states = self._all(fs.Worker.finish, self.workers, self.states)
    return self.states

  def _all(self, fn, *args):
    return list(self._pool.map(fn, *args))

  def __enter__(self):
    return self

  def __exit__(self, *args):
    for worker in self.workers:
      worker.close()
    self._pool.shutdown()
