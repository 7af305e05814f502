"""Strategies and states on named topologies: devices of the TPU compiler."""

from collections.abc import Callable
import os
import subprocess
import sys
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs
from flaxshard.partitioning import compile_only

P = jax.sharding.PartitionSpec
Shape = jax.ShapeDtypeStruct

pytestmark = pytest.mark.tpu

_RULES = [("kernel", P(None, "model")), (".*", P())]


def _strategy(name: str = "v5e:2x4") -> fs.Strategy:
  return fs.Strategy(name, mesh_shape={"replica": -1, "model": 2})


def _state(strategy: fs.Strategy, **options: Any) -> fs.TrainState:
  return fs.create_train_state(
    options.pop("model", nn.Dense(8)),
    jax.random.key(0),
    jnp.ones((1, 16)),
    optax.adam(1e-3),
    strategy=strategy,
    **options,
  )


def _is_abstract(tree: Any) -> bool:
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
def test_named_topologies(
  name: str, shape: tuple[int, ...], tasks: int, num_slices: int
) -> None:
  topology = fs.Topology.named(f" {name.upper()} ")

  assert topology.mesh_shape == shape and topology.num_tasks == tasks
  assert topology.num_slices == num_slices


def test_equal_names_have_equal_meshes() -> None:
  assert _strategy().mesh == _strategy(" V5E:2x4").mesh
  two, same = map(fs.Topology.named, ("2*v5e:4x4", "2*V5E:4x4"))
  assert two.devices.tolist() == same.devices.tolist()


@pytest.mark.parametrize(
  ("name", "facts"),
  [
    ("v9:2x2", "topology='v9:2x2'.*TPU v9"),
    ("v5e:3x3", "topology='v5e:3x3'.*divisible"),
  ],
)
def test_invalid_name_raises(name: str, facts: str) -> None:
  with pytest.raises(ValueError, match=facts):
    fs.Topology.named(name)


@pytest.mark.parametrize("form", ["name", "topology", "assignment"])
def test_forms_of_the_first_argument(form: str) -> None:
  topology = fs.Topology.named("v4:2x2x2")
  argument: Any = {
    "name": "v4:2x2x2",
    "topology": topology,
    "assignment": fs.DeviceAssignment.build(
      topology, [2, 2, 1, 1], num_replicas=2
    ),
  }[form]
  strategy = fs.Strategy(argument, mesh_shape={"replica": 2, "model": 4})
  assert strategy.mesh.devices.shape == (2, 4)
  assert set(strategy.mesh.devices.flat) == set(topology.devices.flat)
  is_assignment = form == "assignment"
  assert (strategy.device_assignment is not None) == is_assignment


def test_large_torus() -> None:
  # JAX's mesh_utils finds no assignment of the axes of this one.
  mesh = _strategy("v5p:16x20x28").mesh
  assert mesh.devices.shape == (4480, 2)
  first, second = mesh.devices[0]
  assert (first.coords, second.coords) == ([0, 0, 0], [1, 0, 0])


def test_environment_is_as_before() -> None:
  before = dict(os.environ)
  fs.Topology.named("v6e:4x4")
  names = {"TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES"}
  assert names.isdisjoint(set(os.environ) - set(before))
  assert compile_only.is_compile_only(_strategy().mesh)
  assert not compile_only.is_compile_only(fs.Strategy().mesh)


def test_libtpu_writes_nothing_where_there_is_no_tpu() -> None:
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


# -- States.


@pytest.mark.parametrize(
  "wrappers",
  [[fs.CrossShard()], [fs.LossScale("dynamic"), fs.AGN(16)]],
  ids=lambda w: "+".join(x.name for x in w),
)
def test_abstract_state_is_like_that_on_devices(wrappers: list) -> None:
  state = _state(_strategy(), wrappers=wrappers, rules=_RULES)
  on_cpu = fs.Strategy(mesh_shape={"replica": 4, "model": 2})
  expected = _state(on_cpu, wrappers=wrappers, rules=_RULES)
  assert _is_abstract(state)
  assert state.params["kernel"].sharding.mesh == _strategy().mesh

  def facts(tree: Any) -> list[Any]:
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return [(p, x.shape, x.dtype, x.sharding.spec) for p, x in paths]

  assert facts(state) == facts(expected)


