"""Gradients of tables are rows, and equal to those of `jax.grad`."""

import random
import re
from typing import Any
import warnings

from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs
from flaxshard.core import jaxprs

# Row 1 twice; the last row by -1; row 9 does not exist.
IDS = jnp.array([1, 2, 1, -1, 9])
TABLE = jax.random.normal(jax.random.key(0), (7, 3))
BIAS = jnp.arange(1.0, 4.0)


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


# The loss of a table and a bias, and the number of rows of the gradient. One
# lookup alone: bit for bit.
ONE_LOOKUP = {
  "indexing": (lambda t, b: total(t[IDS], b), 5),
  "scalar id": (lambda t, b: total(t[IDS[0]], b), 1),
  "strided slice": (lambda t, b: total(t[::3], b), 3),
  "take": (lambda t, b: total(jnp.take(t, IDS, axis=0), b), 5),
  "mode clip": (lambda t, b: total(t.at[IDS].get(mode="clip"), b), 5),
  "mode fill": (lambda t, b: total(t.at[IDS].get(mode="fill"), b), 5),
  "uint32 ids": (
    lambda t, b: total(t.at[IDS.astype(jnp.uint32)].get(mode="clip"), b),
    5,
  ),
  "no ids": (lambda t, b: total(t[IDS[:0]], b), 0),
  "unused": (lambda t, b: b.sum(), 0),
  "dynamic_slice": (
    lambda t, b: total(jax.lax.dynamic_slice(t, (IDS[4], 0), (2, 3)), b),
    2,
  ),
  "vmap": (lambda t, b: total(jax.vmap(lambda i: t[i])(IDS), b), 5),
  "jit": (lambda t, b: total(jax.jit(lambda t: t[IDS])(t), b), 5),
  "scaled table": (lambda t, b: total((-2 * t)[IDS], b), 5),
  "masked table": (
    lambda t, b: total(jnp.where(jnp.arange(7)[:, None] == 2, 0, t)[IDS], b),
    5,
  ),
  "padding row": (lambda t, b: total(t.at[0].set(0)[IDS], b), 5),
  "reshape": (lambda t, b: total(t.reshape(7, 1, 3)[IDS], b), 5),
  "function of elements": (
    lambda t, b: total(jax.lax.clamp(-0.5, jnp.sinh(t / 2), 0.5)[IDS], b),
    5,
  ),
  "uses without a gradient": (
    lambda t, b: total(t[IDS] * (t > 0).sum(), jax.lax.stop_gradient(t).sum()),
    5,
  ),
}
# The order of the sums differs.
MORE_LOOKUPS = {
  "two lookups": (lambda t, b: total(t[IDS], b) + total(t[IDS + 1], b), 10),
  "cast table": (lambda t, b: total(t.astype(jnp.bfloat16)[IDS], b), 5),
}
# The operation that the warning names.
DENSE = {
  "tied output": (
    lambda t, b: total(t[IDS], b) + (b @ t.T).sum(),
    "transpose",
  ),
  "squares": (lambda t, b: total(t[IDS], b) + (t**2).sum(), "reduce_sum"),
  "columns": (lambda t, b: total(t[IDS], b) + total(t[:, 0], 1), "slice"),
  "most rows": (lambda t, b: total(t[IDS], b) + total(t[1:], b), "slice"),
  "one-hot": (lambda t, b: total(jax.nn.one_hot(IDS, 7) @ t, b), "dot_general"),
  "clipped gradient": (lambda t, b: total(clip_gradient(t)[IDS], b), "vjp"),
  "custom lookup": (lambda t, b: total(look_up(t, IDS), b), "vjp"),
  "remat": (jax.checkpoint(lambda t, b: total(t[IDS], b)), "remat2|checkpoint"),
  "scan": (
    lambda t, b: jax.lax.scan(
      lambda c, i: (c + total(t[i], b), None), jnp.float32(0), IDS
    )[0],
    "scan",
  ),
  "cond": (
    lambda t, b: jax.lax.cond(
      b[0] > 0, lambda: total(t[IDS], b), lambda: total(t[IDS[:2]], b)
    ),
    "cond",
  ),
}
PROGRAMS = ONE_LOOKUP | MORE_LOOKUPS | DENSE


def create(params, patterns, **kwargs):
  return fs.TrainState.create(
    apply_fn=None, params=params, tx=optax.sgd(0.1), sparse=patterns, **kwargs
  )


