"""Sequential commits with random faults, in virtual time.

`python -m tests.workers.center_random_test 0 1000` runs seeds 0 to 999.

Each commit adds one to an element of its own in the parameters of each cell. So
the parameters say which commits are in a center, and how often.
"""

import collections
import sys
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest

from flaxshard.workers import cell_backups
from flaxshard.workers import cell_store
from flaxshard.workers import cells as cells_lib
from flaxshard.workers import center as center_lib
from flaxshard.workers.messages import Message
from flaxshard.workers.peers import NotAMember
from flaxshard.workers.peers import PeerLost
from flaxshard.workers.peers import ViewChanged
from tests.workers.simulation import Faults
from tests.workers.simulation import Network
from tests.workers.simulation import Node
from tests.workers.simulation import Simulation

_SIZE = 400  # the most commits of a run
_DONE = 10_000  # a number of commits that no worker reaches


class FakeCenter(NamedTuple):
  """The parameters of all cells, by part."""

  commits: int
  params: list[np.ndarray]


class FakeCells:
  """Cells of one parameter, without an optimizer."""

  def __init__(self, num_parts, num_workers):
    del num_parts
    self.keys = {(k, (0,)): (str(k),) for k in range(num_workers)}
    self.quantized = {(0,): frozenset()}

  def of(self, fragments):
    del fragments
    return list(self.keys)

  def split(self, center):
    return {
      cell: {
        f"params/{cell[0]}": center.params[cell[0]],
        "opt_state/count": np.int32(0),
      }
      for cell in self.keys
    }

  def join(self, center, arrays):
    params = [x[f"params/{cell[0]}"] for cell, x in sorted(arrays.items())]
    return center._replace(params=params)

  def update(self, cell, arrays, commit):
    name = f"params/{cell[0]}"
    return {
      name: arrays[name] + commit[str(cell[0])],
      "opt_state/count": arrays["opt_state/count"] + 1,
    }


