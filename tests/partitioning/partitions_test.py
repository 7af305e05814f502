"""Specs for splitting a tensor over logical devices."""

import itertools
import math

from factors import factorizations
import jax
import pytest

from flaxshard.partitioning import logical_devices
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.partitioning import specs as specs_lib

P = jax.sharding.PartitionSpec


def abstract_mesh(axes):
  """Returns a mesh that may have more devices than the test machine."""
  return jax.sharding.AbstractMesh((2, *axes.values()), ("replica", *axes))


@pytest.mark.parametrize("count", [1, 12, 64])
def test_every_partition_has_a_spec_on_prime_axes(count):
  axes = mesh_lib.prime_axes(count)
  mesh = abstract_mesh(axes)
  for rank in range(1, 6):
    for pieces in factorizations(count, rank):
      spec = logical_devices.partition_spec(mesh, pieces, pieces)
      used = [specs_lib.axes_of(entry) for entry in spec]
      products = tuple(math.prod(axes[a] for a in names) for names in used)
      assert products == pieces
      names = list(itertools.chain(*used))
      assert sorted(names) == sorted(axes)
      if len(set(axes.values())) <= 1:
        assert names == list(axes)  # row-major
      for entry in used:
        assert list(entry) == sorted(entry, key=list(axes).index)


def test_partition_of_eight_on_prime_axes():
  mesh = abstract_mesh({"m0": 2, "m1": 2, "m2": 2})
  spec = logical_devices.partition_spec(mesh, (3, 28, 28, 1), [1, 2, 4, 1])
  assert spec == P(None, "m0", ("m1", "m2"), None)


@pytest.mark.parametrize(
  "pieces, spec",
  [
    ((1, 2, 4, 1), P(None, "model", "data", None)),
    ((8, 1), P(("model", "data"), None)),
  ],
)
def test_partition_on_named_axes(pieces, spec):
  mesh = abstract_mesh({"model": 2, "data": 4, "one": 1})
  assert logical_devices.partition_spec(mesh, pieces, pieces) == spec


@pytest.mark.parametrize(
  "axes, pieces",
  [
    ({"model": 8}, (1, 2, 4, 1)),
    ({f"a{i}": 4 for i in range(8)}, (2, 2**15)),
  ],
)
def test_partition_that_the_axes_do_not_allow_raises(axes, pieces):
  mesh = abstract_mesh(axes)
  with pytest.raises(ValueError, match="partition_dimensions") as e:
    logical_devices.partition_spec(mesh, pieces, pieces)
  assert str(pieces) in str(e.value)
  assert str(axes) in str(e.value)
