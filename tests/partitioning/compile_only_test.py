"""Strategies and states on devices that exist for compiling alone."""

from collections.abc import Callable
import os
import pickle
from typing import Any

from flax import nnx
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

_RULES = [("kernel", P(None, "model")), (".*", P())]


@pytest.fixture(autouse=True)
def without_libtpu(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(compile_only, "has_libtpu", lambda: False)


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


def _step(state: fs.TrainState, batch: Any) -> tuple[fs.TrainState, Any]:
  loss, grads = state.value_and_grad(
    lambda p: jnp.mean(state.apply_fn({"params": p}, batch["x"]) ** 2)
  )
  return state.apply_gradients(grads=grads), loss


def _is_abstract(tree: Any) -> bool:
  return all(isinstance(x, Shape) for x in jax.tree.leaves(tree))


# -- Topologies and meshes.


def test_topology_has_a_name() -> None:
  topology = fs.Topology.named("v5e:4x4", num_slices=2)
  assert topology.name == "2*v5e:4x4"
  assert topology.mesh_shape == (4, 4, 2, 1) and topology.num_slices == 2
  assert topology.num_tasks == 8 and topology.num_tpus_per_task == 4
  assert fs.Topology.from_devices(jax.devices()).name is None
  part = fs.Topology.from_devices(topology.devices[:1].ravel())
  assert part.name == "v5e:2x2"


def test_equal_names_have_equal_meshes() -> None:
  assert _strategy().mesh == _strategy(" V5E:2x4").mesh


def test_devices_are_not_pickled() -> None:
  # They would be other devices, over which meshes are not equal.
  with pytest.raises(TypeError, match="from its name"):
    pickle.dumps(fs.Topology.named("v5e:2x4"))


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


@pytest.mark.parametrize(
  ("arguments", "error", "part"),
  [
    (dict(device_assignment="v5e-8"), ValueError, "v5e:2x4"),
    (dict(device_assignment=8), TypeError, "'v5e:2x4'"),
    (
      dict(device_assignment="v5e:2x2", devices=jax.devices()),
      ValueError,
      "devices must be None",
    ),
    (
      dict(device_assignment=fs.Topology((2, 2, 1, 1))),
      ValueError,
      "Topology.named",
    ),
  ],
)
def test_invalid_first_argument_raises(
  arguments: dict[str, Any], error: type[Exception], part: str
) -> None:
  with pytest.raises(error, match=part):
    fs.Strategy(**arguments)


def test_is_compile_only() -> None:
  assert compile_only.is_compile_only(_strategy().mesh)
  assert not compile_only.is_compile_only(fs.Strategy().mesh)
  assert not compile_only.is_compile_only(jax.devices()[0])


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
  numbers = [
    str(s.describe(x)).splitlines()[-1]
    for s, x in ((_strategy(), state), (on_cpu, expected))
  ]
  assert numbers[0] == numbers[1]


@pytest.mark.parametrize("kind", ["module", "function", "abstract"])
def test_nnx_models(kind: str) -> None:
  create = lambda rngs: nnx.Linear(16, 8, rngs=rngs)
  model = {
    "module": lambda: create(nnx.Rngs(0)),
    "function": lambda: create,
    "abstract": lambda: nnx.eval_shape(lambda: create(nnx.Rngs(0))),
  }[kind]()
  state = _state(_strategy(), model=model, rules=_RULES)
  assert _is_abstract(state) and state.params["kernel"].shape == (16, 8)


def test_precision_is_warned_of() -> None:
  with pytest.warns(UserWarning, match="float16"):
    _state(_strategy(), model=nn.Dense(8, dtype=jnp.float16))


@pytest.mark.parametrize(
  "w", [np.ones(3), 2.0, jnp.float32(1), Shape((2,), jnp.float32)]
)
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


def test_params_keep_their_sharding() -> None:
  strategy = _strategy()
  sharding = jax.NamedSharding(strategy.mesh, P("model"))
  state = fs.TrainState.create(
    apply_fn=None,
    params={"w": Shape((4,), jnp.float32, sharding=sharding)},
    tx=optax.adam(1.0),
    strategy=strategy,
  )
  assert state.params["w"].sharding.spec == P("model")
  assert state.opt_state[0].mu["w"].sharding.spec == P("model")


# -- Batches.


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
  with pytest.raises(ValueError, match="multiple of 4"):
    strategy.shard_batch(batch)


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


def test_abstract_batch_on_devices() -> None:
  strategy = fs.Strategy()
  batch = strategy.shard_batch({"x": Shape((16, 2), jnp.float32)})
  assert batch["x"].sharding == jax.NamedSharding(strategy.mesh, P("replica"))
  assert strategy.jit(lambda b: b["x"].sum()).lower(batch).as_text()


# -- Programs.


def test_lower_steps_and_loops() -> None:
  strategy = _strategy()
  state = _state(strategy, wrappers=[fs.LossScale("dynamic")], rules=_RULES)
  batch = strategy.shard_batch({"x": Shape((8, 16), jnp.float32)})
  loop = strategy.jit_steps(_step, reduce="mean", donate_state=True)
  lowered = [
    strategy.jit(_step, donate_argnums=0).lower(state, batch),
    jax.jit(_step, donate_argnums=0).lower(state, batch),
    loop.lower(state, [batch, batch]),
  ]
  for program in lowered:
    text = program.as_text()
    assert "num_partitions = 8" in text and "buffer_donor" in text
  assert "stablehlo.while" in lowered[2].as_text()
  _, loss = lowered[2].out_info
  assert loss.shape == ()


def test_lower_with_arrays_and_numbers() -> None:
  strategy = _strategy()
  lowered = strategy.jit(lambda x, y: x * y).lower(np.ones((8, 2)), 2.0)
  assert lowered.out_info.value.shape == (4, 8, 2)


def test_annotations_in_traces() -> None:
  strategy = _strategy()

  def annotate(x: jax.Array) -> jax.Array:
    x = strategy.split_to_logical_devices(x, [1, 2])
    x = strategy.assign_to_logical_device(jnp.sin(x), 1)
    x = strategy.replicate_to_logical_devices(x)
    return strategy.on_logical_device(1, jnp.cos, x)

  x = strategy.shard_batch({"x": Shape((8, 4), jnp.float32)})["x"]
  for jitted in (jax.jit(annotate), strategy.jit(annotate)):
    assert "num_partitions = 8" in jitted.lower(x).as_text()


def test_lower_callbacks_and_host_memory() -> None:
  sharding = jax.NamedSharding(_strategy().mesh, P("replica"))

  def offload(x: jax.Array) -> jax.Array:
    jax.debug.print("{}", x)
    return jax.device_put(x, sharding.with_memory_kind("pinned_host"))

  x = Shape((8,), jnp.float32, sharding=sharding)
  assert sharding.memory_kind == "device"
  assert "pinned_host" in jax.jit(offload).lower(x).as_text()


@pytest.mark.parametrize("with_cache", [False, True])
def test_compiling_without_libtpu_names_the_extra(
  with_cache: bool, tmp_path: Any
) -> None:
  x = _strategy().shard_batch({"x": Shape((8,), jnp.float32)})["x"]
  lowered = jax.jit(lambda x: x + 1).lower(x)
  given = jax.config.jax_compilation_cache_dir
  jax.config.update(
    "jax_compilation_cache_dir", str(tmp_path) if with_cache else given
  )
  try:
    with pytest.raises(ValueError, match=r'pip install "flaxshard\[tpu\]"'):
      lowered.compile()
  finally:
    jax.config.update("jax_compilation_cache_dir", given)


def test_cost_of_a_lowered_program_is_unknown() -> None:
  x = _strategy().shard_batch({"x": Shape((8,), jnp.float32)})["x"]
  lowered = jax.jit(lambda x: x + 1).lower(x)
  if jax.__version_info__ >= (0, 12):
    assert lowered.cost_analysis() is None
  else:
    with pytest.raises(ValueError, match=r"flaxshard\[tpu\]"):
      lowered.cost_analysis()


_RUNS: dict[str, Callable[[fs.Strategy], Any]] = {
  "run": lambda s: s.run(jnp.sin, (1.0,)),
  "jit": lambda s: s.jit(jnp.sin)(1.0),
  "run_steps": lambda s: s.run_steps(_step, _state(s), [{"x": np.ones(4)}]),
  "reduce": lambda s: s.reduce("sum", fs.PerReplica(np.ones(4))),
  "gather": lambda s: s.gather(fs.PerReplica(np.ones((4, 1))), 0),
  "local_results": lambda s: s.local_results(fs.PerReplica(np.ones(4))),
  "distribute_values_from_function": (
    lambda s: s.distribute_values_from_function(lambda context: 1)
  ),
  "batch": lambda s: s.shard_batch({"x": np.ones(8)}),
  "sharding a batch": (
    lambda s: next(iter(s.distribute_dataset([{"x": np.ones(8)}])))
  ),
  "split_to": lambda s: s.split_to_logical_devices(np.ones(4), [2]),
  "replicate_to": lambda s: s.replicate_to_logical_devices(np.ones(4)),
  "assign_to": lambda s: s.assign_to_logical_device(np.ones(4), 1),
  "on_logical_device": lambda s: s.on_logical_device(1, jnp.sin, np.ones(4)),
}


@pytest.mark.parametrize("name", _RUNS)
def test_what_would_run_raises(name: str) -> None:
  where = {"jit": "run", "run_steps": "run"}.get(name, name)
  with pytest.raises(ValueError, match=f"{where}.*TPU v5 lite.*compiling"):
    _RUNS[name](_strategy())


@pytest.mark.parametrize("last", [False, True])
def test_putting_arrays_past_the_strategy_raises(last: bool) -> None:
  # Without devices that JAX takes for local it ends the process instead.
  devices = _strategy().mesh.devices.ravel()
  mesh = jax.sharding.Mesh(devices[-2:] if last else devices, ("x",))
  with pytest.raises(TypeError, match="Device"):
    jax.device_put(np.ones(8), jax.NamedSharding(mesh, P()))


def test_restore_raises(tmp_path: Any) -> None:
  with fs.Checkpointer(tmp_path / "checkpoints") as checkpointer:
    with pytest.raises(ValueError, match=r"restore.*TPU v5 lite"):
      checkpointer.restore(_state(_strategy()))


def test_environment_is_as_before() -> None:
  before = dict(os.environ)
  _strategy()
  assert dict(os.environ) == before