def differentiate(name, t, b):
  """Returns losses and gradients with rows, and those of `jax.grad`."""
  fn = lambda p: PROGRAMS[name][0](p["t"], p["b"])
  state = create({"t": t, "b": b}, ["t"])
  return state.value_and_grad(fn), jax.value_and_grad(fn)(state.params)


@pytest.fixture(scope="module")
def compiled():
  """The results of all programs, compiled at once, and their warnings."""
  found = {}

  def run(t, b):
    results = {}
    for name in PROGRAMS:
      with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results[name] = differentiate(name, t, b)
      found[name] = [str(w.message) for w in caught]
    return results

  return jax.device_get(jax.jit(run)(TABLE, BIAS)), found


def dense(slices):
  """Returns the whole array, without compiling an operation for each shape."""
  array = np.zeros(slices.dense_shape, np.float32)
  is_row = slices.indices < len(array)
  np.add.at(array, slices.indices[is_row], slices.values[is_row])
  return array


def check(result, wanted, exact):
  (loss, grads), (want_loss, want) = result, wanted
  np.testing.assert_array_equal(loss, want_loss)
  np.testing.assert_array_equal(grads["b"], want["b"])
  got = grads["t"]
  rtol = 0 if exact else 1e-6
  np.testing.assert_allclose(
    dense(got) if fs.is_indexed_slices(got) else got,
    want["t"],
    rtol=rtol,
    atol=rtol,
  )


@pytest.mark.parametrize("name", ONE_LOOKUP | MORE_LOOKUPS)
def test_gradient_is_rows_of_the_lookups(name, compiled):
  result, wanted = compiled[0][name]
  assert fs.is_indexed_slices(result[1]["t"])
  assert result[1]["t"].indices.size == PROGRAMS[name][1]
  if name == "cast table":
    # jax.grad adds the two rows of id 1 in bfloat16.
    wanted[1]["t"] = dense(result[1]["t"])
    np.testing.assert_allclose(
      wanted[1]["t"], compiled[0]["indexing"][1][1]["t"], rtol=0.05
    )
  check(result, wanted, exact=name in ONE_LOOKUP)
  assert compiled[1][name] == []


@pytest.mark.parametrize("name", DENSE)
def test_dense_use_gives_a_whole_array_and_a_warning(name, compiled):
  result, wanted = compiled[0][name]
  check(result, wanted, exact=True)
  (message,) = compiled[1][name]
  assert "'t'" in message
  assert re.search(rf"({DENSE[name][1]})\w* \(", message)
  assert "gradients_test.py:" in message


@pytest.mark.slow
def test_gradient_is_the_same_outside_of_jit():
  check(*jax.device_get(differentiate("padding row", TABLE, BIAS)), exact=False)


@pytest.mark.slow
def test_vmap_of_a_step_gives_rows_of_each_example():
  def fn(t, ids):
    loss = lambda p: total(p["t"][ids], 1.0)
    return create({"t": t}, ["t"]).value_and_grad(loss)[1]["t"]

  ids = jnp.array([[0, 1], [3, 3]])
  grad = jax.grad(lambda t, i: total(t[i], 1.0))
  rows, want = jax.device_get(
    jax.jit(jax.vmap(lambda t, i: (fn(t, i), grad(t, i)), (None, 0)))(
      TABLE, ids
    )
  )
  assert rows.indices.tolist() == ids.tolist()
  for i in range(2):
    one = jax.tree.map(lambda x, i=i: x[i], rows)
    np.testing.assert_array_equal(dense(one), want[i])


def test_an_array_beside_a_table_has_its_gradient():
  params = {"t": TABLE, "u": jnp.cos(TABLE)}
  fn = lambda p: total((p["t"] * p["u"])[IDS], BIAS)
  _, grads = create(params, ["t"]).value_and_grad(fn)
  wanted = jax.grad(fn)(params)["u"]
  np.testing.assert_allclose(grads["u"], wanted, rtol=1e-6)


def program(rng, depth):
  """Returns a random function of a table and a bias."""
  if not depth:
    return rng.choice([fn for fn, _ in ONE_LOOKUP.values()])
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

  (value, grads), (want_value, want) = run(TABLE)
  assert fs.is_indexed_slices(grads["t"])
  np.testing.assert_array_equal(value, want_value)
  scale = max(1, float(jnp.abs(want["t"]).max()))
  np.testing.assert_allclose(
    grads["t"].to_dense(), want["t"], atol=1e-5 * scale
  )


# -- Models.

MODEL_IDS = jnp.array([[1, 2, 1], [5, 0, 2]])


