"""Rounds of commits by mean and sum, over a network without connections."""

from concurrent import futures
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs
from flaxshard.state import host_commits
from flaxshard.workers.parts import Layout
from flaxshard.workers.peers import NotAMember
from flaxshard.workers.rounds import Missed
from flaxshard.workers.rounds import Rounds
from tests.workers.fake_peers import FakeNetwork

SHAPES = {"a": (7, 100), "b": (), "c": (300,)}


def create_state(**kwargs):
  return fs.TrainState.create(
    apply_fn=None,
    params={k: jnp.ones(shape) for k, shape in SHAPES.items()},
    tx=optax.sgd(0.1),
    wrappers=[fs.AGN(4, transport="host", **{"commit": "mean", **kwargs})],
  )


def create_commit(seed):
  rng = np.random.default_rng(seed)
  return {
    "@received": np.ones(len(SHAPES), np.float32),
    **{
      k: rng.normal(size=shape).astype(np.float32)
      for k, shape in SHAPES.items()
    },
  }


def create_rounds(network, worker_id, state, **kwargs):
  kwargs = {"quorum": 1, "deadline": 30.0, "num_kept": 2, **kwargs}
  return Rounds(network.join(worker_id), state, **kwargs)


def reduce_all(rounds, index, commits, pool):
  calls = {
    k: pool.submit(rounds[k].reduce, index, (0,), commit)
    for k, commit in commits.items()
  }
  return {k: call.result(timeout=20) for k, call in calls.items()}


@pytest.fixture
def pool():
  with futures.ThreadPoolExecutor(8) as executor:
    yield executor


