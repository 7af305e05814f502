"""Memory and traffic of replicas, by the TPU compiler."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
import tpu_programs
from tpu_programs import PARAMS

import flaxshard as fs

pytestmark = pytest.mark.tpu

WIDTH = 512
Shape = jax.ShapeDtypeStruct


class WideMLP(nn.Module):
  """Two layers, whose parameters AGN exchanges one by one."""

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    return nn.Dense(WIDTH)(nn.relu(nn.Dense(WIDTH)(x)))


def _create(
  strategy: fs.Strategy, model: nn.Module, wrappers: Sequence[Any] = ()
) -> tuple[Any, Any]:
  state = fs.create_train_state(
    model,
    jax.random.key(0),
    Shape((1, WIDTH), jnp.float32),
    optax.adam(1e-3),
    strategy=strategy,
    wrappers=wrappers,
  )
  x = Shape((64, WIDTH), jnp.float32)
  return state, strategy.shard_batch({"x": x, "y": x})


def _compile(strategy: fs.Strategy, step: Any, args: Any, way: str) -> Any:
  jit = {"run": strategy.jit, "global view": jax.jit}[way]
  return jit(step, donate_argnums=0).lower(*args).compile()


def _bytes_accessed(program: Any) -> float:
  return program.cost_analysis()["bytes accessed"]


@pytest.mark.parametrize("topology", ["v5e:2x4", "v5p:2x2x2", "v6e:2x4"])
def test_run_moves_the_bytes_of_the_global_view(topology: str) -> None:
  strategy = tpu_programs.strategy_of(topology)
  args = tpu_programs.create(strategy, dtype=jnp.bfloat16)
  program, reference = (
    _compile(strategy, tpu_programs.train_step, args, way)
    for way in ("run", "global view")
  )
  assert _bytes_accessed(program) <= 1.02 * _bytes_accessed(reference)
  (found,) = tpu_programs.collectives(program, strategy)
  assert {x.dtype for x in found.operands} == {"bf16"}
  assert found.operand_bytes == 2 * PARAMS


@pytest.mark.parametrize("topology", ["v5p:2x2x2", "v6e:2x4"])
def test_sequential_commits_take_three_copies_of_the_parameters(
  topology: str,
) -> None:
  strategy = tpu_programs.strategy_of(topology)
  args = _create(strategy, WideMLP(), [fs.AGN(16)])
  program = _compile(strategy, tpu_programs.train_step, args, "run")
  copy = 4 * 2 * (WIDTH * WIDTH + WIDTH)
  assert program.memory_analysis().temp_size_in_bytes <= 3 * copy
