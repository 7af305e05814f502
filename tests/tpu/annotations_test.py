"""Annotations of logical devices, in programs of the TPU compiler."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import tpu_programs

P = jax.sharding.PartitionSpec
Shape = jax.ShapeDtypeStruct

pytestmark = pytest.mark.tpu


@pytest.mark.parametrize(
  ("topology", "in_run"),
  [
    ("v4:2x2x1", True),
    ("v5e:2x4", True),
    ("v5e:2x4", False),
    ("v5p:2x2x1", False),
    ("v6e:2x2", True),
  ],
)
def test_split_images_exchange_halos_alone(topology: str, in_run: bool) -> None:
  strategy = tpu_programs.strategy_of(topology, replica=2, rows=-1)
  parts = strategy.num_logical_devices

  def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
    x = strategy.split_to_logical_devices(x, [1, parts, 1, 1])
    y = jax.lax.conv_general_dilated(
      x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return strategy.split_to_logical_devices(y, [1, parts, 1, 1])

  batch: Any = strategy.shard_batch(
    {"x": Shape((8, 32, 32, 16), jnp.bfloat16)}, P("replica", "rows")
  )
  replicated = jax.NamedSharding(strategy.mesh, P())
  kernel = Shape((3, 3, 16, 16), jnp.bfloat16, sharding=replicated)
  jitted = strategy.jit(convolve) if in_run else jax.jit(convolve)
  program = jitted.lower(batch["x"], kernel).compile()
  found = tpu_programs.collectives(program, strategy)
  # A row of 32 pixels with 16 channels, of four images, to either neighbor.
  assert [(c.kind, c.operand_bytes, c.axes, c.network) for c in found] == [
    ("collective-permute", 4 * 32 * 16 * 2, ("rows",), "ici")
  ] * 2
