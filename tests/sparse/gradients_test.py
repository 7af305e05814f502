"""Gradients of tables are rows, and equal to those of `jax.grad`."""

import random
import re
import warnings

from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sparse_states import dense
import tree_equality

import flaxshard as fs

# Row 1 twice; the last row by -1; row 9 does not exist.
IDS = jnp.array([1, 2, 1, -1, 9])
TABLE = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)
BIAS = np.arange(1.0, 4.0, dtype=np.float32)


SUM = lambda t: t[IDS].sum()
MASK = np.arange(7)[:, None] == 2


def total(rows, b):
  return (jnp.sin(jnp.where(jnp.isnan(rows), 0, rows)) * b).sum()


@jax.custom_vjp
def look_up(t, ids):
  return t[ids]


look_up.defvjp(
  lambda t, ids: (t[ids], ids),
  lambda ids, g: (jnp.zeros((7, 3)).at[ids].add(g), None),
)


@jax.custom_vjp
def clip_gradient(x):
  return x


clip_gradient.defvjp(
  lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),)
)


# The rows that a loss looks up, and their number.
LOOKUPS = {
  "indexing": (lambda t: t[IDS], 5),
  "scalar id": (lambda t: t[IDS[0]], 1),
  "strided slice": (lambda t: t[::3], 3),
  "take": (lambda t: jnp.take(t, IDS, axis=0), 5),
  "mode clip": (lambda t: t.at[IDS].get(mode="clip"), 5),
  "mode fill": (lambda t: t.at[IDS].get(mode="fill"), 5),
  "uint32 ids": (lambda t: t.at[IDS.astype("uint32")].get(mode="clip"), 5),
  "no ids": (lambda t: t[IDS[:0]], 0),
  "unused": (lambda t: jnp.ones(3), 0),
  "dynamic_slice": (lambda t: jax.lax.dynamic_slice(t, (9, 0), (2, 3)), 2),
  "vmap": (lambda t: jax.vmap(lambda i: t[i])(IDS), 5),
  "jit": (lambda t: jax.jit(lambda t: t[IDS])(t), 5),
  "scaled table": (lambda t: (-2 * t)[IDS], 5),
  "masked table": (lambda t: jnp.where(MASK, 0, t)[IDS], 5),
  "padding row": (lambda t: t.at[0].set(0)[IDS], 5),
  "reshape": (lambda t: t.reshape(7, 1, 3)[IDS], 5),
  "functions": (lambda t: jax.lax.clamp(-0.5, jnp.sinh(t / 2), 0.5)[IDS], 5),
  "uses without a gradient": (lambda t: t[IDS] * (t > 0).sum(), 5),
  "stopped": (lambda t: t[IDS] * jax.lax.stop_gradient(t).sum(), 5),
  "two lookups": (lambda t: t[IDS] * t[IDS + 1], 10),
}
# Losses beside a lookup, and the operation that the warning names.
DENSE = {
  "tied output": (lambda t, b: (b @ t.T).sum(), "transpose"),
  "squares": (lambda t, b: (t**2).sum(), "reduce_sum"),
  "columns": (lambda t, b: total(t[:, 0], 1), "slice"),
  "most rows": (lambda t, b: total(t[1:], b), "slice"),
  "one-hot": (lambda t, b: total(jax.nn.one_hot(IDS, 7) @ t, b), "dot_general"),
  "clipped gradient": (lambda t, b: total(clip_gradient(t)[IDS], b), "vjp"),
  "custom lookup": (lambda t, b: total(look_up(t, IDS), b), "vjp"),
  "remat": (jax.checkpoint(lambda t, b: total(t[IDS], b)), "remat2|checkpoint"),
  "scan": (lambda t, b: jax.lax.map(lambda i: t[i], IDS).sum(), "scan"),
  "cond": (lambda t, b: jax.lax.cond(b[0] > 0, SUM, SUM, t), "cond"),
}
PROGRAMS = {
  name: lambda t, b, fn=fn: total(t[IDS], b) + fn(t, b)
  for name, (fn, _) in DENSE.items()
} | {
  name: lambda t, b, fn=fn: total(fn(t), b) for name, (fn, _) in LOOKUPS.items()
}


def create(params, patterns, **kwargs):
  return fs.TrainState.create(
    apply_fn=None, params=params, tx=optax.sgd(0.1), sparse=patterns, **kwargs
  )


@pytest.fixture(scope="module")
def compiled():
  """The results of all programs, those of `jax.grad`, and all warnings."""
  found = {}

  def run(t, b):
    results, state = {}, create({"t": t, "b": b}, ["t"])
    for name, program in PROGRAMS.items():
      fn = lambda p, program=program: program(p["t"], p["b"])
      with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results[name] = (
          state.value_and_grad(fn),
          jax.value_and_grad(fn)(state.params),
        )
      found[name] = [str(w.message) for w in caught]
    return results

  with jax.checking_leaks():
    return jax.device_get(jax.jit(run)(TABLE, BIAS)), found


@pytest.mark.parametrize("name", LOOKUPS)
def test_gradient_is_rows_of_the_lookups(name, compiled):
  (loss, grads), (want_loss, want) = compiled[0][name]
  assert grads["t"].indices.size == LOOKUPS[name][1]
  np.testing.assert_array_equal((loss, *grads["b"]), (want_loss, *want["b"]))
  # One lookup: bit for bit. Of two, the order of the sums differs.
  rtol = 1e-6 if name == "two lookups" else 0
  np.testing.assert_allclose(dense(grads["t"]), want["t"], rtol, rtol)
  assert compiled[1][name] == []


