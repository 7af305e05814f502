"""Train steps in programs of the TPU compiler: traffic, memory and fusion."""

import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
import sparse_states
from tpu_programs import BATCH
from tpu_programs import create
from tpu_programs import PARAMS
from tpu_programs import strategy_of
from tpu_programs import train_step
from tpu_programs import WIDTH

import flaxshard as fs
from flaxshard import plans

P = jax.sharding.PartitionSpec
Shape = jax.ShapeDtypeStruct

pytestmark = pytest.mark.tpu

TENSOR_PARALLEL = [
  ("up/kernel", P(None, "model")),
  ("up/bias", P("model")),
  ("down/kernel", P("model", None)),
  (".*", P()),
]


def compile_step(strategy, way, state, batch, step=train_step):
  """Returns a program, and its collectives between devices."""
  if way == "run_steps":
    jitted = strategy.jit_steps(step, reduce="mean", donate_state=True)
    batch = [batch] * 3
  else:
    jit = strategy.jit if way == "run" else jax.jit
    jitted = jit(step, donate_argnums=0)
  program = jitted.lower(state, batch).compile()
  found = plans.collectives(program, strategy.mesh)
  return program, [c for c in found if c.group_size > 1]


def tensor_parallel(topology, way):
  """Returns a strategy of replicas of two devices, and a step's collectives."""
  strategy = strategy_of(topology, replica=-1, model=2)
  args = create(strategy, rules=TENSOR_PARALLEL)
  return strategy, compile_step(strategy, way, *args)[1]


def assert_updated_in_place(program, nbytes):
  """Asserts that all but the loss has the memory of the donated state."""
  memory = program.memory_analysis()
  assert memory.alias_size_in_bytes >= nbytes
  assert memory.output_size_in_bytes - memory.alias_size_in_bytes <= 1024


# -- Ways to run a step, and rules.


@pytest.mark.parametrize(
  ("way", "dtype"),
  [
    *((way, "float32") for way in ("run", "jit", "run_steps")),
    # Their sums are those of scaled gradients, in float32.
    *(("run", dtype) for dtype in ("float16", "bfloat16")),
  ],
)
def test_replicas_reduce_gradients_once_and_donate(way, dtype):
  strategy = strategy_of("v5e:2x2")
  args = create(strategy, [fs.LossScale("dynamic")], dtype=jnp.dtype(dtype))
  program, found = compile_step(strategy, way, *args)
  first, *others = sorted(found, key=lambda c: -c.operand_bytes)
  # The loop reduces the loss of the last step on its own.
  assert [c.operand_bytes for c in others] == [4] * (way == "run_steps")
  assert (first.kind, first.axes) == ("all-reduce", ("replica",))
  assert {x.dtype for x in first.operands} == {"f32"}
  assert first.executions == (3 if way == "run_steps" else 1)
  # The loss is reduced with the gradients in the global view.
  assert 0 <= first.operand_bytes - 4 * PARAMS <= 4
  # Parameters and two slots.
  assert_updated_in_place(program, 3 * 4 * PARAMS)


@pytest.mark.parametrize("topology", ["v5e:2x4", "v5p:2x2x2", "v6e:2x4"])
def test_run_moves_the_bytes_of_the_global_view(topology):
  strategy = strategy_of(topology)
  args = create(strategy, dtype=jnp.bfloat16)
  program, found = compile_step(strategy, "run", *args)
  reference, _ = compile_step(strategy, "jit", *args)
  moved, wanted = (
    x.cost_analysis()["bytes accessed"] for x in (program, reference)
  )
  assert moved <= 1.02 * wanted
  (all_reduce,) = found
  assert {x.dtype for x in all_reduce.operands} == {"bf16"}
  assert all_reduce.operand_bytes == 2 * PARAMS


