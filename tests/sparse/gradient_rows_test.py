"""Gradients of tables are rows, and equal to those of `jax.grad`."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flaxshard as fs
from flaxshard.sparse import gradient_rows

# Row 1 twice; the last row by -1; row 9 does not exist.
IDS = jnp.array([1, 2, 1, -1, 9])
TABLE = jax.random.normal(jax.random.key(0), (7, 3))
BIAS = jnp.arange(1.0, 4.0)


def total(rows, b):
  return (jnp.sin(jnp.where(jnp.isnan(rows), 0, rows)) * b).sum()


def scan(fn, act=lambda x: x):
  def turn(c, i):
    return act(c + fn(i)), None

  return jax.lax.scan(turn, jnp.float32(0), IDS)[0]


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
  "vmap of dynamic_slice": (
    lambda t, b: total(
      jax.vmap(lambda i: jax.lax.dynamic_slice(t, (i, 0), (2, 3)))(IDS), b
    ),
    10,
  ),
  "cond": (
    lambda t, b: jax.lax.cond(
      b[0] > 0, lambda: total(t[IDS], b), lambda: total(t[IDS[:2]], b)
    ),
    5,
  ),
  "custom_vjp": (lambda t, b: total(look_up(t, IDS), b), 5),
  "scaled table": (lambda t, b: total((-2 * t)[IDS], b), 5),
  "masked table": (
    lambda t, b: total(jnp.where(jnp.arange(7)[:, None] == 2, 0, t)[IDS], b),
    5,
  ),
  "padding row": (lambda t, b: total(t.at[0].set(0)[IDS], b), 5),
  "row in front": (
    lambda t, b: total(jnp.concatenate([jnp.ones((1, 3)), t])[IDS], b),
    5,
  ),
  "some columns": (lambda t, b: total(t[:, :2][IDS], b[:2]), 5),
  "reshape": (lambda t, b: total(t.reshape(7, 1, 3)[IDS], b), 5),
  "broadcast": (
    lambda t, b: total(jnp.broadcast_to(t[:, None], (7, 2, 3))[IDS], b),
    5,
  ),
}
# The order of the sums differs.
MORE_LOOKUPS = {
  "two lookups": (lambda t, b: total(t[IDS], b) + total(t[IDS + 1], b), 10),
  "scan of remat": (
    lambda t, b: scan(jax.checkpoint(lambda i: total(t[i], b))),
    5,
  ),
  # The inner loop becomes a `closed_call`.
  "remat of scan of remat of scan": (
    jax.checkpoint(
      lambda t, b: scan(
        jax.checkpoint(
          lambda i: scan(lambda j: total(t[(i + j) % 7], b), jnp.sin)
        ),
        jnp.sin,
      )
    ),
    25,
  ),
  "table in a carry": (
    lambda t, b: jax.lax.scan(
      lambda c, i: ((c[0], c[1] + total(c[0][i], b)), None),
      (t, jnp.float32(0)),
      IDS,
    )[0][1],
    5,
  ),
  "vmap of scan": (
    lambda t, b: jax.vmap(lambda i: scan(lambda j: total(t[(i + j) % 7], b)))(
      IDS
    ).sum(),
    25,
  ),
  "cast table": (lambda t, b: total(t.astype(jnp.bfloat16)[IDS], b), 5),
  "split": (
    lambda t, b: sum(total(x[IDS], b[:1]) for x in jnp.split(t, 3, axis=1)),
    15,
  ),
}
# The operation that the warning names.
DENSE = {
  "tied output": (
    lambda t, b: total(t[IDS], b) + (b @ t.T).sum(),
    "dot_general",
  ),
  "squares": (lambda t, b: total(t[IDS], b) + (t**2).sum(), "mul"),
  "columns": (lambda t, b: total(t[IDS], b) + total(t[:, 0], 1), "pad"),
  "most rows": (lambda t, b: total(t[IDS], b) + total(t[1:], b), "pad"),
  "one-hot": (lambda t, b: total(jax.nn.one_hot(IDS, 7) @ t, b), "dot_general"),
  "clipped gradient": (lambda t, b: total(clip_gradient(t)[IDS], b), "min"),
  "in a loop": (
    lambda t, b: scan(lambda i: (t[i] * b).sum() * (t @ b).sum()),
    "dot_general",
  ),
}
PROGRAMS = ONE_LOOKUP | MORE_LOOKUPS | DENSE


def differentiate(name, t, b):
  """Returns losses and gradients with rows, and those of `jax.grad`."""
  fn = lambda p: (PROGRAMS[name][0](p["t"], p["b"]), None)
  params = {"t": t, "b": b}
  mask = {"t": True, "b": False}
  return (
    gradient_rows.value_and_grad(fn, params, mask),
    jax.value_and_grad(fn, has_aux=True)(params),
  )


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
  (loss, _), grads = result
  (want_loss, _), want = wanted
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
  assert f"{DENSE[name][1]} (" in message
  assert "gradient_rows_test.py:" in message


def test_gradient_is_the_same_outside_of_jit():
  name = "scan of remat"
  check(*jax.device_get(differentiate(name, TABLE, BIAS)), exact=False)


def test_vmap_of_a_step_gives_rows_of_each_example():
  def fn(t, ids):
    loss = lambda t: (total(t[ids], 1.0), None)
    return gradient_rows.value_and_grad(loss, t, True)[1]

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


def test_other_leaves_may_be_integers_and_arrays_of_any_rank():
  params = {
    "steps": jnp.arange(3),
    "bias": jnp.arange(7.0),
    "blocks": jnp.ones((7, 2, 3)),
    "table": TABLE,
  }

  def fn(p):
    loss = p["bias"][IDS].sum() + p["blocks"][IDS].sum() + p["table"][0].sum()
    return loss, {"steps": p["steps"]}

  mask = dict.fromkeys(params, True) | {"steps": False}

  @jax.jit
  def run(params):
    (_, aux), grads = gradient_rows.value_and_grad(fn, params, mask)
    want = jax.grad(lambda p: fn(p)[0], allow_int=True)(params)
    assert grads.pop("steps").dtype == want.pop("steps").dtype
    return aux, grads, want

  aux, grads, want = jax.device_get(run(params))
  assert aux["steps"].tolist() == [0, 1, 2]
  for name in ("bias", "blocks", "table"):
    np.testing.assert_array_equal(dense(grads[name]), want[name])


def test_other_gradients_are_narrow_on_request():
  def fn(p):
    w = p["w"].astype(jnp.bfloat16)
    rows = p["t"].astype(jnp.bfloat16)[IDS]
    return (rows * w).sum().astype(jnp.float32), None

  params, mask = {"t": TABLE, "w": BIAS}, {"t": True, "w": False}
  _, grads = gradient_rows.value_and_grad(fn, params, mask, narrow=True)
  assert grads["w"].dtype == jnp.bfloat16
  assert grads["t"].values.dtype == jnp.float32


def test_compiled_gradient_has_no_array_of_the_size_of_the_table():
  rows, columns, ids = 1_000_000, 16, 512

  def step(t, b, ids):
    def fn(p):
      x = total(p["t"][ids], p["b"]) + scan(lambda i: total(p["t"][i], 1.0))
      return jax.checkpoint(lambda t: x + total(t[ids + 1], 1.0))(p["t"]), None

    return gradient_rows.value_and_grad(
      fn, {"t": t, "b": b}, {"t": True, "b": False}
    )

  memory = (
    jax.jit(step)
    .lower(
      jax.ShapeDtypeStruct((rows, columns), jnp.float32),
      jax.ShapeDtypeStruct((columns,), jnp.float32),
      jax.ShapeDtypeStruct((ids,), jnp.int32),
    )
    .compile()
    .memory_analysis()
  )
  assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 2**20
