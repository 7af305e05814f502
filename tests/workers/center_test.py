"""Sequential commits, over a network without connections."""

from concurrent import futures
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs
from flaxshard.core import trees
from flaxshard.state import host_commits
from flaxshard.workers.center import Center
from flaxshard.workers.messages import Message
from tests.workers.fake_peers import FakeNetwork

SHAPES = {"a": (7, 100), "b": (), "c": (300,), "d": (50,)}


def create_state(tx=None, **kwargs):
  return fs.TrainState.create(
    apply_fn=None,
    params={
      k: jnp.linspace(-1, 1, int(np.prod(shape))).reshape(shape)
      for k, shape in SHAPES.items()
    },
    tx=optax.adam(0.1) if tx is None else tx,
    wrappers=[fs.AGN(4, "sequential", transport="host", **kwargs)],
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


def create_center(network, worker_id, state, commit_dtype=None):
  center = host_commits.center_of(state)
  return Center(network.join(worker_id), state, commit_dtype, center)


def expected_center(state, commits):
  center = host_commits.center_of(state)
  update = jax.jit(host_commits.update_center, static_argnums=2)
  found = []
  for commit in commits:
    center = update(state, center, (0,), commit)
    found.append(center)
  return found


def assert_close(actual, wanted):
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6),
    dict(actual),
    dict(wanted),
  )


def without_keys(tree):
  return jax.tree.map(
    lambda x: jax.random.key_data(x) if trees.is_prng_key(x) else x, tree
  )


@pytest.fixture
def pool():
  with futures.ThreadPoolExecutor(8) as executor:
    yield executor


@pytest.mark.parametrize(
  "tx",
  [
    optax.adam(0.1),
    optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    # Has a PRNG key, which is in every part.
    pytest.param(optax.noisy_sgd(0.1, key=3), marks=pytest.mark.slow),
  ],
)
def test_commits_update_the_center_in_the_order_in_which_they_come(tx):
  state, network = create_state(tx), FakeNetwork(3)
  centers = [create_center(network, k, state) for k in range(3)]
  order = [0, 1, 2, 1, 1, 0, 2]
  commits = [create_commit(i) for i in range(len(order))]
  wanted = expected_center(state, commits)
  staleness = []
  for k, commit, center in zip(order, commits, wanted, strict=True):
    answer = centers[k].commit((0,), commit)
    assert_close(answer.params, center.params)
    staleness.append(answer.staleness)
  # Commits of others since the last one of the same worker.
  assert staleness == [0, 1, 2, 1, 0, 4, 3]
  pulled = centers[1].pull(host_commits.center_of(state))
  assert int(pulled.commits) == len(order)
  assert_close(pulled.params, wanted[-1].params)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6),
    without_keys(pulled.opt_state),
    without_keys(wanted[-1].opt_state),
  )


def test_nobody_waits_for_others():
  state, network = create_state(), FakeNetwork(2)
  centers = [create_center(network, k, state) for k in range(2)]
  for i in range(3):
    centers[0].commit((0,), create_commit(i))
  assert centers[1].commit((0,), create_commit(9)).staleness == 3


@pytest.mark.parametrize("commit_dtype", ["int8", "int4"])
def test_remainders_are_what_encoding_has_cut_off(commit_dtype):
  state = create_state(optax.sgd(1.0), commit_dtype=commit_dtype)
  network = FakeNetwork(2)
  centers = [create_center(network, k, state, commit_dtype) for k in range(2)]
  commit = create_commit(0)
  answer = centers[0].commit((0,), commit)
  for key, old in state.params.items():
    applied = 4 * (np.asarray(old) - answer.params[key])
    rest = answer.remainders.get(key, 0)
    np.testing.assert_allclose(applied + rest, commit[key], atol=1e-5)
  assert np.abs(answer.remainders["a"]).max() > 0


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_answered_commits_survive_the_death_of_their_owner(victim):
  state, network = create_state(), FakeNetwork(3)
  centers = [create_center(network, k, state) for k in range(3)]
  commits = [create_commit(i) for i in range(6)]
  order = [0, 1, 2, 0, 1, 2]
  wanted = expected_center(state, commits)
  for k, commit in zip(order[:3], commits[:3], strict=True):
    centers[k].commit((0,), commit)
    centers[k].wait_for_backup(10)
  others = [k for k in range(3) if k != victim]
  # Both have the newest parameters.
  assert_close(
    centers[others[0]].pull(host_commits.center_of(state)).params,
    wanted[2].params,
  )
  network.kill(victim)
  pulled = centers[others[1]].pull(host_commits.center_of(state))
  assert_close(pulled.params, wanted[2].params)
  answer = centers[others[0]].commit((0,), commits[3])
  assert answer.params["a"].shape == SHAPES["a"]
  assert np.isfinite(answer.params["a"]).all()


