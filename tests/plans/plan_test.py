"""Plans of a step: its memory, its traffic, and mistakes."""

import collections
import json
import re
from unittest import mock

from flax import nnx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs
from flaxshard import plans
from flaxshard.plans import hlo

P = jax.P


class Model(nn.Module):
  """A dense layer with a collection."""

  @nn.compact
  def __call__(self, x):
    count = self.variable("counts", "calls", lambda: jnp.zeros((), jnp.int32))
    del count
    return nn.Dense(64)(x)


def loss_step(state, batch, scale=1.0):
  def loss_fn(params):
    variables = {"params": params, "counts": state.counts}
    y = state.apply_fn(variables, batch["x"])
    return scale * (y**2).mean()

  return state.minimize(loss_fn)


X = jax.ShapeDtypeStruct((16, 32), jnp.float32)


def create(strategy, model=None, **options):
  """Returns an abstract state and batch."""
  state = fs.create_train_state(
    model or Model(),
    jax.random.key(0),
    X,
    optax.adam(1e-3),
    strategy=strategy,
    abstract=True,
    **options,
  )
  return state, strategy.shard_batch({"x": X})


@pytest.fixture(scope="module")
def planned():
  """A plan on eight virtual CPU devices, with its strategy and state."""
  strategy = fs.Strategy()
  agn = fs.AGN(communication_period=4, commit="mean")
  state, batch = create(strategy, wrappers=[fs.LossScale("dynamic"), agn])
  return strategy, state, fs.plan(strategy.jit(loss_step), state, batch)


def test_state_bytes_are_those_of_describe(planned, capsys):
  strategy, state, plan = planned
  described = strategy.describe(state)
  capsys.readouterr()
  fields = plan.memory.state
  by_group = collections.Counter()
  for row in described.rows:
    by_group[row.group] += row.bytes_per_device
  in_wrappers = by_group.pop("wrapper_states")
  assert in_wrappers == fields["loss_scale"] + fields["agn"]
  assert by_group.items() <= fields.items()
  assert plan.memory.state_bytes == described.bytes_per_device
  # 32 x 64 weights and 64 biases, in float32.
  assert fields["params"] == 4 * (32 * 64 + 64)
  assert fields["counts"] == 4
  # Two rows of 32 floats.
  assert plan.memory.batch == 2 * 32 * 4


def test_peak_is_what_the_compiler_counts(planned):
  strategy, state, plan = planned
  memory = plan.memory
  batch = strategy.shard_batch({"x": X})
  compiled = strategy.jit(loss_step).lower(state, batch).compile()
  stats = compiled.memory_analysis()
  given = memory.state_bytes + memory.batch + memory.arguments
  # This backend adds nothing to a layout.
  assert memory.padding == 0
  assert given - memory.unused == stats.argument_size_in_bytes
  assert memory.temporaries == stats.temp_size_in_bytes
  assert memory.peak == (
    stats.argument_size_in_bytes
    + stats.output_size_in_bytes
    - stats.alias_size_in_bytes
    + stats.temp_size_in_bytes
    + stats.generated_code_size_in_bytes
  )
  assert memory.excess is None or memory.fits


def test_a_commit_counts_once_in_a_period(planned):
  plan = planned[2]
  assert plan.period == 4
  # LossScale's conditional, around AGN's, is entered in every step, and whether
  # all gradients are finite is reduced in every step.
  assert {(c.in_commit, c.executions_per_step(4)) for c in plan.traffic} == {
    (True, 0.25),
    (False, 1),
  }
  assert {c.in_conditional for c in plan.traffic if c.in_commit} == {True}
  others = [(c.kind, c.operand_bytes) for c in plan.traffic if not c.in_commit]
  assert others == [("all-reduce", 4)]
  # The mean of the gradients, in float32, is one all-reduce or several.
  sent = sum(
    c.payload_bytes * c.executions_per_step(plan.period)
    for c in plan.traffic
    if c.in_commit and c.kind == "all-reduce"
  )
  assert sent == pytest.approx(plan.memory.state["params"] / 4, rel=0.1)


def test_a_plan_is_text_and_json(planned):
  plan = planned[2]
  for fact in ("replica=8", "params", "loss_scale", "agn", "virtual CPU"):
    assert fact in str(plan)
  values = json.loads(json.dumps(plan.to_dict()))
  assert values["memory"]["state"] == plan.memory.state
  assert len(values["traffic"]) == len(plan.traffic)
  assert values["traffic"][0]["link_bytes"] == plan.traffic[0].link_bytes


