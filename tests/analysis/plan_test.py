"""Plans of a step: its memory, its traffic, and mistakes."""

import json

from flax import nnx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs
from flaxshard.analysis import compilation
from flaxshard.analysis import memory as memory_lib
from flaxshard.analysis import traffic
from flaxshard.compiled import Collective

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


def create(strategy, **options):
  """Returns an abstract state and batch."""
  x = jax.ShapeDtypeStruct((16, 32), jnp.float32)
  state = fs.create_train_state(
    Model(),
    jax.random.key(0),
    x,
    optax.adam(1e-3),
    strategy=strategy,
    abstract=True,
    **options,
  )
  return state, strategy.shard_batch({"x": x})


def agn(period=4):
  return fs.AGN(communication_period=period, commit="mean")


@pytest.fixture(scope="module")
def planned():
  """A plan on eight virtual CPU devices, with its strategy and state."""
  strategy = fs.Strategy()
  state, batch = create(strategy, wrappers=[fs.LossScale("dynamic"), agn()])
  return strategy, state, fs.plan(strategy.jit(loss_step), state, batch)


def test_buffers_of_a_replica_step_have_the_paths_of_its_arguments(planned):
  origins = {
    b.origin for b in planned[2].memory.buffers if b.kind == "argument"
  }
  assert {
    "state.params['Dense_0']['kernel']",
    "state.opt_state[0].mu['Dense_0']['kernel']",
  } <= origins
  assert not [name for name in origins if name.startswith("leaves")]


def test_state_bytes_are_those_of_describe(planned, capsys):
  strategy, state, plan = planned
  described = strategy.describe(state)
  capsys.readouterr()
  fields = plan.memory.state
  by_group = {group.name: group.bytes_per_device for group in described.groups}
  wrappers = fields["loss_scale"] + fields["agn"]
  assert wrappers == by_group.pop("wrapper_states")
  assert by_group == {k: v for k, v in fields.items() if k in by_group}
  assert plan.memory.state_bytes == described.bytes_per_device
  # 32 x 64 weights and 64 biases, in float32.
  assert fields["params"] == 4 * (32 * 64 + 64)
  assert fields["counts"] == 4
  # Two rows of 32 floats.
  assert plan.memory.batch == 2 * 32 * 4


def test_rows_of_memory_add_up_to_the_peak(planned):
  memory = planned[2].memory
  arguments = memory.state_bytes + memory.batch + memory.arguments
  # This backend adds nothing to a layout.
  assert memory.padding == 0
  assert memory.peak == (
    arguments
    - memory.unused
    + memory.padding
    + memory.outputs
    + memory.program
    + memory.temporaries
  )
  assert memory.excess is None or memory.fits


def test_a_commit_counts_once_in_a_period(planned):
  plan = planned[2]
  assert plan.period == 4
  rows = traffic.rows_of(plan.traffic, plan.period)
  commits = [row for row in rows if row.conditional]
  # The mean of the gradients, in float32, is one all-reduce or several.
  gradients = sum(row.nbytes for row in commits if row.kind == "all-reduce")
  assert gradients == pytest.approx(plan.memory.state["params"] / 4, rel=0.1)
  each = traffic.rows_of(plan.traffic, plan.period, each=True)
  assert len(each) == len(plan.traffic) >= len(rows)
  total = sum(row.link_bytes for row in rows)
  assert sum(row.link_bytes for row in each) == pytest.approx(total)


def test_a_plan_is_text_html_and_json(planned):
  plan = planned[2]
  text, page = str(plan), plan._repr_html_()
  for fact in ("replica=8", "params", "loss_scale", "agn", "virtual CPU"):
    assert fact in text and fact in page
  assert "all-reduce" in plan.text(verbose=True)
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
  class Layer(nnx.Module):
    def __init__(self, rngs):
      self.dense = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
      return self.dense(x)

  x = jax.ShapeDtypeStruct((8, 4), jnp.float32)
  state = fs.create_train_state(
    lambda rngs: Layer(rngs),
    jax.random.key(0),
    x,
    optax.sgd(0.1),
    strategy=fs.Strategy(devices=jax.devices()[:1]),
    abstract=True,
  )

  def step(state, x):
    return state.minimize(
      lambda params: state.apply_fn({"params": params}, x).sum()
    )

  for jitted in (step, nnx.jit(step)):
    memory = fs.plan(jitted, state, x).memory
    assert (memory.state["params"], memory.batch) == (4 * (8 + 2), 128)