class Run:
  """One run: workers that commit, and what happens to them."""

  def __init__(self, seed, num_workers=None, num_commits=12, faults=12):
    self.simulation = Simulation(seed)
    self.rng = self.simulation.rng
    num_workers = num_workers or self.rng.choice([2, 3, 4])
    self.network = Network(self.simulation, num_workers)
    self.num_commits = num_commits
    self.nodes = {}
    self.done = set()
    self.number = 0
    self.counts = collections.Counter()
    self.faults = Faults(
      self.network,
      self.nodes,
      faults,
      lambda k: self.start_process(k, is_first=False),
      self.counts,
    )

  def start(self):
    for k in range(self.network.num_workers):
      self.start_process(k)
    self.simulation.spawn(self.faults.run)

  @property
  def is_finished(self):
    return not self.faults.left and all(
      node.incarnation in self.done
      for node in self.nodes.values()
      if node.is_alive
    )

  # -- A worker.

  def start_process(self, worker_id, is_first=True):
    node = Node(self.network, worker_id)
    # The commits of its center while it asks for another one, "busy" while it
    # takes one over, and None then.
    node.pulling = None if is_first else "busy"
    # What it begins with, as from an old checkpoint, if it comes later.
    commits = 0 if is_first else self.rng.choice([0, _DONE])
    zeros = [np.zeros(_SIZE) for _ in range(self.network.num_workers)]
    node.center = FakeCenter(commits, zeros)
    if is_first:
      self.network.add(node)
    self.nodes[worker_id] = node
    self.simulation.spawn(lambda: self.work(node, is_first), node)

  def work(self, node, is_first):
    center = center_lib.Center(
      node, self.network.num_workers, None, node.center
    )
    node.register("center", lambda sender, message: self.answer(node))
    node.start()
    node.adopt(self.network.view)
    pace = self.rng.choice([0.01, 0.05, 0.3])
    if is_first:
      center.begin(0)
    else:
      node.center = node.center._replace(commits=0)
      self.come_back(node, center)
    count = 0
    while count < self.num_commits:
      self.simulation.sleep(self.rng.expovariate(1 / pace))
      try:
        self.commit(node, center)
        count += 1
      except NotAMember:
        self.counts["excluded"] += 1
        self.come_back(node, center)
    while True:
      # Serves until the end, and comes back if it was excluded.
      if node.incarnation not in self.done:
        try:
          self.see(node, center.pull(node.center).params)
          self.done.add(node.incarnation)
        except NotAMember:
          pass
      self.simulation.sleep(0.2)
      if not node._knows(node.view, node.incarnation):
        self.come_back(node, center)

  def commit(self, node, center):
    index, self.number = self.number, self.number + 1
    one = np.zeros(_SIZE)
    one[index] = 1
    incarnation = node.incarnation
    updated = center.commit(
      (0,), {str(k): one for k in range(self.network.num_workers)}
    )
    if node.incarnation != incarnation:
      raise NotAMember
    params = [updated.params[str(k)] for k in range(self.network.num_workers)]
    for x in params:
      assert x[index] == 1, (node.incarnation, index, x[index])
    self.counts["commits"] += 1
    node.center = node.center._replace(commits=node.center.commits + 1)
    self.see(node, params)

  def see(self, node, params):
    """Checks what an owner has answered against what others have received."""
    for x in params:
      assert x.max(initial=0) <= 1, f"{node.incarnation}: applied twice"
    node.center = node.center._replace(params=params)
    if not node.is_member:
      return  # excluded, and does not know: it will receive another center
    for other in self.nodes.values():
      if not other.is_alive or not other.is_member:
        continue
      if other.pulling is not None:
        continue
      for part, (x, y) in enumerate(
        zip(params, other.center.params, strict=True)
      ):
        assert (x >= y).all() or (x <= y).all(), (
          f"part {part}: {node.incarnation} has not "
          f"{np.flatnonzero(x < y)} of {other.incarnation}, which has not "
          f"{np.flatnonzero(x > y)}"
        )
        if other is node:
          continue

  # -- Centers.

  def answer(self, node):
    center = node.center
    return Message(
      {
        "pulling": node.pulling,
        "commits": center.commits,
        "params": center.params,
        "source": node.incarnation,
      }
    )

  def come_back(self, node, center):
    """As `Session` does; the center of another worker, or its own."""
    while True:
      try:
        if not node._knows(node.view, node.incarnation):
          node.pulling = "busy"
          node.join()
        node.center = center.pull(self.find_center(node, center))
        self.see(node, node.center.params)
        node.pulling = None
        return
      except NotAMember:
        pass

  def find_center(self, node, center):
    """Returns a center to go on from, its own if that is the newest."""
    found = node.center
    while True:
      node.pulling = found.commits
      answer = self.ask(node, found.commits)
      node.pulling = "busy"
      if answer is None:
        self.counts["own center"] += 1
        center.begin(found.commits)
        return found
      fields = answer.fields
      found = FakeCenter(fields["commits"], fields["params"])
      center.reset(found)
      if node._knows(node.view, fields["source"]):
        return found
      center.retract()

  def ask(self, node, commits):
    """Returns the answer of a worker with a center; None if there is none."""
    while True:
      pulling = []
      view = node.view
      others = [k for k in view.worker_ids if k != node.worker_id]
      for k in others:
        try:
          answer = node.call(k, "center", Message())
        except (PeerLost, ViewChanged):
          break
        if answer.fields["pulling"] is None:
          return answer
        if answer.fields["pulling"] == "busy":
          break
        pulling.append((answer.fields["pulling"], -k))
      is_newest = (commits, -node.worker_id) > max(pulling, default=(-1, 0))
      if len(pulling) == len(others) and is_newest and node.view is view:
        return None
      self.simulation.sleep(0.05)


def run_seed(seed, **kwargs):
  run = Run(seed, **kwargs)
  simulation = run.simulation
  with (
    mock.patch.object(center_lib, "time", simulation),
    mock.patch.object(center_lib, "Background", simulation.Background),
    mock.patch.object(cell_backups, "Background", simulation.Background),
    mock.patch.object(cell_store, "threading", simulation),
    mock.patch.object(cells_lib, "Cells", FakeCells),
  ):
    run.start()
    simulation.run(lambda: run.is_finished, seconds=600.0)
  return run


def test_all_commits_are_in_the_center_without_faults():
  run = run_seed(1, num_workers=3, faults=0, num_commits=4)
  assert run.counts["commits"] == 12
  for node in run.nodes.values():
    for params in node.center.params:
      assert params.sum() >= 4 and params.max() == 1


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 150])
def test_commits_are_applied_once_with_random_faults(first):
  counts = collections.Counter()
  for seed in range(first, first + 50):
    counts += run_seed(seed).counts
  assert counts["commits"] > 1000 and counts["kill"] > 50


if __name__ == "__main__":
  total = collections.Counter()
  for number in range(int(sys.argv[1]), int(sys.argv[2])):
    try:
      total += run_seed(number).counts
    except BaseException as e:
      if not isinstance(e, Exception):
        raise
      print(f"seed {number}: {type(e).__name__}: {str(e)[:600]}", flush=True)
  print(dict(total))
