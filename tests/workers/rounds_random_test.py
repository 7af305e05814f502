"""Rounds with random deaths, exclusions, delays and stops, in virtual time.

`python -m tests.workers.rounds_random_test 0 1000` runs seeds 0 to 999.
"""

import collections
import functools
import sys
from unittest import mock

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs
from flaxshard.workers import round_owner
from flaxshard.workers import round_results
from flaxshard.workers import rounds as rounds_lib
from flaxshard.workers.messages import Message
from flaxshard.workers.parts import Layout
from flaxshard.workers.peers import NotAMember
from flaxshard.workers.peers import PeerLost
from flaxshard.workers.peers import ViewChanged
from tests.workers.simulation import Faults
from tests.workers.simulation import Network
from tests.workers.simulation import Node
from tests.workers.simulation import Simulation

_BITS = 5  # of the tag of each worker, in the sum of all


class Run:
  """One run: workers that commit, and what happens to them.

  A center is the list of the results that were applied, by index.
  """

  def __init__(self, seed, num_workers=None, num_rounds=12, faults=12):
    self.simulation = Simulation(seed)
    self.rng = self.simulation.rng
    num_workers = num_workers or self.rng.choice([2, 3, 4])
    self.network = Network(self.simulation, num_workers)
    self.num_rounds = num_rounds
    self.quorum = self.rng.choice([1, 1, 2])
    self.deadline = self.rng.choice([0.3, 1.0, 3.0])
    self.num_kept = self.rng.choice([2, 2, 4])
    self.nodes = {}
    self.done = set()
    self.numbers = collections.Counter()
    self.tags = collections.defaultdict(set)
    self.counts = collections.Counter()
    self.faults = Faults(
      self.network,
      self.nodes,
      faults,
      lambda k: self.start_process(k, is_first=False),
      self.counts,
      pairs=0.2,
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
    node.history, node.index, node.pulling = {}, 0, False
    if is_first:
      # All are there before the first round begins.
      self.network.add(node)
      node.pulling = False
    self.nodes[worker_id] = node
    self.simulation.spawn(lambda: self.work(node, is_first), node)

  def work(self, node, is_first):
    rounds = rounds_lib.Rounds(
      node,
      state(),
      self.quorum,
      self.deadline,
      self.num_kept,
      is_done=lambda incarnation: incarnation in self.done,
    )
    node.register("center", lambda sender, message: self.answer(node))
    node.start()
    node.adopt(self.network.view)
    is_member = is_first
    pace = self.rng.choice([0.01, 0.05, 0.3])
    if not is_first:
      self.pull(node, rounds, 0)
    while node.index < self.num_rounds:
      self.simulation.sleep(self.rng.expovariate(1 / pace))
      index = node.index + 1
      try:
        is_member = False
        self.commit(node, rounds, index)
        is_member = True
      except NotAMember:
        self.counts["excluded"] += 1
        self.pull(node, rounds, 0)
      except rounds_lib.Missed:
        self.counts["missed"] += 1
        self.pull(node, rounds, index)
    self.done.add(node.incarnation)
    while is_member or True:
      # Serves until the end, and comes back if it was excluded.
      self.simulation.sleep(0.2)
      if not node._knows(node.view, node.incarnation):
        self.pull(node, rounds, 0)
        self.done.add(node.incarnation)

  def commit(self, node, rounds, index):
    self.numbers[node.worker_id] += 1
    tag = self.numbers[node.worker_id] % ((1 << _BITS) - 1) + 1
    self.tags[node.worker_id, index].add(tag)
    value = np.float32(tag << (_BITS * node.worker_id))
    commit = {
      key: np.full(shape, value, np.float32)
      for section in layout(self.network.num_workers).sections
      for key, shape in section.shapes.items()
    }
    incarnation = node.incarnation
    reduced = rounds.reduce(index, (0,), commit)
    if node.incarnation != incarnation:
      raise NotAMember
    # The parts may be of other workers each.
    sums = reduced.arrays["w"].astype(np.int64)
    for k in range(self.network.num_workers):
      found = set(((sums >> (_BITS * k)) % (1 << _BITS)).tolist())
      assert found <= {0, *self.tags[k, index]}, (index, k, found)
      is_in = len(found) == 1 and 0 not in found
      assert is_in == (k in reduced.workers), (index, k, found, reduced)
      if k == node.worker_id and reduced.accepted:
        assert found == {tag}, (index, k, found, tag)
    self.counts["rounds"] += 1
    self.counts["accepted"] += reduced.accepted
    previous = node.history.get(index - 1, "")
    self.set_center(node, index, f"{previous} {sums.tolist()}")

  def set_center(self, node, index, center):
    node.index, node.history[index] = index, center
    if not node.is_member:
      return  # excluded, and did not know: it will pull another center
    for other in self.nodes.values():
      if other.is_alive and other.is_member and index in other.history:
        assert other.history[index] == center, (
          f"round {index}: workers {node.worker_id} and {other.worker_id} "
          f"differ: {center!r} {other.history[index]!r}"
        )

  # -- Centers.

  def answer(self, node):
    return Message(
      {
        "pulling": node.pulling,
        "index": node.index,
        "center": node.history.get(node.index, ""),
        "source": node.incarnation,
      }
    )

  def pull(self, node, rounds, least):
    """As `Session` does; the last center of the others, or its own."""
    node.pulling = True
    while True:
      if not node._knows(node.view, node.incarnation):
        node.history = {}
        node.join()
      try:
        answer = self.ask(node, least)
      except NotAMember:
        continue
      if answer is None:
        self.counts["own center"] += 1
        if least:
          node.history[least] = node.history.get(least - 1, "") + " void"
          node.index = least
        break
      index, center = answer.fields["index"], answer.fields["center"]
      rounds.reset(index)
      source = answer.fields["source"]
      if node._knows(node.view, source):
        node.history = {}
        self.set_center(node, index, center)
        break
    node.pulling = False

  def ask(self, node, least):
    """Returns the answer of a worker with a center; None if there is none."""
    while True:
      useless = []
      others = [k for k in node.view.worker_ids if k != node.worker_id]
      for k in others:
        try:
          answer = node.call(k, "center", Message())
        except (PeerLost, ViewChanged):
          break
        fields = answer.fields
        if not fields["pulling"] and fields["index"] >= least:
          return answer
        rank = fields["index"] if fields["pulling"] else -1
        useless.append((rank, -k))
      if len(useless) == len(others) and (node.index, -node.worker_id) > max(
        useless, default=(-1, 0)
      ):
        return None
      self.simulation.sleep(0.05)


@functools.cache
def state():
  return fs.TrainState.create(
    apply_fn=None,
    params={"w": jnp.zeros((12,))},
    tx=optax.sgd(0.1),
    wrappers=[fs.AGN(4, "sum", transport="host")],
  )


@functools.cache
def layout(num_workers):
  return Layout.of(state(), (0,), num_workers)


def run_seed(seed, **kwargs):
  run = Run(seed, **kwargs)
  simulation = run.simulation
  known = layout(run.network.num_workers)
  with (
    mock.patch.object(rounds_lib, "time", simulation),
    mock.patch.object(rounds_lib, "Background", simulation.Background),
    mock.patch.object(round_owner, "time", simulation),
    mock.patch.object(round_results, "threading", simulation),
    mock.patch.object(Layout, "of", lambda *args: known),
  ):
    run.start()
    simulation.run(lambda: run.is_finished, seconds=600.0)
  return run


@pytest.mark.slow
def test_all_are_in_every_round_without_faults():
  run = run_seed(1, num_workers=4, faults=0, num_rounds=4)
  assert run.counts["rounds"] == 16


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 150])
def test_workers_have_equal_centers_with_random_faults(first):
  counts = collections.Counter()
  for seed in range(first, first + 50):
    counts += run_seed(seed).counts
  assert counts["rounds"] > 1000 and counts["kill"] > 50
  assert counts["accepted"] > 0.7 * counts["rounds"]


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
