"""fs.testing.assert_traffic on programs for virtual CPU devices."""

import functools
import re

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from flaxshard.testing import assert_traffic
from flaxshard.testing import Traffic

MESH = jax.sharding.Mesh(
  np.array(jax.devices()[:8]).reshape(4, 2, 1), ("data", "model", "one")
)


def _shape(shape, *spec):
  sharding = jax.NamedSharding(MESH, P(*spec))
  return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def _step(params, x):
  def loss(params):
    return (jnp.tanh(x @ params["w"]) ** 2).mean()

  value, grads = jax.value_and_grad(loss)(params)
  return {"params": {"w": params["w"] - grads["w"]}, "loss": value}


@functools.cache
def _compiled():
  params = {"w": _shape((16, 32))}
  lowered = jax.jit(_step).lower(params, _shape((64, 16), "data"))
  return lowered, lowered.compile()


WEIGHT_BYTES = 16 * 32 * 4


@pytest.mark.parametrize(
  "expected",
  [
    {"all-reduce": "data"},
    {"all-reduce": ("data",)},
    {"all-reduce": ("data", "one")},
    {"all-reduce": Traffic("data", nbytes=WEIGHT_BYTES)},
    {"all-reduce": [Traffic("data", in_conditional=False)]},
  ],
)
def test_expected_traffic_passes(expected):
  for program in _compiled():
    # The loss adds four bytes to the gradients.
    assert_traffic(program, MESH, expected, tolerance=0.01)
  assert_traffic(_compiled()[1], MESH, {}, ignore_below=3000)


@pytest.mark.parametrize(
  ("expected", "options", "message"),
  [
    ({}, {}, "unexpected: all-reduce over data: 2,052 bytes"),
    ({"all-reduce": "model"}, {}, "missing: all-reduce over model"),
    ({"all-reduced": "data"}, {}, "missing: all-reduced over data"),
    (
      {"all-gather": "data"},
      {},
      r"unexpected: .* bytes, tests/testing_test.py:\d+ \[jit\(_st",
    ),
    (
      {"all-reduce": Traffic("data", nbytes=1000)},
      {"tolerance": 0.5},
      "all-reduce over data: 2,052 bytes, expected 1,000",
    ),
    (
      {"all-reduce": "data"},
      {"max_bytes": 2051},
      "2,052 bytes, more than max_bytes 2,051",
    ),
    (
      {"all-reduce": Traffic("data", in_conditional=True)},
      {},
      "missing: all-reduce over data",
    ),
  ],
)
def test_other_traffic_fails(expected, options, message):
  with pytest.raises(AssertionError) as error:
    assert_traffic(_compiled()[1], MESH, expected, **options)
  assert re.search(message, str(error.value))


def _in_branch(x):
  psum = lambda x: jax.lax.psum(x, "data")
  rare = jax.lax.cond(x[0, 0] > 0, psum, lambda x: x, x)
  return rare + psum(x[:, :1] * 2)


def test_a_collective_counts_for_the_entry_with_the_most_conditions():
  mapped = jax.shard_map(
    _in_branch, mesh=MESH, in_specs=P("data"), out_specs=P(), check_vma=False
  )
  compiled = jax.jit(mapped).lower(_shape((4, 8), "data")).compile()
  rare = Traffic("data", nbytes=32, in_conditional=True)
  for entries in (
    [Traffic("data", nbytes=4), rare],
    [rare, Traffic("data", nbytes=4)],
  ):
    assert_traffic(compiled, MESH, {"all-reduce": entries})
