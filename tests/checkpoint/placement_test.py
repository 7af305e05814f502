"""States on other meshes, and of other numbers of replicas of AGN."""

import dataclasses
import functools
import os
import pathlib
import subprocess
import sys

from agn_problem import strategy_of
import checkpoint_states as states
import compilations
import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain_states
import pytest
import quadratic_states
from tree_equality import assert_trees_equal

import flaxshard as fs

P = jax.sharding.PartitionSpec
TX = optax.adam(0.125)
MEAN = fs.AGN(3, commit="mean")


def create(replicas, model, wrappers=(states.SCALED,)):
  """Returns a state on a mesh, with the leaves that are easily spoiled."""
  strategy = fs.Strategy(
    devices=jax.devices()[: replicas * model],
    mesh_shape={"replica": replicas, "model": model},
  )
  put = lambda x, *spec: jax.device_put(
    x, jax.sharding.NamedSharding(strategy.mesh, P(*spec))
  )
  noise = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
  return fs.TrainState.create(
    apply_fn=None,
    tx=TX,
    wrappers=wrappers,
    strategy=strategy,
    params={
      "tensor": put(noise[:4], None, "model"),
      "fsdp": put(noise[4:].T, "replica"),
      "both": put(noise, "replica", "model"),
      "brain": put(noise[0].astype(jnp.bfloat16), "model"),
      "half": put(np.asarray([2.0**-24, 0.25] * 4, np.float16), "replica"),
      "empty": {},
    },
    batch_stats={},
    rngs={
      "dropout": jax.random.key(5, impl="rbg"),
      "each": put(jax.random.split(jax.random.key(6), 8), "replica"),
      "unsafe": jax.random.key(7, impl="unsafe_rbg"),
    },
    counters={
      "seen": np.int32(2**31 - 1),
      "small": np.asarray([-128, 127], np.int8),
      "mask": np.array([True, False]),
      "tiny": np.asarray([0.5, -448.0], jnp.float8_e4m3fn),
      "complex": np.complex64(1 + 2j),
      "none": {},
    },
  )


@jax.jit
def step(state):
  loss = lambda p: sum(
    jnp.sum(jnp.asarray(x, jnp.float32) ** 2) for x in jax.tree.leaves(p)
  )
  return state.minimize(loss)[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  """Returns the path of a saved state on 2x2 devices, and the state."""
  state = create(2, 2)
  taken = step(state)
  # The compiled step may choose other shardings.
  state = jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), taken, state)
  path = tmp_path_factory.mktemp("placement") / "checkpoints"
  states.write_ours(path, state)
  return path, state


@pytest.mark.parametrize(
  ("shape", "wrappers"),
  [
    pytest.param((2, 4), (states.SCALED, MEAN), marks=pytest.mark.slow),
    ((2, 2), ()),
    ((1, 1), (states.SCALED, MEAN)),
  ],
  ids=["other mesh", "no wrappers", "one device"],
)
def test_restores_on_another_mesh_and_back(saved, shape, wrappers, tmp_path):
  path, state = saved
  fresh = create(*shape, wrappers)
  # Into shapes and shardings alone, which have no values, and into arrays.
  restored = fs.checkpoint.restore(path, states.abstract(fresh))
  plain_states.assert_same_fields(restored, state)
  if wrappers:
    assert_trees_equal(
      restored.wrapper_states["loss_scale"], state.wrapper_states["loss_scale"]
    )
  states.assert_lies_like(restored, fresh)
  given = fs.checkpoint.restore(path, fresh)
  assert_trees_equal(given, restored)
  states.assert_lies_like(given, fresh)
  # Back on the first mesh.
  states.write_ours(tmp_path, restored)
  again = fs.checkpoint.restore(tmp_path, states.abstract(state))
  states.assert_lies_like(again, state)
  plain_states.assert_same_fields(again, state)
  if wrappers:
    # AGN's state too, of another number of replicas.
    other = create(2, 2, wrappers)
    moved = fs.checkpoint.restore(tmp_path, states.abstract(other))
    states.assert_lies_like(moved, other)
    local = moved.wrapper_states["agn"].local_params["tensor"]
    assert local.sharding.spec == P("replica", None, "model")
    np.testing.assert_array_equal(local, np.stack([state.params["tensor"]] * 2))