def test_functions_and_jitted_steps_have_the_same_memory():
  strategy = fs.Strategy(devices=jax.devices()[:1])
  state, batch = create(strategy)
  donated = jax.jit(loss_step, donate_argnums=0)
  plain = fs.plan(loss_step, state, batch, 2.0)
  assert fs.plan(donated, state, batch, 2.0).memory == plain.memory
  kept = fs.plan(jax.jit(loss_step), state, batch, 2.0).memory
  # Without donation the new state is a further output.
  added = kept.outputs - plain.memory.outputs
  assert added == plain.memory.state_bytes


def test_nnx_models_have_plans():
  strategy = fs.Strategy(devices=jax.devices()[:1])
  model = lambda rngs: nnx.Linear(32, 64, rngs=rngs)
  state, batch = create(strategy, model)

  @nnx.jit
  def step(state, batch):
    apply = lambda params: state.apply_fn({"params": params}, batch["x"])
    return state.minimize(lambda params: apply(params).sum())

  memory = fs.plan(step, state, batch).memory
  assert memory.state["params"] == 4 * (32 * 64 + 64)
  assert memory.batch == 16 * 32 * 4


def test_arrays_are_split_as_the_step_says():
  mesh = fs.Strategy().mesh
  split = jax.sharding.NamedSharding(mesh, P("replica"))
  step = jax.jit(lambda w, x: w - x.sum(), in_shardings=split)
  w = jax.ShapeDtypeStruct((16, 4), jnp.float32)
  plan = fs.plan(step, w, w)
  memory = plan.memory
  assert plan.mesh == {"replica": 8}
  assert (memory.state, memory.batch, memory.padding) == ({"state": 32}, 32, 0)
  assert [c.kind for c in plan.traffic] == ["all-reduce"]


def test_arrays_that_are_not_read_are_subtracted():
  x = np.ones((4, 4), np.float32)
  memory = fs.plan(lambda s, b, unused: s + b[0, 0], x, x, x).memory
  assert (memory.state, memory.arguments) == ({"state": 64}, 64)
  assert memory.unused == 64


# The messages of libtpu 0.0.42 before and after it assigns memory.
TEMPORARIES = (
  "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for "
  "HLO temporaries (24.25G) exceeds available HBM (15.75G)."
)
USED = (
  "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in "
  "memory space hbm. Used 24.25G of 15.75G hbm. Exceeded hbm capacity by 8.50G."
)


@pytest.mark.parametrize("message", [TEMPORARIES, USED])
def test_a_program_that_does_not_fit_says_by_how_much(message):
  step, traced = mock.MagicMock(), mock.Mock(spec=["lower", "out_info"])
  step.trace.return_value = traced
  traced.lower.side_effect = jax.errors.JaxRuntimeError(message)
  x = np.ones(4, np.float32)
  plan = fs.plan(step, x, x)
  assert plan.memory.fits is False
  assert plan.memory.excess == 8.5 * 2**30
  assert plan.traffic == ()
  assert re.search("over by +at least 8.5 GiB", str(plan))
  assert "refused the program" in str(plan)


def test_collectives_are_grouped():
  moved = [(hlo.Array("f32", (n,)),) for n in (10, 40)]

  def collective(kind="all-gather", network="ici", axes=("replica",), **fields):
    return plans.Collective(kind, *moved, 4, axes, axes, network, **fields)

  memory = plans.Memory({"params": 4}, 4, peak=8)
  devices = ("v5e:2x2", "TPU v5 lite", {"replica": 4}, "jax")
  plan = plans.Plan(
    *devices,
    memory,
    traffic=(
      collective(source="a.py:1"),
      collective(executions=3.0, source="b.py:2"),
      collective("all-reduce", in_conditional=True, in_commit=True),
      collective(network="dcn", axes=()),
    ),
    period=10,
  )
  lines = [line.split() for line in str(plan).splitlines()]
  ring = "all-gather replica ICI 4 640 B 480 B a.py:1 and 1 more"
  assert ring.split() in lines
  assert "all-gather other groups DCN 1 160 B 120 B".split() in lines
  assert "all-reduce replica ICI 0.1 if 4 B 6 B".split() in lines
  assert "total 606 B".split() in lines


def test_donated_arguments_of_a_jitted_step_raise():
  with pytest.raises(ValueError, match="argnums=0"):
    fs.plan(jax.jit(loss_step), np.ones(2), 1.0, donate_argnums=0)
