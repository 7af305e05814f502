"""`nn.Embed` casts rows, with the values and derivatives of casting a table."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxshard.sparse import late_casts

# Row 1 is used 64 times; row 9 does not exist.
IDS = jnp.array([*[1] * 64, -1, 9])
WEIGHTS = jax.random.normal(jax.random.key(0), (66, 3))


def derivatives(embed, table, tangent):
  """Returns rows, their derivative, and a gradient that sums many rows."""
  look_up = lambda t: embed.apply({"params": {"embedding": t}}, IDS)
  loss = lambda t: (WEIGHTS * jnp.nan_to_num(jnp.sin(look_up(t)))).sum()
  rows, change = jax.jvp(look_up, (table,), (tangent,))
  curvature = jax.jvp(jax.grad(loss), (table,), (tangent,))[1]
  return rows, change, jax.grad(loss)(table), curvature


def gathers_wide_rows(embed, table):
  look_up = lambda t: embed.apply({"params": {"embedding": t}}, IDS)
  with late_casts.cast_after_lookup():
    return "custom_jvp_call" in str(jax.make_jaxpr(look_up)(table))


def test_rows_and_derivatives_are_those_of_embed_bit_for_bit():
  embed = nn.Embed(7, 3, dtype=jnp.bfloat16)
  tables = jax.random.normal(jax.random.key(1), (2, 7, 3))

  @jax.jit
  def run(table, tangent):
    want = derivatives(embed, table, tangent)
    with late_casts.cast_after_lookup():
      return derivatives(embed, table, tangent), want

  for got, want in zip(*run(*tables), strict=True):
    assert got.dtype == want.dtype
    # NumPy does not take two bfloat16 NaNs for equal.
    np.testing.assert_array_equal(*(x.astype(jnp.float32) for x in (got, want)))
  assert gathers_wide_rows(embed, tables[0])


class MyEmbed(nn.Embed):
  """A class whose lookup may be another one."""


@pytest.mark.parametrize(
  ("embed", "dtype"),
  [
    (nn.Embed(7, 3), jnp.float32),
    (nn.Embed(7, 3, dtype=jnp.float32), jnp.bfloat16),
    # It repeats its row for ids beyond the table.
    (nn.Embed(1, 3, dtype=jnp.bfloat16), jnp.float32),
    (MyEmbed(7, 3, dtype=jnp.bfloat16), jnp.float32),
    (
      nn.Embed(7, 3, dtype=jnp.bfloat16, promote_dtype=lambda *x, **_: x),
      jnp.float32,
    ),
  ],
)
def test_other_lookups_stay_as_they_are(embed, dtype):
  shape = jax.ShapeDtypeStruct((embed.num_embeddings, 3), dtype)
  assert not gathers_wide_rows(embed, shape)


def test_other_interceptors_are_called():
  embed = nn.Embed(7, 3, dtype=jnp.bfloat16)
  table = jnp.zeros((7, 3))
  seen = []

  def log(next_fn, args, kwargs, context):
    seen.append(context.method_name)
    return next_fn(*args, **kwargs)

  with nn.intercept_methods(log):
    assert gathers_wide_rows(embed, table)
  assert seen.count("__call__") == 1
  with late_casts.cast_after_lookup(), nn.intercept_methods(log):
    embed.apply({"params": {"embedding": table}}, IDS)
  assert seen.count("__call__") == 2
