"""Ways to run a step, and rules, in programs of the TPU compiler."""

from typing import Any

import jax
import pytest
import tpu_programs
from tpu_programs import PARAMS
from tpu_programs import train_step

import flaxshard as fs

P = jax.sharding.PartitionSpec

pytestmark = pytest.mark.tpu

_TENSOR_PARALLEL = [
  ("up/kernel", P(None, "model")),
  ("up/bias", P("model")),
  ("down/kernel", P("model", None)),
  (".*", P()),
]


@pytest.mark.parametrize("way", ["run", "global view", "run_steps"])
def test_replicas_reduce_gradients_once_and_donate(way: str) -> None:
  strategy = tpu_programs.strategy_of("v5e:2x2")
  state, batch = tpu_programs.create(strategy, [fs.LossScale("dynamic")])
  lowered = {
    "run": lambda: strategy.jit(train_step, donate_argnums=0).lower(
      state, batch
    ),
    "global view": lambda: jax.jit(train_step, donate_argnums=0).lower(
      state, batch
    ),
    "run_steps": lambda: strategy.jit_steps(
      train_step, reduce="mean", donate_state=True
    ).lower(state, [batch] * 3),
  }[way]()
  program = lowered.compile()
  found, *others = sorted(
    tpu_programs.collectives(program, strategy), key=lambda c: -c.operand_bytes
  )
  # The loop reduces the loss of the last step on its own.
  assert [c.operand_bytes for c in others] == [4] * (way == "run_steps")
  assert (found.kind, found.axes) == ("all-reduce", ("replica",))
  assert found.executions == (3 if way == "run_steps" else 1)
  # The loss is reduced with the gradients in the global view.
  assert 0 <= found.operand_bytes - 4 * PARAMS <= 4
  memory = program.memory_analysis()
  # Parameters and two slots; the loss alone has memory of its own.
  assert memory.alias_size_in_bytes >= 3 * 4 * PARAMS
  assert memory.output_size_in_bytes - memory.alias_size_in_bytes <= 1024


# On v4 and v5p, libtpu 0.0.42 reduces these gradients whole, in one all-reduce.
@pytest.mark.parametrize("topology", ["v5e:2x4", "v6e:2x4"])
def test_fsdp_in_the_global_view(topology: str) -> None:
  strategy = tpu_programs.strategy_of(topology)
  state, batch = tpu_programs.create(strategy, rules="fsdp")
  jitted = jax.jit(train_step, donate_argnums=0)
  program = jitted.lower(state, batch).compile()
  found = tpu_programs.collectives(program, strategy)
  # Each kernel once, in the precision of the multiplication.
  gathered = [
    c for c in found if c.kind == "all-gather" and len(c.results) == 1
  ]
  kernels = [c for c in gathered if c.results[0].size == 256 * 256]
  assert [c.result_bytes for c in kernels] == [2 * 256 * 256] * 2
  scattered = [c for c in found if c.kind == "reduce-scatter"]
  assert sum(c.operand_bytes for c in scattered) == 2 * 4 * 256 * 256
  # An eighth of two kernels and their slots, with whole biases and the batch.
  size = program.memory_analysis().argument_size_in_bytes
  parts = 3 * 4 * 2 * (256 * 256 // 8 + 256) + 2 * 4 * 64 * 256 // 8
  assert 0 <= size - parts <= 4096


@pytest.mark.parametrize(
  ("topology", "in_run"),
  [("v5e:2x4", False), ("v5e:2x4", True), ("v5p:2x2x1", False)],
)
def test_tensor_parallel_rules(topology: str, in_run: bool) -> None:
  strategy = tpu_programs.strategy_of(topology, replica=-1, model=2)
  state, batch = tpu_programs.create(strategy, rules=_TENSOR_PARALLEL)
  jit: Any = strategy.jit if in_run else jax.jit
  program = jit(train_step, donate_argnums=0).lower(state, batch).compile()
  collectives = tpu_programs.collectives(program, strategy)
  assert [c.kind for c in collectives] == ["all-reduce"] * 2
  found = {c.axes: c for c in collectives}
  assert set(found) == {("model",), ("replica",)}
  # Partial sums of the second layer's outputs; gradients of half the kernels.
  rows = 64 // strategy.num_replicas_in_sync
  assert found["model",].operand_bytes == rows * 256 * 4
  gradients = 4 * (256 * 256 + 256 // 2 + 256)
  assert 0 <= found["replica",].operand_bytes - gradients <= 4


@pytest.mark.parametrize(
  ("topology", "in_run"),
  [("2*v5e:2x2", True), ("2*v5e:2x2", False), ("2*v5p:2x2x1", False)],
)
def test_slow_network_carries_gradients_alone(
  topology: str, in_run: bool
) -> None:
  strategy = tpu_programs.strategy_of(topology, replica=-1, model=2)
  state, batch = tpu_programs.create(strategy, rules=_TENSOR_PARALLEL)
  step: Any = (strategy.jit if in_run else jax.jit)(train_step)
  program = step.lower(state, batch).compile()
  found = tpu_programs.collectives(program, strategy)
  slow = [c for c in found if c.network == "dcn"]
  assert slow
  # One device of each slice, so none communicates inside of a replica.
  assert {c.group_size for c in slow} == {2}
  # Each device sends the half of its gradients that it has reduced in its
  # slice; the gradients of biases are not halved.
  gradients = 4 * (256 * 256 + 2 * 256)
  assert sum(c.operand_bytes for c in slow) <= gradients / 2 + 4 * 256 + 4
