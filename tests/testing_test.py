"""fs.testing.assert_traffic on programs for virtual CPU devices."""

import functools
import re

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import flaxshard as fs
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
    {"all-reduce": Traffic("data", purpose="gradients", nbytes=WEIGHT_BYTES)},
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
    (
      {"all-reduce": Traffic("data", purpose="metrics")},
      {},
      r"unexpected: .* gradients \(w\), tests/testing_test.py:\d+ \[jit\(_st",
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


@pytest.mark.parametrize(
  ("expected", "message"),
  [
    ({"all-reduced": "data"}, "all-reduce"),
    ({"all-reduce": "dat"}, "data"),
    ("all-reduce", "must map kinds"),
    ({"all-reduce": ["data", Traffic("model")]}, "not both"),
    ({"all-reduce": 3}, "axes must be .* got 3"),
  ],
)
def test_invalid_expectations_raise(expected, message):
  with pytest.raises(ValueError, match=message):
    assert_traffic(_compiled()[1], MESH, expected)


TWO_SUMS = """\
HloModule step, input_output_alias={ {0}: (0, {}, may-alias) }, \
num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

ENTRY %main (w: f32[8], b: f32[8]) -> (f32[8], f32[]) {
  %w = f32[8] parameter(0), metadata={op_name="state.params[\\'w\\']"}
  %b = f32[8] parameter(1), metadata={op_name="batch"}
  %square = f32[8] multiply(%b, %b)
  %grad = f32[8] all-reduce(%square), replica_groups=[2,4]<=[4,2]T(1,0), \
to_apply=%add
  %new = f32[8] subtract(%w, %grad)
  %zero = f32[] constant(0)
  %part = f32[] reduce(%b, %zero), dimensions={0}, to_apply=%add
  %loss = f32[] all-reduce(%part), replica_groups=[2,4]<=[4,2]T(1,0), \
to_apply=%add
  ROOT %out = (f32[8], f32[]) tuple(%new, %loss)
}
"""


def test_a_collective_counts_for_the_entry_with_the_most_conditions():
  metrics = Traffic("data", purpose="metrics", nbytes=4)
  expected = {"all-reduce": [Traffic("data", nbytes=32), metrics]}
  assert_traffic(TWO_SUMS, MESH, expected)


def test_invalid_fields_of_traffic_raise():
  with pytest.raises(ValueError, match="gradients"):
    Traffic("data", purpose="gradient")
  with pytest.raises(ValueError, match="nbytes"):
    Traffic("data", nbytes=-1)
  for axes in (None, 3, ["data", 3]):
    with pytest.raises(TypeError, match="axes"):
      Traffic(axes)
  assert fs.testing.Traffic is Traffic