def test_arrays_are_split_as_the_step_says():
  mesh = fs.Strategy().mesh
  split = jax.sharding.NamedSharding(mesh, P("replica"))
  step = jax.jit(lambda w, x: w - x.sum(), in_shardings=split)
  w = jax.ShapeDtypeStruct((16, 4), jnp.float32)
  plan = fs.plan(step, w, w)
  memory = plan.memory
  assert plan.mesh == {"replica": 8}
  assert (memory.state, memory.batch, memory.padding) == ({"state": 32}, 32, 0)
  assert sum(c.kind == "all-reduce" for c in plan.traffic) == 1


def test_arrays_that_are_not_read_are_subtracted():
  x = np.ones((4, 4), np.float32)
  memory = fs.plan(lambda s, b, unused: s + b[0, 0], x, x, x).memory
  assert (memory.state, memory.arguments) == ({"state": 64}, 64)
  assert memory.unused == 64


def test_a_program_that_does_not_fit_says_by_how_much():
  message = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required "
    "for HLO temporaries (24.25G) exceeds available HBM (15.75G)."
  )
  needed, available = int(24.25 * 2**30), int(15.75 * 2**30)
  refused = compilation.Compilation(None, 0.0, None, message, needed, available)
  x = np.ones(4, np.float32)
  memory = memory_lib.read_memory((x, x), 1, refused, hbm=16 * 2**30)
  assert memory.fits is False
  assert memory.excess == needed - available
  assert memory.temporaries is None
  (table,) = memory_lib.tables_of(memory)
  assert "over by" in table.text()
  assert "at least 8.5 GiB" in table.text()


def test_collectives_are_grouped():
  def collective(**fields):
    given = dict(
      kind="all-gather", dtype="f32", operand_bytes=10, result_bytes=40,
      group_size=4, axes=("replica",), network="ici", executions=1.0,
      in_conditional=False, purpose="parameter", parameters=("a",),
      op_name="", source="",
    )  # fmt: skip
    return Collective(**{**given, **fields})

  rows = traffic.rows_of(
    [
      collective(),
      collective(executions=3.0, parameters=("a", "b")),
      collective(kind="all-reduce", in_conditional=True, in_commit=True),
      collective(network="dcn", axes=()),
    ],
    period=10,
  )
  gathers, other, commit = rows
  assert (gathers.count, gathers.nbytes, gathers.link_bytes) == (4, 160, 120)
  assert gathers.parameters == ("a", "b")
  assert (other.network, other.count, other.link_bytes) == ("dcn", 1, 30)
  assert (commit.count, commit.nbytes) == (0.1, 1)
  assert commit.link_bytes == pytest.approx(1.5)
  text = traffic.table_of(rows, 10).text()
  for fact in ("ICI", "DCN", "a, b", "0.1", "152 B"):
    assert fact in text


@pytest.mark.parametrize(
  ("step", "options", "kind", "facts"),
  [
    (3, {}, TypeError, ("step", "3")),
    (
      jax.jit(loss_step),
      {"donate_argnums": 0},
      ValueError,
      ("donate_argnums=0", "jax.jit"),
    ),
    (loss_step, {"donate_argnums": -1}, ValueError, ("donate_argnums", "-1")),
  ],
)
def test_mistakes_name_the_argument(step, options, kind, facts):
  x = np.ones(2, np.float32)
  with pytest.raises(kind) as e:
    fs.plan(step, x, x, **options)
  for fact in facts:
    assert fact in str(e.value)


def test_arguments_that_are_no_arrays_raise():
  with pytest.raises(TypeError, match=r"batch\[x\]"):
    fs.plan(loss_step, np.ones(2), {"x": "text"})
