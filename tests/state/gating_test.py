"""`gate_gradients`: optimization barriers behind the gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from quadratic_states import create

import flaxshard as fs

PARAMS = {
  "layer0": {"kernel": jnp.eye(3), "bias": jnp.ones(3)},
  "layer1": {"kernel": jnp.eye(3), "bias": jnp.ones(3)},
  "head": jnp.ones(3),
}
X = jnp.arange(6.0).reshape(2, 3)


def loss_fn(params, x, dtype=jnp.float32):
  for name in ("layer0", "layer1"):
    layer = jax.tree.map(lambda p: p.astype(dtype), params[name])
    x = jnp.tanh(x.astype(dtype) @ layer["kernel"] + layer["bias"])
  return (x.astype(jnp.float32) @ params["head"]).mean()


def barriers(fn, *args):
  """Returns the dtypes of the operands of each barrier in a program."""
  return [
    [x.aval.dtype.name for x in eqn.invars]
    for eqn in jax.make_jaxpr(fn)(*args).eqns
    if eqn.primitive.name == "optimization_barrier"
  ]


@pytest.mark.parametrize(
  ("mode", "sizes"), [("none", []), ("op", [5]), ("graph", [5])]
)
def test_barriers_of_each_mode(mode, sizes):
  state = create(params=PARAMS, tx=optax.adam(0.1))
  step = lambda state, x: state.minimize(loss_fn, x, gate_gradients=mode)
  assert sorted(map(len, barriers(step, state, X))) == sizes
  text = jax.jit(step).lower(state, X).as_text()
  assert text.count("stablehlo.optimization_barrier") == len(sizes)


@pytest.mark.parametrize(
  ("wrappers", "dtype"),
  [((), jnp.float32), ((fs.LossScale("dynamic"),), jnp.bfloat16)],
)
def test_values_are_the_same(wrappers, dtype):
  state = create(params=PARAMS, tx=optax.sgd(0.1), wrappers=wrappers)

  def steps(state, x):
    return [
      state.minimize(loss_fn, x, dtype, gate_gradients=mode)
      for mode in ("none", "op", "graph")
    ]

  wanted, *others = jax.jit(steps)(state, X)
  for other in others:
    # CPU: the compiler drops the barriers before it optimizes.
    jax.tree.map(np.testing.assert_array_equal, other, wanted)


@pytest.mark.parametrize("wrappers", [(), (fs.LossScale("dynamic"),)])
def test_gradients_of_a_mixed_model_pass_in_16_bits(wrappers):
  state = create(params=PARAMS, tx=optax.sgd(0.1), wrappers=wrappers)
  step = lambda state, x: (
    state.minimize(loss_fn, x, jnp.bfloat16, gate_gradients="graph")[0].params
  )
  # Sorted by path: the head computes in float32.
  wanted = ["float32", *["bfloat16"] * 4]
  assert wanted in barriers(jax.jit(step).__wrapped__, state, X)