def test_slots_survive_an_owner_that_commits_nothing_itself():
  state, network = create_state(), FakeNetwork(2)
  centers = [create_center(network, k, state) for k in range(2)]
  commits = [create_commit(i) for i in range(12)]
  wanted = expected_center(state, commits)
  for commit in commits:
    centers[0].commit((0,), commit)
    time.sleep(0.02)  # so that a backup may end
  network.kill(1)
  pulled = centers[0].pull(host_commits.center_of(state))
  assert_close(pulled.params, wanted[-1].params)
  # Of the part that was the other's: at most four commits old.
  mu = pulled.opt_state[0].mu["c"]
  ages = [
    age
    for age, center in enumerate(reversed(wanted))
    if np.allclose(mu, center.opt_state[0].mu["c"], rtol=1e-5, atol=1e-6)
  ]
  assert len(ages) == 1 and ages[0] <= 4


def test_a_commit_that_is_sent_again_is_applied_once(pool):
  tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
  state, network = create_state(tx), FakeNetwork(3)
  centers = [create_center(network, k, state) for k in range(3)]
  commits = [create_commit(i) for i in range(3)]
  wanted = expected_center(state, commits)
  # The whole center has one owner, worker 0.
  peers, applied = network.peers[0], threading.Event()
  plain = peers.handlers["commit_cell"]

  def answer_nobody(sender, message):
    result = plain(sender, message)
    if sender == 1:
      # The owner has applied it, but dies before the answer is sent.
      applied.set()
      threading.Event().wait(5)
    return result

  peers.handlers["commit_cell"] = answer_nobody
  call = pool.submit(centers[1].commit, (0,), commits[0])
  assert applied.wait(10)
  # Worker 2 receives the parameters with the commit of worker 1.
  assert_close(centers[2].commit((0,), commits[1]).params, wanted[1].params)
  network.kill(0)
  assert_close(call.result(timeout=20).params, wanted[1].params)
  last = centers[2].commit((0,), commits[2])
  assert_close(last.params, wanted[2].params)


def test_a_worker_that_comes_back_owns_its_cells_again():
  state, network = create_state(), FakeNetwork(2)
  centers = [create_center(network, k, state) for k in range(2)]
  commits = [create_commit(i) for i in range(4)]
  wanted = expected_center(state, commits)
  for i in (0, 1):
    centers[i].commit((0,), commits[i])
    centers[i].wait_for_backup(10)
  centers[0].pull(host_commits.center_of(state))
  network.kill(1)
  centers[0].commit((0,), commits[2])
  centers[1] = create_center(network, 1, state)
  pulled = centers[1].pull(host_commits.center_of(state))
  assert_close(pulled.params, wanted[2].params)
  assert_close(centers[1].commit((0,), commits[3]).params, wanted[3].params)


def test_fragments_have_cells_of_their_own():
  state = create_state(fragments=2)
  network = FakeNetwork(2)
  centers = [create_center(network, k, state) for k in range(2)]
  commit = create_commit(0)
  for fragment in (0, 1):
    keys = host_commits.parameter_keys(state, (fragment,))
    part = {k: commit[k] for k in ("@received", *keys)}
    answer = centers[fragment].commit((fragment,), part)
    assert sorted(answer.params) == keys
  pulled = centers[0].pull(host_commits.center_of(state))
  assert_close(
    pulled.params, expected_center(create_state(), [commit])[0].params
  )
  assert [x.tolist() for x in pulled.fragment_counts.values()] == [[0, 0]]


def create_whole(network, count, state):
  """Returns centers of one cell, which belongs to the first worker."""
  return [create_center(network, k, state) for k in range(count)]


def clipped_state():
  return create_state(
    optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
  )


def record(network, worker_id, method, messages):
  """Keeps the messages that a handler gets."""
  handlers = network.peers[worker_id].handlers
  plain = handlers[method]

  def handle(sender, message):
    messages.append((sender, message))
    return plain(sender, message)

  handlers[method] = handle
  return plain


def test_a_message_that_comes_again_late_is_not_applied():
  state, network = clipped_state(), FakeNetwork(2)
  centers, messages = create_whole(network, 2, state), []
  plain = record(network, 0, "commit_cell", messages)
  commits = [create_commit(i) for i in range(3)]
  wanted = expected_center(state, commits)
  for commit in commits[:2]:
    centers[1].commit((0,), commit)
  plain(*messages[0])
  network.kill(1)
  centers[1] = create_center(network, 1, state)
  centers[1].commit((0,), commits[2])
  for message in messages:
    assert plain(*message).fields["status"] in ("moved", "done")
  pulled = centers[0].pull(host_commits.center_of(state))
  assert_close(pulled.params, wanted[2].params)


def test_an_answer_of_an_owner_that_has_come_back_since_does_not_count():
  state, network = clipped_state(), FakeNetwork(2)
  centers = create_whole(network, 2, state)
  peers, commit = network.peers[1], create_commit(0)
  plain = peers.call

  def call(worker_id, method, message, timeout=None):
    answer = plain(worker_id, method, message, timeout)
    if method == "commit_cell":
      peers.call = plain
      centers[0] = create_center(network, 0, state)
      centers[0].pull(host_commits.center_of(state))
    return answer

  peers.call = call
  wanted = expected_center(state, [commit])[0].params
  assert_close(centers[1].commit((0,), commit).params, wanted)
  pulled = centers[0].pull(host_commits.center_of(state))
  assert_close(pulled.params, wanted)