class Model(nn.Module):
  """An embedding, and an output layer that may have its weights."""

  dtype: Any
  is_tied: bool = False

  @nn.compact
  def __call__(self, ids):
    embed = nn.Embed(7, 3, dtype=self.dtype, name="embed")
    x = embed(ids)
    return embed.attend(x) if self.is_tied else nn.Dense(2, self.dtype)(x)


def create_state(model, patterns=("embed",), wrappers=()):
  return fs.create_train_state(
    model,
    jax.random.key(0),
    MODEL_IDS,
    optax.sgd(0.1),
    sparse=patterns,
    wrappers=wrappers,
  )


def gradients(state):
  def loss_fn(params):
    y = state.apply_fn({"params": params}, MODEL_IDS)
    return (y.astype(jnp.float32) ** 2).mean()

  return state.value_and_grad(loss_fn)


@pytest.mark.slow
@pytest.mark.parametrize("is_tied", [False, True])
def test_gradients_of_a_model_equal_those_of_jax(is_tied):
  model, wrappers = Model(jnp.float16, is_tied), [fs.LossScale(256.0)]
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    (loss, grads), (want_loss, want) = jax.jit(
      lambda a, b: (gradients(a), gradients(b))
    )(create_state(model, wrappers=wrappers), create_state(model, (), wrappers))
  assert ["transpose" in str(w.message) for w in caught] == [True] * is_tied
  assert fs.is_indexed_slices(grads["embed"]["embedding"]) != is_tied
  np.testing.assert_array_equal(loss, want_loss)
  # jax.grad sums equal rows in 16 bits, and so does a dense gradient.
  rtol, atol = (0, 0) if is_tied else (1e-2, 1e-7)
  for got, wanted in zip(
    jax.tree.leaves(fs.sparse.to_dense(grads)),
    jax.tree.leaves(want),
    strict=True,
  ):
    assert got.dtype == wanted.dtype == jnp.float32
    np.testing.assert_allclose(got, wanted, rtol=rtol, atol=atol)


def test_rows_are_cast_rather_than_the_table():
  state = create_state(Model(jnp.bfloat16))
  program = jax.make_jaxpr(lambda s: gradients(s)[1])(state)
  tables = [
    eqn.invars[0].aval
    for eqn in jaxprs.equations(program)
    if eqn.primitive.name == "gather"
  ]
  assert {(x.shape[0], str(x.dtype)) for x in tables} == {(7, "float32")}


@pytest.mark.slow
def test_frozen_and_integer_parameters_have_no_gradient():
  params = {
    "table": jnp.ones((7, 3)),
    "frozen": jnp.ones((7, 3)),
    "count": jnp.int32(2),
  }
  tx = fs.sparse_rows(fs.freeze(optax.sgd(0.1), ["frozen"]), ["table"])
  state = fs.TrainState.create(apply_fn=None, params=params, tx=tx)
  (_, aux), grads = state.value_and_grad(
    lambda p: (
      (p["table"][MODEL_IDS] * p["frozen"][MODEL_IDS]).sum() * p["count"],
      p["count"],
    ),
    has_aux=True,
  )
  assert grads["frozen"] is None and grads["count"] is None
  assert fs.is_indexed_slices(grads["table"]) and int(aux) == 2


class NNXModel(nnx.Module):
  """An embedding, a layer, and a count of calls."""

  def __init__(self, rngs):
    self.embed = nnx.Embed(7, 3, rngs=rngs)
    self.out = nnx.Linear(3, 2, rngs=rngs)
    self.calls = nnx.Variable(jnp.int32(0))

  def __call__(self, ids):
    self.calls[...] += 1
    return self.out(self.embed(ids))


@pytest.mark.slow
def test_nnx_optimizer_updates_rows_of_embed():
  models, kinds = [], []
  wrappers = [fs.LossScale(8.0)]
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    for tx in (fs.sparse_rows(optax.sgd(0.1), ["embed"]), optax.sgd(0.1)):
      model = NNXModel(nnx.Rngs(0))
      optimizer = fs.nnx.Optimizer(model, tx, wrt=nnx.Param, wrappers=wrappers)

      @nnx.jit
      def step(model, optimizer):
        loss_fn = lambda model: (model(MODEL_IDS) ** 2).sum()
        _, grads = optimizer.value_and_grad(loss_fn, model)
        kinds.append(type(grads["embed"]["embedding"].get_value()))
        optimizer.update(model, grads)

      step(model, optimizer)
      models.append(nnx.as_pure(nnx.state(model)))
  assert kinds[0] is fs.IndexedSlices and kinds[1] is not fs.IndexedSlices
  assert int(models[0]["calls"]) == 1
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *models
  )
