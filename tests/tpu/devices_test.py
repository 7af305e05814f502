"""Strategies and states on named topologies: devices of the TPU compiler."""

import os
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs
from flaxshard.partitioning import mesh as mesh_lib

P = jax.sharding.PartitionSpec
Shape = jax.ShapeDtypeStruct

pytestmark = pytest.mark.tpu

RULES = [("kernel", P(None, "model")), (".*", P())]
ON_CPU = fs.Strategy(mesh_shape={"replica": 4, "model": 2})


def strategy_of(name="v5e:2x4"):
  return fs.Strategy(name, mesh_shape={"replica": -1, "model": 2})


def create(strategy, **options):
  return fs.create_train_state(
    nn.Dense(8),
    jax.random.key(0),
    jnp.ones((1, 16)),
    optax.adam(1e-3),
    strategy=strategy,
    **options,
  )


def facts(tree):
  """Returns the facts of abstract arrays."""
  paths = jax.tree_util.tree_leaves_with_path(tree)
  return [(p, x.shape, x.dtype, x.sharding.spec) for p, x in paths]


def is_abstract(tree):
  return all(isinstance(x, Shape) for x in jax.tree.leaves(tree))


# -- Topologies and meshes.


@pytest.mark.parametrize(
  ("name", "shape", "tasks", "num_slices"),
  [
    ("v2:2x2", (2, 2, 1, 2), 1, 1),
    ("v4:4x4x2", (4, 4, 2, 1), 8, 1),
    ("v5e:1x1", (1, 1, 1, 1), 1, 1),
    ("2*v5e:4x8", (4, 8, 2, 1), 16, 2),
    ("v5p:16x20x28", (16, 20, 28, 1), 2240, 1),
    ("v6e:16x16", (16, 16, 1, 1), 64, 1),
    ("2*tpu7x:2x2x1", (2, 2, 2, 2), 2, 2),
  ],
)
def test_named_topologies(name, shape, tasks, num_slices):
  topology = fs.Topology.named(name)
  assert topology.mesh_shape == shape and topology.num_tasks == tasks
  assert topology.num_slices == num_slices
  same = fs.Topology.named(f" {name.upper()} ")
  assert same.devices.tolist() == topology.devices.tolist()


def test_forms_of_the_first_argument():
  topology = fs.Topology.named("v4:2x2x2")
  build = fs.DeviceAssignment.build
  assignment = build(topology, [2, 2, 1, 1], num_replicas=2)
  for argument in ("v4:2x2x2", topology, assignment):
    strategy = fs.Strategy(argument, mesh_shape={"replica": 2, "model": 4})
    assert strategy.mesh.devices.shape == (2, 4)
    assert set(strategy.mesh.devices.flat) == set(topology.devices.flat)
    is_assignment = argument is assignment
    assert (strategy.device_assignment is not None) == is_assignment


def test_large_torus():
  # JAX's mesh_utils finds no assignment of the axes of this one.
  mesh = strategy_of("v5p:16x20x28").mesh
  assert mesh.devices.shape == (4480, 2)
  first, second = mesh.devices[0]
  assert (first.coords, second.coords) == ([0, 0, 0], [1, 0, 0])


def test_environment_is_as_before():
  before = dict(os.environ)
  fs.Topology.named("v6e:4x4")
  names = {"TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES"}
  assert names.isdisjoint(set(os.environ) - set(before))
  assert mesh_lib.is_compile_only(strategy_of().mesh)
  assert not mesh_lib.is_compile_only(ON_CPU.mesh)


def test_libtpu_writes_nothing_where_there_is_no_tpu():
  environment = {
    name: value
    for name, value in os.environ.items()
    if name != "JAX_PLATFORMS" and not name.startswith("TPU_")
  }
  result = subprocess.run(
    [sys.executable, "-c", "import flaxshard as fs; print(fs.Strategy())"],
    env=environment,
    capture_output=True,
    text=True,
    check=True,
  )
  assert "replica=" in result.stdout and not result.stderr


# -- States and batches.


