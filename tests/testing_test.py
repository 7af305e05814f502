"""fs.testing.assert_traffic on programs for virtual CPU devices."""

import functools

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
WEIGHT_BYTES = 16 * 32 * 4
KILO = Traffic("data", nbytes=1000)
RARE = Traffic("data", nbytes=32, in_conditional=True)


def _shape(shape, *spec):
  sharding = jax.NamedSharding(MESH, P(*spec))
  return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


@functools.cache
def _step():
  """Returns a train step, lowered and compiled."""
  loss = lambda w, x: (jnp.tanh(x @ w) ** 2).mean()

  def step(w, x):
    value, grads = jax.value_and_grad(loss)(w, x)
    return w - grads, value

  lowered = jax.jit(step).lower(_shape((16, 32)), _shape((64, 16), "data"))
  return lowered, lowered.compile()


@pytest.mark.parametrize(
  "expected",
  [
    "data",
    ("data",),
    ("data", "one"),
    Traffic("data", nbytes=WEIGHT_BYTES),
    [Traffic("data", in_conditional=False)],
  ],
)
def test_expected_traffic_passes(expected):
  for program in _step():
    # The loss adds four bytes to the gradients.
    assert_traffic(program, MESH, {"all-reduce": expected}, tolerance=0.01)
  assert_traffic(_step()[1], MESH, {}, ignore_below=3000)


@pytest.mark.parametrize(
  ("kind", "traffic", "options", "message"),
  [
    ("all-gather", "data", {}, "unexpected: all-reduce over data: 2,052 bytes"),
    ("all-gather", "data", {}, r" bytes, tests/testing_test.py:\d+ \[jit\(st"),
    ("all-reduce", "model", {}, "missing: all-reduce over model"),
    ("all-reduced", "data", {}, "missing: all-reduced over data"),
    ("all-reduce", KILO, {"tolerance": 0.5}, "2,052 bytes, expected 1,000"),
    ("all-reduce", "data", {"max_bytes": 2051}, "more than max_bytes 2,051"),
    ("all-reduce", RARE, {}, "missing: all-reduce over data"),
    ("all-reduce", "modle", {}, r"\['all-reduce'\].*'model',.* got 'modle'"),
  ],
)
def test_other_traffic_fails(kind, traffic, options, message):
  with pytest.raises((AssertionError, ValueError), match=message):
    assert_traffic(_step()[1], MESH, {kind: traffic}, **options)


def test_a_collective_counts_for_the_entry_with_the_most_conditions():
  psum = lambda x: jax.lax.psum(x, "data")

  def in_branch(x):
    rare = jax.lax.cond(x[0, 0] > 0, psum, lambda x: x, x)
    return rare + psum(x[:, :1] * 2)

  mapped = jax.shard_map(
    in_branch, mesh=MESH, in_specs=P("data"), out_specs=P(), check_vma=False
  )
  compiled = jax.jit(mapped).lower(_shape((4, 8), "data")).compile()
  always = Traffic("data", nbytes=4)
  for entries in ([always, RARE], [RARE, always]):
    assert_traffic(compiled, MESH, {"all-reduce": entries})
