"""Train steps with wrappers, in programs of the TPU compiler."""

from typing import Any

import jax.numpy as jnp
import pytest
import tpu_programs
from tpu_programs import PARAMS

import flaxshard as fs

pytestmark = pytest.mark.tpu


def _collectives(strategy: fs.Strategy, wrappers: list, **options: Any) -> list:
  state, batch = tpu_programs.create(strategy, wrappers, **options)
  step = strategy.jit(tpu_programs.train_step, donate_argnums=0)
  program = step.lower(state, batch).compile()
  return tpu_programs.collectives(program, strategy)


@pytest.mark.parametrize(
  ("topology", "groups", "size", "network"),
  [
    ("v6e:2x4", None, 8, "ici"),
    # Replicas 0 to 3 are on the first slice.
    ("2*v5e:2x2", [[0, 1, 2, 3], [4, 5, 6, 7]], 4, "ici"),
    ("2*v5e:2x2", [[0, 4], [1, 5], [2, 6], [3, 7]], 2, "dcn"),
  ],
)
def test_cross_shard_reduces_in_its_groups(
  topology: str, groups: list[list[int]] | None, size: int, network: str
) -> None:
  strategy = tpu_programs.strategy_of(topology)
  found = _collectives(strategy, [fs.CrossShard(group_assignment=groups)])
  assert {(c.kind, c.group_size, c.network) for c in found} == {
    ("all-reduce", size, network)
  }
  assert sum(c.operand_bytes for c in found) == 4 * PARAMS


@pytest.mark.parametrize(
  ("commit", "topology"),
  [("sequential", "v5e:2x4"), ("mean", "v4:2x2x1"), ("sum", "v5p:2x2x1")],
)
def test_agn_communicates_in_commits_alone(commit: str, topology: str) -> None:
  strategy = tpu_programs.strategy_of(topology)
  found = _collectives(strategy, [fs.AGN(16, commit=commit)])
  assert found and all(c.in_conditional and c.in_commit for c in found)
  if commit != "sequential":
    (all_reduce,) = found
    assert all_reduce.kind == "all-reduce"
    assert all_reduce.operand_bytes == 4 * PARAMS


@pytest.mark.parametrize(
  ("dtype", "topology"), [(jnp.float16, "v5e:2x2"), (jnp.bfloat16, "v6e:2x2")]
)
def test_loss_scaling_adds_no_collective(dtype: Any, topology: str) -> None:
  strategy = tpu_programs.strategy_of(topology)
  wrappers = [fs.LossScale("dynamic")]
  (found,) = _collectives(strategy, wrappers, dtype=dtype)
  assert found.kind == "all-reduce"
  assert {x.dtype for x in found.operands} == {"f32"}
  assert found.operand_bytes == 4 * PARAMS
