"""Sums of bfloat16 gradients are exchanged with conversions to float32."""

import re

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core
import jax.numpy as jnp
import numpy as np
import pytest
import tpu_programs

from flaxshard.replicas import context as replica_context
from flaxshard.strategy import narrow_sums

PARAMS = np.arange(8.0, dtype=np.float32).reshape(2, 4)
X = np.arange(6.0, dtype=np.float32).reshape(2, 3, 1)


def loss(params, x):
  """Computes in bfloat16, with exact results."""
  return (x.astype(jnp.bfloat16) * params.astype(jnp.bfloat16)).sum()


def loss_of_loop(params, x, dtype=jnp.bfloat16):
  """Adds up the rows of the parameters in a loop."""

  def add(total, row):
    return total + (x.astype(dtype) * row.astype(dtype)).sum(), None

  return jax.lax.scan(add, jnp.zeros((), dtype), params)[0]


def loss_with_tied_parameters(params, x):
  return loss(params, x) + loss(params, x * 2)


def mean_gradient(
  loss_fn, mark=replica_context.GRADIENTS, change=lambda grad: grad
):
  def fn(params, x):
    grad = change(jax.grad(loss_fn)(params, x))
    return jax.lax.pmean(checkpoint_name(grad, mark), "replica")

  return fn


def trace(fn):
  return jax.make_jaxpr(fn, axis_env=[("replica", 2)])(PARAMS[0], X[0])


def summed_dtypes(jaxpr):
  eqns = jaxpr.eqns
  return [str(e.invars[0].aval.dtype) for e in eqns if "psum" in str(e)]


def replicate(fn):
  return jax.vmap(fn, axis_name="replica", in_axes=(None, 0))(PARAMS[0], X)


@pytest.mark.parametrize(
  "loss_fn",
  [loss, jax.jit(loss), jax.checkpoint(loss), loss_of_loop],
  ids=["plain", "jit", "remat", "scan"],
)
def test_bfloat16_gradients_are_summed_in_bfloat16(loss_fn):
  fn = mean_gradient(loss_fn)
  traced = trace(fn)
  assert summed_dtypes(traced) == ["float32"]
  program = narrow_sums.sum_before_widening(traced)
  assert summed_dtypes(program) == ["bfloat16"]
  (mean,) = replicate(core.jaxpr_as_fun(program))
  assert mean.dtype == np.float32
  np.testing.assert_array_equal(mean, replicate(fn))


def step_in_loop(params, x):
  def step(params, _):
    return params - mean_gradient(loss)(params, x), None

  return jax.lax.scan(step, params, length=2)[0]


@pytest.mark.parametrize("outer", [jax.jit(mean_gradient(loss)), step_in_loop])
def test_sums_in_nested_programs_are_exchanged(outer):
  traced = trace(outer)
  assert "psum" in str(traced)
  program = narrow_sums.sum_before_widening(traced)
  (inner,) = [e.params["jaxpr"] for e in program.eqns if "jaxpr" in e.params]
  assert summed_dtypes(inner) == ["bfloat16"]
  (out,) = replicate(core.jaxpr_as_fun(program))
  np.testing.assert_array_equal(out, replicate(outer))


def test_the_sum_of_two_bfloat16_gradients_is_summed_in_two_parts():
  fn = mean_gradient(loss_with_tied_parameters)
  program = narrow_sums.sum_before_widening(trace(fn))
  assert summed_dtypes(program) == ["bfloat16", "bfloat16"]
  (mean,) = replicate(core.jaxpr_as_fun(program))
  np.testing.assert_array_equal(mean, replicate(fn))


def test_a_program_that_is_called_twice_stays_one_program():
  layer = jax.jit(jax.grad(loss))

  def fn(params, x):
    grads = layer(params, x), layer(params, 2 * x)
    norm = jnp.square(grads[0]).sum()
    return jax.lax.pmean(
      checkpoint_name(grads, replica_context.GRADIENTS), "replica"
    ), norm

  program = narrow_sums.sum_before_widening(trace(fn))
  assert summed_dtypes(program) == ["bfloat16", "bfloat16"]
  first, second = [
    e.params["jaxpr"] for e in program.eqns if "jaxpr" in e.params
  ][:2]
  assert first is second
  wanted = jax.tree.leaves(replicate(fn))
  for out, want in zip(
    replicate(core.jaxpr_as_fun(program)), wanted, strict=True
  ):
    np.testing.assert_array_equal(out, want)


def test_other_sums_stay():
  def scaled(params, x):
    return loss(params, x).astype(jnp.float32) * params.sum()

  def carry(grad):
    # What a loop carries keeps its dtype.
    round_number = lambda x, _: (x.astype(jnp.bfloat16).astype(x.dtype), None)
    return jax.lax.scan(round_number, grad, length=2)[0]

  for fn in (
    mean_gradient(loss, mark="of the user"),
    mean_gradient(loss, change=carry),
    mean_gradient(
      loss, change=lambda g: g.astype(jnp.bfloat16).astype(jnp.float16)
    ),
    # Not a conversion: a sum of float32.
    mean_gradient(scaled),
    # The user asks for float32.
    mean_gradient(loss, change=jax.lax.optimization_barrier),
    mean_gradient(lambda p, x: (x * p).sum()),
    # float16 has fewer exponents: its sum may overflow.
    mean_gradient(lambda p, x: loss_of_loop(p, x, jnp.float16)),
  ):
    traced = trace(fn)
    program = narrow_sums.sum_before_widening(traced)
    assert summed_dtypes(program) == summed_dtypes(traced) != ["bfloat16"]


@pytest.mark.tpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_run_on_tpu_sums_bfloat16_gradients_alone_in_bfloat16(dtype):
  strategy = tpu_programs.strategy_of("v5e:2x2")
  args = tpu_programs.create(strategy, dtype=jnp.dtype(dtype))
  text = strategy.jit(tpu_programs.train_step).lower(*args).as_text()
  sums = re.findall(r"stablehlo.all_reduce.*?-> tensor<(\S+)>", text, re.S)
  kind = "bf16" if dtype == "bfloat16" else "f32"
  assert sorted(sums) == [f"256x256x{kind}"] * 2 + [f"256x{kind}"] * 2


def test_remat_of_nested_loops_is_left_as_it_is():
  def loop(fn, w):
    turn = lambda c, x: (jnp.sin(c + fn(x)), None)
    return jax.lax.scan(turn, jnp.float32(0), w)[0]

  @jax.checkpoint
  def loss_fn(w):
    return loop(jax.checkpoint(lambda x: loop(lambda y: x * y, w)), w)

  w = jnp.arange(3.0)
  traced = jax.make_jaxpr(jax.grad(loss_fn))(w)
  # Its program is under another key than that of `jit`.
  assert "call_jaxpr" in str(traced)
  program = narrow_sums.sum_before_widening(traced)
  (grad,) = jax.jit(core.jaxpr_as_fun(program))(w)
  np.testing.assert_array_equal(grad, jax.jit(jax.grad(loss_fn))(w))