@pytest.mark.parametrize("w", [np.ones(3), 2.0, Shape((2,), jnp.float32)])
def test_train_state_create(w: Any) -> None:
  state = fs.TrainState.create(
    apply_fn=None,
    params={"w": w},
    tx=optax.adam(1.0),
    wrappers=[fs.AGN(3)],
    strategy=_strategy(),
    batch_stats={"mean": w},
  )
  assert _is_abstract(state)
  shape, dtype = np.shape(w), jnp.result_type(w)
  (adam, *_) = state.opt_state
  for x in (state.params["w"], state.batch_stats["mean"], adam.mu["w"]):
    assert (x.shape, x.dtype, x.sharding.spec) == (shape, dtype, P())


# -- Batches and programs.


def test_abstract_batches() -> None:
  strategy = _strategy("2*v5e:2x2")
  batch = {"x": Shape((10, 3), jnp.float64), "y": Shape((10,), np.int64)}
  out = next(iter(strategy.distribute_dataset([batch])))
  # Padded to a multiple of four replicas, in the dtypes of the device.
  assert {k: (x.shape, str(x.dtype)) for k, x in out.items()} == {
    "x": ((12, 3), "float32"),
    "y": ((12,), "int32"),
    "mask": ((12,), "bool"),
  }
  assert out["x"].sharding == jax.NamedSharding(strategy.mesh, P("replica"))
  stacked = strategy.shard_batch(
    {"x": Shape((5, 8), jnp.float32)}, P(None, "replica")
  )
  assert stacked["x"].sharding.shard_shape((5, 8)) == (5, 2)


def test_one_input_pipeline_stands_for_all() -> None:
  # None of these devices has the process index of this process, 0.
  devices = fs.Topology.named("v5e:2x4").devices[1]
  strategy = fs.Strategy(devices=devices)
  contexts = []

  def create_dataset(context: Any) -> list[Any]:
    contexts.append((context.num_input_pipelines, context.input_pipeline_id))
    return [{"x": Shape((8, 2), jnp.float32)}]

  dataset = strategy.distribute_datasets_from_function(create_dataset)
  assert next(iter(dataset))["x"].shape == (8, 2)
  assert contexts == [(1, 0)]


def _step(state: fs.TrainState, batch: Any) -> tuple[fs.TrainState, Any]:
  return state.minimize(
    lambda p: jnp.mean(state.apply_fn({"params": p}, batch["x"]) ** 2)
  )


@pytest.mark.parametrize(
  ("where", "call"),
  [
    ("run", lambda s: s.jit(jnp.sin)(1.0)),
    ("run", lambda s: s.run_steps(_step, _state(s), [{"x": np.ones(4)}])),
    ("reduce", lambda s: s.reduce("sum", fs.PerReplica(np.ones(4)))),
    ("gather", lambda s: s.gather(fs.PerReplica(np.ones((4, 1))), 0)),
    ("local_results", lambda s: s.local_results(fs.PerReplica(np.ones(4)))),
    (
      "distribute_values_from_function",
      lambda s: s.distribute_values_from_function(lambda context: 1),
    ),
    ("batch", lambda s: s.shard_batch({"x": np.ones(8)})),
    ("split_to", lambda s: s.split_to_logical_devices(np.ones(4), [2])),
    ("replicate_to", lambda s: s.replicate_to_logical_devices(np.ones(4))),
    ("on_logical_device", lambda s: s.assign_to_logical_device(np.ones(4), 1)),
    ("on_logical_device", lambda s: s.on_logical_device(1, jnp.sin, 1.0)),
  ],
)
def test_what_would_run_raises(
  where: str, call: Callable[[fs.Strategy], Any]
) -> None:
  with pytest.raises(ValueError, match=f"{where}.*TPU v5 lite.*compiling"):
    call(_strategy())


def test_restore_raises(tmp_path: Any) -> None:
  state = _state(fs.Strategy(mesh_shape={"replica": 4, "model": 2}))
  with fs.Checkpointer(tmp_path / "checkpoints") as checkpointer:
    checkpointer.save(1, state)
    with pytest.raises(ValueError, match=r"restore.*TPU v5 lite"):
      checkpointer.restore(_state(_strategy()))