@pytest.mark.parametrize("name", DENSE)
def test_dense_use_gives_a_whole_array_and_a_warning(name, compiled):
  result, wanted = compiled[0][name]
  jax.tree.map(np.testing.assert_array_equal, result, wanted)
  (message,) = compiled[1][name]
  assert re.search(rf"'t'.*({DENSE[name][1]})\w* \(", message)
  assert "gradients_test.py:" in message


@pytest.mark.filterwarnings("ignore:value_and_grad")
def test_factors_of_a_product_have_their_gradients():
  params = {"t": TABLE, "u": np.cos(TABLE), "row": BIAS, "s": BIAS[1]}
  params["one"] = BIAS[None]  # a table of one row
  pairs = ("t", "u"), ("t", "row"), ("t", "s"), ("one", "u")
  fn = lambda p: sum(total((p[a] * p[b])[IDS], BIAS) for a, b in pairs)
  step = jax.jit(lambda state: (state.minimize(fn)[0], jax.grad(fn)(params)))
  new, grads = step(create(params, ["^t$", "one"]))
  grads = jax.device_get(grads)
  wanted = jax.tree.map(lambda p, g: p - np.float32(0.1) * g, params, grads)
  tree_equality.assert_trees_close(new.params, wanted)


def program(rng, depth):
  """Returns a random function of a table and a bias."""
  if not depth:
    return PROGRAMS[rng.choice([*LOOKUPS])]
  f, g = program(rng, depth - 1), program(rng, depth - 1)
  shifted = lambda t, b: lambda i: total(t[IDS[:3] + i], b) * g(t, b + i)
  return rng.choice(
    [
      lambda t, b: f(t, b) + g(t, b),
      lambda t, b: jnp.tanh(f(t, b)) * g(t, b),
      jax.jit(f),
      lambda t, b: jax.vmap(shifted(t, b))(jnp.arange(2)).sum(),
    ]
  )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_gradient_of_a_random_program_equals_that_of_jax(seed):
  loss = program(random.Random(seed), 3)

  @jax.jit
  def run(t):
    fn = lambda p: loss(p["t"], BIAS)
    return (
      create({"t": t}, ["t"]).value_and_grad(fn),
      jax.value_and_grad(fn)({"t": t}),
    )

  (value, grads), (wanted_value, wanted) = jax.device_get(run(TABLE))
  np.testing.assert_array_equal(value, wanted_value)
  atol = 1e-5 * max(1, np.abs(wanted["t"]).max())
  np.testing.assert_allclose(dense(grads["t"]), wanted["t"], atol=atol)


# -- Models.

MODEL_IDS = np.array([[1, 2, 1], [5, 0, 2]], np.int32)


def test_rows_are_cast_rather_than_the_table():
  def step(patterns):
    state = fs.create_train_state(
      nn.Embed(7, 3, dtype=jnp.float16),
      jax.random.key(0),
      MODEL_IDS,
      optax.sgd(0.1),
      sparse=patterns,
      wrappers=[fs.LossScale(256.0)],
    )

    def loss_fn(params):
      y = state.apply_fn({"params": params}, MODEL_IDS)
      return (y.astype(jnp.float32) ** 2).mean()

    traced = jax.jit(lambda s: s.value_and_grad(loss_fn)).trace(state)
    return str(traced.jaxpr), traced.lower().compile()(state)

  (program, result), (program_of_jax, wanted) = step(["embed"]), step(())
  assert "f16[7,3]" in program_of_jax and "f16[7,3]" not in program
  # jax.grad sums equal rows in 16 bits.
  result = jax.jit(fs.sparse.to_dense)(result)
  tree_equality.assert_trees_close(result, wanted, rtol=1e-2, atol=1e-7)


@pytest.mark.slow
def test_frozen_and_integer_parameters_have_no_gradient():
  tx = fs.sparse_rows(fs.freeze(optax.sgd(0.1), ["frozen"]), ["table"])
  params = {"table": TABLE, "frozen": TABLE, "count": jnp.int32(2)}
  state = fs.TrainState.create(apply_fn=None, params=params, tx=tx)
  _, grads = state.value_and_grad(
    lambda p: (p["table"][IDS[:3]] * p["frozen"][IDS[:3]]).sum() * p["count"]
  )
  assert grads["frozen"] is None and grads["count"] is None
  np.testing.assert_array_equal(grads["table"].values, 2 * TABLE[IDS[:3]])


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_nnx_optimizer_updates_rows_of_embed():
  def train(tx):
    model = nnx.Embed(7, 3, rngs=nnx.Rngs(0))
    wrappers = [fs.LossScale(8.0)]
    optimizer = fs.nnx.Optimizer(model, tx, wrt=nnx.Param, wrappers=wrappers)

    @nnx.jit
    def step(model, optimizer):
      loss_fn = lambda model: (model(MODEL_IDS) ** 2).sum()
      _, grads = optimizer.value_and_grad(loss_fn, model)
      optimizer.update(model, grads)
      return fs.is_indexed_slices(grads["embedding"].get_value())

    return step(model, optimizer), nnx.as_pure(nnx.state(model))

  rows, params = train(fs.sparse_rows(optax.sgd(0.1), ["embed"]))
  whole, wanted = train(optax.sgd(0.1))
  assert rows and not whole
  tree_equality.assert_trees_close(params, wanted, rtol=1e-6)
