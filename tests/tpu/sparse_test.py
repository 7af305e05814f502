"""Steps with row-sparse gradients, in programs of the TPU compiler."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
import sparse_states
import tpu_programs

import flaxshard as fs

P = jax.sharding.PartitionSpec

pytestmark = pytest.mark.tpu

ROWS, WIDTH, IDS = 65_536, 128, 256
ROW = 4 * WIDTH
TABLE = ROWS * ROW
# The rows of all eight devices.
GATHERED = 8 * IDS * ROW


@pytest.mark.parametrize(
  ("way", "mesh_shape", "spec"),
  [
    ("run", {}, P()),
    ("run", {"replica": 4, "model": 2}, P("model", None)),
    ("global view", {}, P("replica", None)),
  ],
)
def test_ids_and_rows_are_exchanged_and_tables_stay(
  way: str, mesh_shape: dict[str, int], spec: P
) -> None:
  strategy = tpu_programs.strategy_of("v5e:2x4", **mesh_shape)
  sharding = jax.sharding.NamedSharding(strategy.mesh, spec)
  shape = jax.ShapeDtypeStruct
  state = fs.TrainState.create(
    apply_fn=None,
    params={
      "table": shape((ROWS, WIDTH), jnp.float32, sharding=sharding),
      "bias": shape((WIDTH,), jnp.float32),
    },
    tx=optax.adam(1e-3),
    wrappers=[fs.LossScale("dynamic")],
    sparse=["table"],
    strategy=strategy,
  )
  batch: Any = strategy.shard_batch(
    {
      "ids": shape((8 * IDS,), jnp.int32),
      "targets": shape((8 * IDS, WIDTH), jnp.float32),
    }
  )
  jit = strategy.jit if way == "run" else jax.jit
  lowered = jit(sparse_states.train_step, donate_argnums=0).lower(state, batch)
  program = lowered.compile()
  found = tpu_programs.collectives(program, strategy)
  large = [c for c in found if c.result_bytes > 64 * 1024]
  whole = [c for c in large if c.kind == "all-gather"]
  # The rows of the gradient.
  assert [(c.axes, c.result_bytes) for c in whole] == [(("replica",), GATHERED)]
  # Devices with other rows look up rows for each other.
  looked_up = [c for c in large if c not in whole]
  if spec == P():
    assert not looked_up
  else:
    (found_rows,) = looked_up
    assert found_rows.kind in ("all-reduce", "reduce-scatter")
    assert found_rows.axes == (spec[0],)
    assert found_rows.operand_bytes <= GATHERED + ROW
  memory = program.memory_analysis()
  parts = 8 if spec == P("replica", None) else mesh_shape.get("model", 1)
  # The table and two slots are updated in place.
  assert memory.alias_size_in_bytes >= 3 * TABLE // parts
  assert memory.output_size_in_bytes - memory.alias_size_in_bytes <= 1024
  assert memory.temp_size_in_bytes <= 4 * GATHERED