def test_a_backup_of_a_dead_owner_that_comes_late_is_not_kept():
  state, network = clipped_state(), FakeNetwork(3)
  centers, backups = create_whole(network, 3, state), []
  plain = network.peers[1].handlers["keep_backup"]

  def hold(sender, message):
    backups.append((sender, message))
    return Message({"status": "done"})

  network.peers[1].handlers["keep_backup"] = hold
  for i in (0, 1):
    centers[0].commit((0,), create_commit(i))
    centers[0].wait_for_backup(10)
  network.kill(0)
  commit = create_commit(2)
  wanted = expected_center(state, [commit])[0].params
  assert_close(centers[2].commit((0,), commit).params, wanted)
  assert plain(*backups[-1]).fields["status"] == "moved"
  centers[0] = create_center(network, 0, state)
  pulled = centers[0].pull(host_commits.center_of(state))
  assert_close(pulled.params, wanted)


def test_what_members_said_before_another_owner_is_asked_again():
  state, network = clipped_state(), FakeNetwork(3)
  centers = create_whole(network, 3, state)
  network.kill(0)
  peers, commits = network.peers[1], [create_commit(i) for i in range(2)]
  plain = peers.call

  def call(worker_id, method, message, timeout=None):
    answer = plain(worker_id, method, message, timeout)
    if method == "find_copy":
      peers.call = plain
      create_center(network, 0, state)
      centers[2].commit((0,), commits[0])
      network.kill(0)
    return answer

  peers.call = call
  answer = centers[1].commit((0,), commits[1])
  assert_close(answer.params, expected_center(state, commits)[1].params)


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_center_of_many_commits_is_not_newer_than_the_run(is_reset):
  state, network = create_state(), FakeNetwork(2)
  first = create_center(network, 1, state)
  first.begin(0)
  commits = [create_commit(i) for i in range(2)]
  wanted = expected_center(state, commits)
  first.commit((0,), commits[0])
  center = host_commits.center_of(state)
  old = center._replace(
    params=jax.tree.map(jnp.zeros_like, center.params),
    commits=jnp.array(1000),
  )
  late = Center(network.join(0), state, None, old)
  if is_reset:
    late.reset(old)
  assert_close(first.commit((0,), commits[1]).params, wanted[1].params)
  assert_close(late.pull(center).params, wanted[1].params)


def test_a_center_counts_from_the_beginning_and_not_before():
  state, network = clipped_state(), FakeNetwork(2)
  center = host_commits.center_of(state)
  zeros = jax.tree.map(jnp.zeros_like, center.params)
  old = center._replace(params=zeros, commits=jnp.array(1000))
  first = create_center(network, 1, state)
  late = Center(network.join(0), state, None, old)
  first.begin(0)
  # Another worker restores another checkpoint, and is not asked for it.
  assert_close(first.pull(center).params, center.params)
  # Here it was decided that the run goes on from it.
  late.begin(1000)
  assert_close(first.pull(center).params, zeros)


def test_a_worker_that_comes_back_alone_goes_on_from_what_it_had():
  state, network = create_state(optax.sgd(0.1)), FakeNetwork(2)
  centers = [create_center(network, k, state) for k in range(2)]
  commits = [create_commit(i) for i in range(5)]
  wanted = expected_center(state, commits)
  for i in range(4):
    centers[i % 2].commit((0,), commits[i])
    centers[i % 2].wait_for_backup(10)
  centers[1].pull(host_commits.center_of(state))
  peers = network.peers[1]
  network.kill(0, 1)
  network.rejoin(peers)
  centers[1].begin(2)
  pulled = centers[1].pull(host_commits.center_of(state))
  assert_close(pulled.params, wanted[3].params)
  answer = centers[1].commit((0,), commits[4])
  assert_close(answer.params, wanted[4].params)


class StatsState(fs.TrainState):
  batch_stats: dict


def test_collections_are_of_the_fragments_that_were_committed_last():
  state = StatsState.create(
    apply_fn=None,
    params={k: jnp.zeros(4) for k in "ab"},
    batch_stats={"mean": jnp.ones(())},
    tx=optax.sgd(1.0),
    wrappers=[fs.AGN(4, "sequential", transport="host", fragments=2)],
  )
  center = create_center(FakeNetwork(1), 0, state)
  for fragment, mean in ((1, 5.0), (0, 3.0), (1, 2.0)):
    center.commit(
      (fragment,),
      {
        "ab"[fragment]: np.ones(4, np.float32),
        "batch_stats/mean": np.float32(mean),
        "@received": np.ones(2, np.float32),
      },
    )
  pulled = center.pull(host_commits.center_of(state))
  assert float(pulled.collections["batch_stats/mean"]) == 2.0
