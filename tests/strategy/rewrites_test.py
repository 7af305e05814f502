"""Programs that `Strategy.run` rewrites have the same values."""

import re

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core
import jax.numpy as jnp
import numpy as np
import pytest
import tpu_programs
from tree_equality import assert_trees_equal

import flaxshard as fs
from flaxshard.replicas.context import GRADIENTS
from flaxshard.strategy import rewrites

PARAMS = np.arange(8.0, dtype=np.float32).reshape(2, 4)
X = np.arange(6.0, dtype=np.float32).reshape(2, 3, 1)


# -- Gradients are summed in bfloat16, if the model computed them so.


def loss(params, x):
  """Computes in bfloat16, with exact results."""
  return (x.astype(jnp.bfloat16) * params.astype(jnp.bfloat16)).sum()


def loss_of_loop(params, x, dtype=jnp.bfloat16):
  """Adds up the rows of the parameters in a loop."""

  def add(total, row):
    return total + (x.astype(dtype) * row.astype(dtype)).sum(), None

  return jax.lax.scan(add, jnp.zeros((), dtype), params)[0]


def mean_gradient(loss_fn, change=lambda grad: grad, mark=GRADIENTS):
  def fn(params, x):
    grad = change(jax.grad(loss_fn)(params, x))
    return jax.lax.pmean(checkpoint_name(grad, mark), "replica")

  return fn


def step_in_loop(params, x):
  def step(params, _):
    return params - mean_gradient(loss)(params, x), None

  return jax.lax.scan(step, params, length=2)[0]


def scaled(params, x):
  return loss(params, x).astype(jnp.float32) * params.sum()


def carried(grad):
  round_number = lambda x, _: (x.astype(jnp.bfloat16).astype(x.dtype), None)
  return jax.lax.scan(round_number, grad, length=2)[0]


def sum_on_two_replicas(fn, rewrite=lambda program: program):
  """Returns the dtype that `fn` sums in, and its results."""
  program = jax.make_jaxpr(fn, axis_env=[("replica", 2)])(PARAMS[0], X[0])
  program = rewrite(program)
  (dtype,) = re.findall(r":(\w+)\[\d*\] = psum", str(program))
  run = jax.vmap(
    core.jaxpr_as_fun(program), axis_name="replica", in_axes=(None, 0)
  )
  return dtype, jax.jit(run)(PARAMS[0], X)[0]


@pytest.mark.parametrize(
  ("fn", "dtype"),
  [
    (mean_gradient(loss), "bf16"),
    (mean_gradient(jax.jit(loss)), "bf16"),
    (mean_gradient(jax.checkpoint(loss)), "bf16"),
    (mean_gradient(loss_of_loop), "bf16"),
    (jax.jit(mean_gradient(loss)), "bf16"),
    (step_in_loop, "bf16"),
    # These stay as they are.
    (mean_gradient(loss, mark="of the user"), "f32"),
    (mean_gradient(lambda p, x: (x * p).sum()), "f32"),
    # Not a conversion: a sum of float32.
    (mean_gradient(scaled), "f32"),
    # What a loop carries keeps its dtype.
    (mean_gradient(loss, carried), "f32"),
    # The user asks for float32.
    (mean_gradient(loss, jax.lax.optimization_barrier), "f32"),
    # float16 has fewer exponents: its sum may overflow.
    (mean_gradient(lambda p, x: loss_of_loop(p, x, jnp.float16)), "f32"),
    (mean_gradient(loss, lambda g: g.astype("bfloat16").astype("f2")), "f16"),
  ],
)
def test_bfloat16_gradients_are_summed_in_bfloat16(fn, dtype):
  before, wanted = sum_on_two_replicas(fn)
  after, out = sum_on_two_replicas(fn, rewrites.sum_before_widening)
  assert before != "bf16" and after == dtype
  assert_trees_equal(out, wanted)


@pytest.mark.tpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_run_on_tpu_sums_bfloat16_gradients_alone_in_bfloat16(dtype):
  strategy = tpu_programs.strategy_of("v5e:2x2")
  args = tpu_programs.create(strategy, dtype=jnp.dtype(dtype))
  text = strategy.jit(tpu_programs.train_step).lower(*args).as_text()
  sums = re.findall(r"stablehlo.all_reduce.*?-> tensor<(\S+)>", text, re.S)
  kind = "bf16" if dtype == "bfloat16" else "f32"
  assert sorted(sums) == [f"256x256x{kind}"] * 2 + [f"256x{kind}"] * 2


# -- No open sharding constraints, in replicas of several logical devices.


def test_only_the_constraints_of_the_program_are_lowered():
  strategy = fs.Strategy(mesh_shape={"replica": 4, "model": 2})
  threes = jnp.full(4, 3.0)
  triple = jax.jit(lambda x: x * threes)  # a program with a constant

  def step(x):
    x = jax.lax.with_sharding_constraint(x + 1, jax.P(None, "model"))
    y = strategy.split_to_logical_devices(triple(jax.nn.relu(x)), [1, 2])
    return jax.lax.cond(y[0, 0] > 0, lambda v: v * 2, lambda v: v + 1, y)

  batch = strategy.shard_batch(np.ones((8, 4), np.float32))
  text = strategy.jit(step).lower(batch).as_text()
  values = [
    line
    for line in text[text.index("func.func private") :].splitlines()
    if "sharding_constraint" in line and "xf32" in line
  ]
  assert len(values) == 2
  assert all('[{}, {"model"}]' in line for line in values)
  assert (np.asarray(strategy.run(step, args=(batch,))) == 12).all()