@pytest.mark.parametrize(
  "wrappers", [[fs.CrossShard()], [fs.LossScale("dynamic"), fs.AGN(16)]]
)
def test_abstract_state_is_like_that_on_devices(wrappers):
  state = create(strategy_of(), wrappers=wrappers, rules=RULES)
  assert is_abstract(state)
  assert state.params["kernel"].sharding.mesh == strategy_of().mesh
  assert facts(state) == facts(create(ON_CPU, wrappers=wrappers, rules=RULES))


@pytest.mark.parametrize("w", [np.ones(3), 2.0, Shape((2,), jnp.float32)])
def test_train_state_create(w):
  state = fs.TrainState.create(
    apply_fn=None,
    params={"w": w},
    tx=optax.adam(1.0),
    wrappers=[fs.AGN(3)],
    strategy=strategy_of(),
    batch_stats={"mean": w},
  )
  assert is_abstract(state)
  shape, dtype = np.shape(w), jnp.result_type(w)
  (adam, *_) = state.opt_state
  for x in (state.params["w"], state.batch_stats["mean"], adam.mu["w"]):
    assert (x.shape, x.dtype, x.sharding.spec) == (shape, dtype, P())


def test_abstract_batches():
  strategy = strategy_of("2*v5e:2x2")
  batch = {"x": Shape((10, 3), jnp.float64), "y": Shape((10,), np.int64)}
  out = next(iter(strategy.distribute_dataset([batch])))
  # Padded to a multiple of four replicas, in the dtypes of the device.
  assert {k: (x.shape, str(x.dtype)) for k, x in out.items()} == {
    "x": ((12, 3), "float32"),
    "y": ((12,), "int32"),
    "mask": ((12,), "bool"),
  }
  assert out["x"].sharding == jax.NamedSharding(strategy.mesh, P("replica"))
  x = {"x": Shape((5, 8), jnp.float32)}
  stacked = strategy.shard_batch(x, P(None, "replica"))["x"]
  assert stacked.sharding.shard_shape((5, 8)) == (5, 2)


# -- Mistakes.


def test_invalid_names():
  for name, words in (("v9:2x2", "TPU v9"), ("v5e:3x3", "divisible")):
    with pytest.raises(ValueError, match=f"topology='{name}'.*{words}"):
      fs.Topology.named(name)


def run_steps(strategy):
  step = lambda state, x: state.minimize(lambda p: (x @ p["kernel"]).mean())
  strategy.run_steps(step, create(strategy), [np.ones((4, 16))])


FOUR = fs.PerReplica(np.ones((4, 1)))


@pytest.mark.parametrize(
  ("call", "words"),
  [
    (lambda s: s.jit(jnp.sin)(1.0), "run"),
    (run_steps, "run"),
    (lambda s: s.reduce("sum", FOUR), "reduce"),
    (lambda s: s.gather(FOUR, 0), "gather"),
    (lambda s: s.local_results(FOUR), "local_results"),
    (
      lambda s: s.distribute_values_from_function(lambda context: 1),
      "distribute_values_from_function",
    ),
    (lambda s: s.shard_batch({"x": np.ones(8)}), "batch"),
    (lambda s: s.split_to_logical_devices(np.ones(4), [2]), "split_to"),
    (lambda s: s.replicate_to_logical_devices(np.ones(4)), "replicate_to"),
    (lambda s: s.assign_to_logical_device(1.0, 1), "on_logical_device"),
    (lambda s: s.on_logical_device(1, jnp.sin, 1.0), "on_logical_device"),
  ],
)
def test_what_would_run_raises(call, words):
  with pytest.raises(ValueError, match=f"{words}.*TPU v5 lite.*compiling"):
    call(strategy_of())


def test_restore_raises(tmp_path):
  with fs.Checkpointer(tmp_path / "checkpoints") as checkpointer:
    checkpointer.save(1, create(ON_CPU))
    with pytest.raises(ValueError, match=r"restore.*TPU v5 lite"):
      checkpointer.restore(create(strategy_of()))