# On v4 and v5p, libtpu 0.0.42 reduces these gradients whole, in one all-reduce.
@pytest.mark.parametrize("topology", ["v5e:2x4", "v6e:2x4"])
def test_fsdp_in_the_global_view(topology):
  strategy = strategy_of(topology)
  args = create(strategy, rules="fsdp")
  program, found = compile_step(strategy, "jit", *args)
  # Each kernel once, in the precision of the multiplication.
  gathered = [c for c in found if c.kind == "all-gather"]
  kernels = [c for c in gathered if [x.size for x in c.results] == [WIDTH**2]]
  assert [c.result_bytes for c in kernels] == [2 * WIDTH**2] * 2
  scattered = [c for c in found if c.kind == "reduce-scatter"]
  assert sum(c.operand_bytes for c in scattered) == 2 * 4 * WIDTH**2
  # An eighth of two kernels and their slots, with whole biases and the batch.
  size = program.memory_analysis().argument_size_in_bytes
  parts = 3 * 4 * 2 * (WIDTH**2 // 8 + WIDTH) + 2 * 4 * BATCH * WIDTH // 8
  assert 0 <= size - parts <= 4096


@pytest.mark.parametrize(
  ("topology", "way"),
  [("v5e:2x4", "jit"), ("v5e:2x4", "run"), ("v5p:2x2x1", "jit")],
)
def test_tensor_parallel_rules(topology, way):
  strategy, found = tensor_parallel(topology, way)
  assert [c.kind for c in found] == ["all-reduce"] * 2
  nbytes = {c.axes: c.operand_bytes for c in found}
  assert set(nbytes) == {("model",), ("replica",)}
  # Partial sums of the second layer's outputs; gradients of half the kernels.
  rows = BATCH // strategy.num_replicas_in_sync
  assert nbytes["model",] == rows * WIDTH * 4
  gradients = 4 * (WIDTH**2 + WIDTH // 2 + WIDTH)
  assert 0 <= nbytes["replica",] - gradients <= 4


@pytest.mark.parametrize(
  ("topology", "way"),
  [("2*v5e:2x2", "run"), ("2*v5e:2x2", "jit"), ("2*v5p:2x2x1", "jit")],
)
def test_slow_network_carries_gradients_alone(topology, way):
  _, found = tensor_parallel(topology, way)
  slow = [c for c in found if c.network == "dcn"]
  # One device of each slice, so none communicates inside of a replica.
  assert {c.group_size for c in slow} == {2}
  # Each device sends the half of its gradients that it has reduced in its
  # slice; the gradients of biases are not halved.
  gradients = 4 * (WIDTH**2 + 2 * WIDTH)
  assert sum(c.operand_bytes for c in slow) <= gradients / 2 + 4 * WIDTH + 4


@pytest.mark.parametrize(
  ("topology", "way"),
  [("v4:2x2x1", "run"), ("v5e:2x4", "jit"), ("v6e:2x2", "run")],
)
def test_split_images_exchange_halos_alone(topology, way):
  strategy = strategy_of(topology, replica=2, rows=-1)
  split = [1, strategy.num_logical_devices, 1, 1]

  def convolve(kernel, x):
    x = strategy.split_to_logical_devices(x, split)
    y = jax.lax.conv_general_dilated(
      x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return strategy.split_to_logical_devices(y, split)

  images = Shape((8, 32, 32, 16), jnp.bfloat16)
  x = strategy.shard_batch({"x": images}, P("replica", "rows"))["x"]
  replicated = jax.NamedSharding(strategy.mesh, P())
  kernel = Shape((3, 3, 16, 16), jnp.bfloat16, sharding=replicated)
  _, found = compile_step(strategy, way, kernel, x, convolve)
  # A row of 32 pixels with 16 channels, of four images, to either neighbor.
  assert [(c.kind, c.operand_bytes, c.axes, c.network) for c in found] == [
    ("collective-permute", 4 * 32 * 16 * 2, ("rows",), "ici")
  ] * 2


# -- Wrappers.


@pytest.mark.parametrize(
  ("topology", "groups", "size", "network"),
  [
    ("v6e:2x4", None, 8, "ici"),
    # Replicas 0 to 3 are on the first slice.
    ("2*v5e:2x2", [[0, 1, 2, 3], [4, 5, 6, 7]], 4, "ici"),
    ("2*v5e:2x2", [[0, 4], [1, 5], [2, 6], [3, 7]], 2, "dcn"),
  ],
)
def test_cross_shard_reduces_in_its_groups(topology, groups, size, network):
  strategy = strategy_of(topology)
  args = create(strategy, [fs.CrossShard(group_assignment=groups)])
  _, found = compile_step(strategy, "run", *args)
  assert {(c.kind, c.group_size, c.network) for c in found} == {
    ("all-reduce", size, network)
  }
  assert sum(c.operand_bytes for c in found) == 4 * PARAMS


@pytest.mark.parametrize(
  ("commit", "topology"),
  [
    ("sequential", "v5p:2x2x2"),
    ("sequential", "v6e:2x4"),
    ("mean", "v4:2x2x1"),
    ("sum", "v5p:2x2x1"),
  ],
)
def test_agn_communicates_in_commits_alone(commit, topology):
  strategy = strategy_of(topology)
  # So large that the parameters are exchanged one by one.
  args = create(strategy, [fs.AGN(16, commit=commit)], width=512)
  program, found = compile_step(strategy, "run", *args)
  assert found and all(c.in_conditional and c.in_commit for c in found)
  nbytes = 4 * 2 * (512 * 512 + 512)
  if commit == "sequential":
    assert program.memory_analysis().temp_size_in_bytes <= 3 * nbytes
  else:
    (all_reduce,) = found
    assert (all_reduce.kind, all_reduce.operand_bytes) == ("all-reduce", nbytes)


def compile_for_one_device(width, rows, dtype, tx, wrappers=(), **options):
  """Returns a compiled step of two kernels."""

  def loss_fn(params, x):
    for w in params:
      x = jax.nn.relu(x.astype(dtype) @ w.astype(dtype))
    return jnp.mean(jnp.square(x.astype(jnp.float32)))

  create = lambda: fs.TrainState.create(
    apply_fn=None,
    params=[jnp.zeros((width, width)) for _ in range(2)],
    tx=tx,
    wrappers=wrappers,
  )
  device = strategy_of("v5p:2x2x1").mesh.devices.flat[0]
  sharding = jax.sharding.SingleDeviceSharding(device)
  place = lambda x: Shape(x.shape, x.dtype, sharding=sharding)
  state = jax.tree.map(place, jax.eval_shape(create))
  batch = place(Shape((rows, width), jnp.float32))
  step = jax.jit(
    lambda state, x: state.minimize(loss_fn, x, **options), donate_argnums=0
  )
  return step.lower(state, batch).compile()


def test_dynamic_scale_takes_one_16_bit_copy_of_the_gradients():
  # In smaller programs more arrays lie in VMEM, where "bytes accessed" counts
  # every copy between VMEM and HBM too.
  of = functools.partial(
    compile_for_one_device, 4096, 1024, "float16", optax.adam(1e-3)
  )
  bare = of().memory_analysis()
  scaled = of([fs.LossScale("dynamic")]).memory_analysis()
  # The gradients are written once, in 16 bits.
  gradients = 4 * 2 * 4096**2
  assert scaled.temp_size_in_bytes <= 0.85 * gradients
  more = scaled.peak_memory_in_bytes - bare.peak_memory_in_bytes
  assert more <= 0.55 * gradients


@pytest.mark.parametrize(("mode", "fused"), [("none", 2), ("graph", 0)])
def test_updates_are_fused_with_gradients_only_without_a_barrier(mode, fused):
  program = compile_for_one_device(
    1024, 256, "float32", optax.sgd(0.1), gate_gradients=mode
  )
  computations = program.as_text().split("\n\n")
  assert fused == sum(
    bool(re.search(r" convolution\(.* add\(", computation, re.S))
    for computation in computations
    if not computation.startswith("ENTRY")
  )


# -- Row-sparse gradients.

ROWS, COLUMNS, IDS = 65_536, 128, 256
ROW = 4 * COLUMNS
# The rows of all eight devices.
GATHERED = 8 * IDS * ROW


@pytest.mark.parametrize(
  ("way", "mesh_shape", "spec", "parts"),
  [
    ("run", {}, P(), 1),
    ("run", {"replica": 4, "model": 2}, P("model", None), 2),
    ("jit", {}, P("replica", None), 8),
  ],
)
def test_ids_and_rows_are_exchanged_and_tables_stay(
  way, mesh_shape, spec, parts
):
  strategy = strategy_of("v5e:2x4", **mesh_shape)
  sharding = jax.sharding.NamedSharding(strategy.mesh, spec)
  state = fs.TrainState.create(
    apply_fn=None,
    params={
      "table": Shape((ROWS, COLUMNS), jnp.float32, sharding=sharding),
      "bias": Shape((COLUMNS,), jnp.float32),
    },
    tx=optax.adam(1e-3),
    wrappers=[fs.LossScale("dynamic")],
    sparse=["table"],
    strategy=strategy,
  )
  batch = strategy.shard_batch(
    {
      "ids": Shape((8 * IDS,), jnp.int32),
      "targets": Shape((8 * IDS, COLUMNS), jnp.float32),
    }
  )
  program, found = compile_step(
    strategy, way, state, batch, sparse_states.train_step
  )
  large = [c for c in found if c.result_bytes > 64 * 1024]
  whole = [c for c in large if c.kind == "all-gather"]
  # The rows of the gradient.
  assert [(c.axes, c.result_bytes) for c in whole] == [(("replica",), GATHERED)]
  # Devices with other rows look up rows for each other.
  looked_up = [c for c in large if c not in whole]
  assert len(looked_up) == (parts > 1)
  for c in looked_up:
    assert c.kind in ("all-reduce", "reduce-scatter") and c.axes == (spec[0],)
    assert c.operand_bytes <= GATHERED + ROW
  # The table and two slots.
  assert_updated_in_place(program, 3 * ROWS * ROW // parts)
  assert program.memory_analysis().temp_size_in_bytes <= 4 * GATHERED