def test_unplaced_leaves_are_restored_on_the_mesh_of_the_others(tmp_path):
  # Only the parameters are sharded. The optimizer's count is restored as a
  # committed array, which must not be committed to the first device.
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("replica",))
  split = jax.sharding.NamedSharding(mesh, P("replica"))
  state = states.weights().replace(
    params={"w": jax.device_put(np.arange(16, dtype=np.float32), split)}
  )
  states.write_ours(tmp_path, state)
  restored = fs.checkpoint.restore(tmp_path, state)
  assert restored.params["w"].sharding == split
  for leaf in jax.tree.leaves(restored):
    assert len(leaf.devices()) == 2


def test_saving_whole_copies_compiles_nothing(tmp_path):
  state = states.weights(size=24, strategy=fs.Strategy())
  with compilations.count() as compiled:
    states.write_ours(tmp_path, state)
  assert compiled.total == 0
  restored = fs.checkpoint.restore(tmp_path, state)
  assert restored.params["w"].sharding == state.params["w"].sharding
  assert_trees_equal(restored, state)


def test_fresh_leaves_share_no_memory_with_those_that_were_read(saved):
  path, state = saved
  fresh = create(2, 2, (states.SCALED, fs.EMA(0.5)))
  given = fs.checkpoint.restore(path, states.abstract(fresh))
  donating_step = jax.jit(step.__wrapped__, donate_argnums=0)
  assert int(donating_step(given).step) == int(state.step) + 1


# AGN: exact resume, and other numbers of replicas.

X = np.random.default_rng(0).normal(size=(8, 8, 2)).astype(np.float32)


NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)
OUTER = fs.AGN(3, commit="mean", commit_delta=True, outer_tx=NESTEROV)


def create_linear(replicas, *wrappers, seed=0):
  w = np.random.default_rng(seed).normal(size=(2, 3)).astype("f")
  others = dict(
    strategy=strategy_of(replicas), stats={"mean": np.zeros(2, "f")}
  )
  return quadratic_states.create(wrappers, TX, {"w": w}, **others)


def train_step(state, x):
  loss_fn = lambda p: ((x @ p["w"] - 1.0) ** 2).mean()
  _, grads = state.value_and_grad(loss_fn)
  stats = {"mean": state.stats["mean"] + x.mean(0)}
  return state.apply_gradients(grads=grads, stats=stats)


@functools.cache
def compiled(replicas):
  return strategy_of(replicas).jit(train_step)


def trained(state, replicas, steps):
  for x in X[:steps]:
    state = compiled(replicas)(state, strategy_of(replicas).shard_batch(x))
  return state


def after_seven(*wrappers):
  """Two commits of four replicas, and one more step."""
  return trained(create_linear(4, *wrappers), 4, 7)


def assert_begins_at_center(state, replicas, *, count, local_step, commits):
  """Every replica of AGN is where `state` is, and has accumulated nothing."""
  agn = state.wrapper_states["agn"]
  adam, center = agn.local_opt_state[0], state.opt_state[0]
  for own, one in (
    (agn.local_params, state.params),
    ((adam.mu, adam.nu), (center.mu, center.nu)),
    (agn.grad_accum, jax.tree.map(np.zeros_like, state.params)),
    (agn.collections["stats"], state.stats),
  ):
    spread = lambda x: np.broadcast_to(x, (replicas, *x.shape))
    assert_trees_equal(own, jax.tree.map(spread, jax.device_get(one)))
  assert adam.count.tolist() == [count] * replicas
  assert (int(agn.local_step), int(agn.commits)) == (local_step, commits)


def test_resuming_in_mid_period_is_exact(tmp_path, caplog):
  state = after_seven(states.SCALED, OUTER)
  agn = state.wrapper_states["agn"]
  assert (int(agn.local_step), int(agn.commits)) == (7, 2)
  for tree in (agn.local_params, agn.grad_accum, agn.collections):
    last = np.asarray(jax.tree.leaves(tree)[-1])
    assert not (last[0] == last[1]).any()  # the replicas differ
  states.write_ours(tmp_path, state)
  fresh = create_linear(4, states.SCALED, OUTER, seed=1)
  restored = fs.checkpoint.restore(tmp_path, fresh)
  assert_trees_equal(restored, state)
  states.assert_lies_like(restored, fresh)
  assert_trees_equal(trained(restored, 4, 3), trained(state, 4, 3))
  assert states.messages(caplog) == []


