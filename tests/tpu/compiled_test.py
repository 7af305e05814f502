"""Buffers and memory errors of programs that the TPU compiler makes."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import tpu_programs

from flaxshard.compiled import buffers
from flaxshard.compiled import parse_memory_error

pytestmark = pytest.mark.tpu

P = jax.sharding.PartitionSpec
Shape = jax.ShapeDtypeStruct


def _place(topology: str, shape: tuple[int, ...], *spec: Any) -> Shape:
  mesh = tpu_programs.strategy_of(topology).mesh
  sharding = jax.NamedSharding(mesh, P(*spec))
  return Shape(shape, jnp.float32, sharding=sharding)


def _loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
  for w in params:
    x = jnp.tanh(x @ w)
  return (x**2).mean()


def test_live_buffers_add_up_to_the_compilers_peak() -> None:
  # The compiler's peak has VMEM, too; a v2 has little of it.
  params = [_place("v2:2x2", (512, 512))] * 3
  x = _place("v2:2x2", (32768, 512), "replica")
  compiled = jax.jit(jax.grad(_loss)).lower(params, x).compile()
  memory = compiled.memory_analysis()
  peak = buffers.peak_memory(compiled)
  assert peak.arguments == memory.argument_size_in_bytes
  total = peak.arguments + peak.outputs + peak.temporaries
  assert total == pytest.approx(memory.peak_memory_in_bytes, rel=0.01)
  assert peak.temporaries == pytest.approx(memory.temp_size_in_bytes, rel=0.05)
  kinds = {b.kind for b in peak.buffers}
  assert kinds == {"argument", "output", "temporary"}


def test_a_program_that_is_too_large_names_its_bytes() -> None:
  lowered = jax.jit(lambda x: x + 1).lower(_place("v5e:2x2", (65536, 65536)))
  with pytest.raises(jax.errors.JaxRuntimeError) as error:
    lowered.compile()
  shortage = parse_memory_error(error.value)
  # The argument and the result have 16 GiB each; v5e has 15.75 GiB.
  assert shortage.needed == pytest.approx(32 * 2**30, rel=0.01)
  assert shortage.available == 15.75 * 2**30