@pytest.mark.parametrize("commit_dtype", [None, "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("op", ["mean", "sum"])
def test_all_workers_receive_the_same_and_nothing_is_lost(
  op, commit_dtype, pool
):
  state = create_state(commit=op, commit_dtype=commit_dtype)
  network = FakeNetwork(3)
  rounds = [create_rounds(network, k, state) for k in range(3)]
  total = {k: np.zeros(shape) for k, shape in SHAPES.items()}
  applied = {k: np.zeros(shape) for k, shape in SHAPES.items()}
  rests = [{} for _ in range(3)]
  weight = 3 if op == "mean" else 1
  for index in (1, 2, 3):
    commits = {k: create_commit(10 * index + k) for k in range(3)}
    for k, commit in commits.items():
      for key in SHAPES:
        x = commit[key]
        total[key] += x
        commit[key] = x + rests[k].get(key, np.float32(0))
    results = reduce_all(rounds, index, commits, pool)
    for k, result in results.items():
      assert result.workers == (0, 1, 2)
      jax.tree.map(
        np.testing.assert_array_equal, result.arrays, results[0].arrays
      )
      rests[k] = result.remainders
    for key in SHAPES:
      applied[key] += results[0].arrays[key].astype(np.float64) * weight
    if commit_dtype is None:
      assert not results[0].remainders
      plain = {k: sum(c[k] for c in commits.values()) for k in SHAPES}
      for key in SHAPES:
        np.testing.assert_allclose(
          results[0].arrays[key] * weight, plain[key], rtol=1e-5, atol=1e-5
        )
  for key, x in applied.items():
    left = sum(rest.get(key, 0) for rest in rests)
    np.testing.assert_allclose(x + left, total[key], rtol=1e-4, atol=1e-4)


def test_two_workers_give_the_bits_of_the_plain_mean(pool):
  state, network = create_state(), FakeNetwork(2)
  rounds = [create_rounds(network, k, state) for k in range(2)]
  commits = {k: create_commit(k) for k in range(2)}
  result = reduce_all(rounds, 1, commits, pool)[0]
  for key, x in result.arrays.items():
    np.testing.assert_array_equal(x, (commits[0][key] + commits[1][key]) / 2)


def test_bytes_of_int8_are_about_a_quarter(pool):
  part_bytes = {}
  for dtype in (None, "int8"):
    state, network = create_state(commit_dtype=dtype), FakeNetwork(2)
    layout = Layout.of(state, (0,), 2)
    rounds = [create_rounds(network, k, state) for k in range(2)]
    sent = received = 0
    for index in (1, 2, 3):
      commits = {k: create_commit(k) for k in range(2)}
      result = reduce_all(rounds, index, commits, pool)[0]
      sent += result.bytes_sent
      received += result.bytes_received
    part_bytes[dtype] = layout.part_bytes
    # An answer of the last round may be counted in the next one.
    for count in (sent, received):
      assert 5 * layout.part_bytes <= count <= 6 * layout.part_bytes
  assert 0.25 < part_bytes["int8"] / part_bytes[None] < 0.3


def test_a_round_closes_at_the_deadline_and_a_late_commit_gets_its_result(pool):
  state, network = create_state(), FakeNetwork(3)
  rounds = [create_rounds(network, k, state, deadline=0.2) for k in range(3)]
  commits = {k: create_commit(k) for k in range(3)}
  early = reduce_all(rounds, 1, {k: commits[k] for k in (0, 1)}, pool)
  late = rounds[2].reduce(1, (0,), commits[2])
  assert early[0].workers == early[1].workers == late.workers == (0, 1)
  jax.tree.map(np.testing.assert_array_equal, early[0].arrays, late.arrays)


def test_a_commit_that_is_too_late_is_missed(pool):
  state, network = create_state(), FakeNetwork(2)
  rounds = [create_rounds(network, k, state, deadline=0.05) for k in range(2)]
  for index in (1, 2, 3):
    rounds[0].reduce(index, (0,), create_commit(0))
  with pytest.raises(Missed):
    rounds[1].reduce(1, (0,), create_commit(1))


def test_no_round_closes_below_the_quorum(pool):
  state, network = create_state(), FakeNetwork(3)
  rounds = [
    create_rounds(network, k, state, deadline=0.1, quorum=2) for k in range(3)
  ]
  alone = pool.submit(rounds[0].reduce, 1, (0,), create_commit(0))
  with pytest.raises(futures.TimeoutError):
    alone.result(timeout=0.5)
  second = rounds[1].reduce(1, (0,), create_commit(1))
  assert alone.result(timeout=10).workers == second.workers == (0, 1)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_others_go_on_when_an_owner_dies_in_a_round(victim, pool):
  state, network = create_state(), FakeNetwork(3)
  rounds = [create_rounds(network, k, state) for k in range(3)]
  commits = {k: create_commit(k) for k in range(3) if k != victim}
  calls = {
    k: pool.submit(rounds[k].reduce, 1, (0,), c) for k, c in commits.items()
  }
  assert not futures.wait(calls.values(), 0.2).done
  network.kill(victim)
  results = [call.result(timeout=10) for call in calls.values()]
  assert results[0].workers == results[1].workers == tuple(commits)
  jax.tree.map(
    np.testing.assert_array_equal, results[0].arrays, results[1].arrays
  )


def test_a_new_owner_adopts_the_result_that_another_worker_has(pool):
  state, network = create_state(), FakeNetwork(3)
  # The round of owner 2 has two commits and a deadline.
  rounds = [
    create_rounds(network, k, state, deadline=0.1 if k == 2 else 30.0)
    for k in range(3)
  ]
  answered = threading.Event()
  peers = network.peers[2]
  plain = peers.handlers["commit_part"]

  def answer_only_worker_0(sender, message):
    if sender == 1:
      answered.wait(30)  # until this owner is dead
    return plain(sender, message)

  peers.handlers["commit_part"] = answer_only_worker_0
  commits = {k: create_commit(k) for k in range(3)}
  calls = [
    pool.submit(rounds[k].reduce, 1, (0,), commits[k]) for k in (0, 1, 2)
  ]
  first = calls[0].result(timeout=10)
  assert first.workers == (0, 2)
  network.kill(2)
  answered.set()
  second = calls[1].result(timeout=10)
  jax.tree.map(np.testing.assert_array_equal, first.arrays, second.arrays)


def test_a_worker_that_comes_back_takes_its_parts_over(pool):
  state, network = create_state(), FakeNetwork(2)
  rounds = {k: create_rounds(network, k, state) for k in range(2)}
  commits = {k: create_commit(k) for k in range(2)}
  first = reduce_all(rounds, 1, commits, pool)
  network.kill(1)
  alone = rounds[0].reduce(2, (0,), commits[0])
  assert alone.workers == (0,)
  rounds[1] = create_rounds(network, 1, state)
  # It may be asked for a round that is done.
  again = rounds[1].reduce(2, (0,), commits[1])
  jax.tree.map(np.testing.assert_array_equal, alone.arrays, again.arrays)
  third = reduce_all(rounds, 3, commits, pool)
  jax.tree.map(np.testing.assert_array_equal, first[0].arrays, third[1].arrays)


def test_others_go_on_when_two_owners_die_at_once(pool):
  state, network = create_state(), FakeNetwork(4)
  rounds = [create_rounds(network, k, state) for k in range(4)]
  calls = [
    pool.submit(rounds[k].reduce, 1, (0,), create_commit(k)) for k in (1, 2)
  ]
  assert not futures.wait(calls, 0.2).done
  network.kill(0, 3)
  first, second = (call.result(timeout=10) for call in calls)
  assert first.workers == second.workers == (1, 2)
  jax.tree.map(np.testing.assert_array_equal, first.arrays, second.arrays)


def test_a_round_waits_for_a_worker_that_joins_in_the_middle(pool):
  state, network = create_state(), FakeNetwork(2)
  rounds = [create_rounds(network, 0, state)]
  first = pool.submit(rounds[0].reduce, 1, (0,), create_commit(0))
  joined = create_rounds(network, 1, state).reduce(1, (0,), create_commit(1))
  result = first.result(timeout=10)
  jax.tree.map(np.testing.assert_array_equal, result.arrays, joined.arrays)


def test_a_commit_of_an_excluded_worker_ends_and_counts_once(pool):
  state, network = create_state(), FakeNetwork(3)
  rounds = [create_rounds(network, k, state) for k in range(3)]
  excluded = pool.submit(rounds[0].reduce, 1, (0,), create_commit(0))
  assert not futures.wait([excluded], 0.2).done
  network.kill(0)
  with pytest.raises(NotAMember):
    excluded.result(timeout=10)
  rounds[0] = create_rounds(network, 0, state)
  # Owners 1 and 2 still have the commit that it sent before.
  commits = {k: create_commit(10 + k) for k in range(3)}
  results = reduce_all(rounds, 1, commits, pool)
  for result in results.values():
    assert result.accepted and result.workers == (0, 1, 2)
    for key, x in result.arrays.items():
      mean = sum(c[key] for c in commits.values()) / np.float32(3)
      np.testing.assert_allclose(x, mean, rtol=1e-5, atol=1e-6)


def test_a_commit_is_missed_where_another_worker_is_ahead(pool):
  state, network = create_state(), FakeNetwork(3)
  rounds = [create_rounds(network, k, state, deadline=0.1) for k in range(3)]
  for index in (1, 2, 3, 4):
    reduce_all(rounds, index, {k: create_commit(k) for k in (0, 1)}, pool)
  # The new owner of part 1 is the slow worker itself, which knows no result.
  network.kill(1)
  with pytest.raises(Missed):
    rounds[2].reduce(1, (0,), create_commit(2))


def test_a_commit_is_missed_where_a_worker_has_joined_later(pool):
  state, network = create_state(), FakeNetwork(3)
  rounds = [create_rounds(network, k, state, deadline=0.1) for k in range(2)]
  reduce_all(rounds[:1], 1, {0: create_commit(0)}, pool)
  joined = create_rounds(network, 2, state)
  joined.reset(1)  # it has the center of worker 0
  network.kill(0)
  with pytest.raises(Missed):
    rounds[1].reduce(1, (0,), create_commit(1))


def test_other_workers_need_results_of_a_worker_that_has_another_center(pool):
  state, network = create_state(), FakeNetwork(2)
  rounds = [create_rounds(network, k, state, deadline=0.1) for k in range(2)]
  first = rounds[0].reduce(1, (0,), create_commit(0))
  rounds[1].reset(5)
  second = rounds[1].reduce(1, (0,), create_commit(1))
  assert not second.accepted
  jax.tree.map(np.testing.assert_array_equal, first.arrays, second.arrays)


@pytest.mark.slow
def test_an_answer_of_an_owner_that_has_come_back_since_is_not_used(pool):
  state, network = create_state(), FakeNetwork(3)
  rounds = [create_rounds(network, k, state, deadline=0.3) for k in range(3)]
  has_died, was_asked = threading.Event(), threading.Event()
  peers = network.peers[0]
  call = peers.call

  def die_after_the_answer(worker_id, method, message):
    answer = call(worker_id, method, message)
    is_commit = (worker_id, method) == (2, "commit_part")
    if is_commit and not has_died.is_set():
      assert answer.fields["workers"] == [0]
      network.kill(2)
      rounds[2] = create_rounds(network, 2, state, deadline=0.3)
      has_died.set()
      assert was_asked.wait(20)
    return answer

  def find(sender, message):
    answer = plain_find(sender, message)
    if sender == 2:
      assert answer.fields["status"] == "none"
      was_asked.set()
    return answer

  plain = network.peers[2].handlers["commit_part"]
  plain_find = peers.handlers["find_result"]

  def answer_only_worker_0(sender, message):
    if sender != 0:
      has_died.wait(20)
    return plain(sender, message)

  network.peers[2].handlers["commit_part"] = answer_only_worker_0
  peers.handlers["find_result"] = find
  peers.call = die_after_the_answer
  commits = {k: create_commit(k) for k in range(3)}
  calls = [
    pool.submit(r.reduce, 1, (0,), commits[k]) for k, r in enumerate(rounds)
  ]
  first, second = (call.result(timeout=20) for call in calls[:2])
  assert first.workers == second.workers
  jax.tree.map(np.testing.assert_array_equal, first.arrays, second.arrays)


def test_a_part_of_another_size_is_an_error():
  state = create_state()
  layout = Layout.of(state, (0,), 2)
  with pytest.raises(ValueError, match=f"{layout.part_bytes} bytes, got 8"):
    layout.decode(bytes(8))


def test_layout_divides_and_joins():
  state = create_state()
  layout, commit = Layout.of(state, (0,), 3), create_commit(0)
  joined = layout.from_vectors(layout.to_vectors(commit))
  jax.tree.map(np.testing.assert_array_equal, joined, commit)
  assert sorted(joined) == [
    "@received",
    *host_commits.parameter_keys(state, (0,)),
  ]