def test_restores_four_replicas_as_one_and_back(tmp_path, caplog):
  state = after_seven(states.SCALED, MEAN)
  states.write_ours(tmp_path, state)
  fresh = create_linear(1, states.SCALED, MEAN, seed=1)
  one = fs.checkpoint.restore(tmp_path, fresh)
  for field in ("step", "params", "opt_state", "stats"):
    assert_trees_equal(getattr(one, field), getattr(state, field))
  assert_begins_at_center(one, 1, count=7, local_step=6, commits=2)
  assert "shape (4, 2, 3), where (1, 2, 3) is" in states.messages(caplog)[0]
  one = trained(one, 1, 5)
  assert int(one.wrapper_states["agn"].commits) == 3
  states.write_ours(tmp_path / "one", one)
  fresh = states.abstract(create_linear(4, states.SCALED, MEAN))
  four = fs.checkpoint.restore(tmp_path / "one", fresh)
  states.assert_lies_like(four, fresh)
  assert_begins_at_center(four, 4, count=12, local_step=9, commits=3)


@dataclasses.dataclass(frozen=True)
class CountsPerReplica(fs.wrappers.Base):
  """Counts the steps of each replica; has no `restart`."""

  seed: int = 0
  name = "counts"

  def init(self, params, tx):
    return {"steps": jnp.zeros((), jnp.int32), "key": jax.random.key(self.seed)}

  def specs(self, state):
    return {"steps": P("replica"), "key": P()}


class Restarts(CountsPerReplica):
  def restart(self, state, target, saved):
    return saved


def test_wrapper_on_other_replicas_restarts_or_raises(tmp_path):
  state = create_linear(2, CountsPerReplica(seed=5))
  states.write_ours(tmp_path, state)
  fs.checkpoint.restore(tmp_path, state)
  words = r" .*'counts'.* `restart` .*: steps: shape \(2,\), .*\(1,\)"
  with pytest.raises(ValueError, match=f"/{plain_states.STEP}{words}"):
    fs.checkpoint.restore(tmp_path, create_linear(1, CountsPerReplica()))
  # It gets the replicated leaves, and the scalars of the first replica.
  one = fs.checkpoint.restore(tmp_path, create_linear(1, Restarts()))
  own = {"steps": jnp.zeros(1, jnp.int32), "key": jax.random.key(5)}
  assert_trees_equal(one.wrapper_states["counts"], own)


# Prints how much memory a restore takes at its peak beyond that before it.
_PROGRAM = """
import pathlib, sys
import jax
import numpy as np
import optax
import flaxshard as fs

directory, leaves, megabytes = sys.argv[1], *map(int, sys.argv[2:])
strategy = fs.Strategy()
sharding = jax.sharding.NamedSharding(strategy.mesh, jax.P("replica"))

def noise(i, megabytes):
  # It cannot be compressed.
  rng = np.random.default_rng(i)
  return rng.random((8, megabytes * 2**20 // 32), np.float32)

def saved(directory, megabytes):
  params = {str(i): noise(i, megabytes) for i in range(leaves)}
  state = fs.TrainState.create(
    apply_fn=None, params=jax.device_put(params, sharding), tx=optax.sgd(0.1),
    wrappers=[fs.LossScale("dynamic")], strategy=strategy)
  with fs.Checkpointer(directory) as checkpointer:
    checkpointer.save(1, state)
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
    state)

def peak():
  lines = pathlib.Path("/proc/self/status").read_text().splitlines()
  (line,) = [line for line in lines if line.startswith("VmHWM")]
  return int(line.split()[1]) / 1024

# What is imported and compiled once does not count.
fs.checkpoint.restore(directory + "/a", saved(directory + "/a", 1))
abstract = saved(directory + "/b", megabytes)
pathlib.Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
before = peak()
state = fs.checkpoint.restore(directory + "/b", abstract)
print(peak() - before)
for i in range(leaves):
  np.testing.assert_array_equal(state.params[str(i)], noise(i, megabytes))
"""


@pytest.mark.slow
@pytest.mark.skipif(
  not pathlib.Path("/proc/self/clear_refs").exists(), reason="needs Linux"
)
def test_restoring_needs_the_state_and_two_leaves(tmp_path):
  leaves, megabytes = 16, 16
  arguments = map(str, (tmp_path, leaves, megabytes))
  done = subprocess.run(
    [sys.executable, "-c", _PROGRAM, *arguments],
    capture_output=True,
    text=True,
    timeout=300,
    env={
      **os.environ,
      "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
      # glibc then returns the memory of large arrays at once.
      "MALLOC_MMAP_THRESHOLD_": "1000000",
    },
  )
  assert done.returncode == 0, done.stderr[-3000:]
  # One leaf is in memory twice more: as on disk, and as it was read. The memory
  # of a busy machine's threads comes on top.
  assert float(done.stdout) < (leaves + 6) * megabytes
