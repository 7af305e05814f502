"""The division of parameters into fragments, and the steps of their commits."""

import jax.numpy as jnp
import numpy as np
import pytest

import flaxshard as fs
from flaxshard.wrappers import agn_schedule


@pytest.mark.parametrize(
  ("sizes", "parts", "expected"),
  [
    ([5], 1, (0,)),
    ([1, 1, 1, 1], 2, (0, 0, 1, 1)),
    ([9, 1, 1, 1], 2, (0, 1, 1, 1)),
    ([9, 1, 1, 1], 3, (0, 1, 2, 2)),
    ([1, 9, 1], 3, (0, 1, 2)),
    ([0, 0, 0], 3, (0, 1, 2)),
  ],
)
def test_divide(sizes, parts, expected):
  assert agn_schedule.divide(sizes, parts) == expected


def test_divide_is_contiguous_balanced_and_never_empty():
  rng = np.random.default_rng(0)
  for _ in range(200):
    count = int(rng.integers(1, 12))
    sizes = rng.integers(0, 20, count).tolist()
    parts = int(rng.integers(1, count + 1))
    numbers = agn_schedule.divide(sizes, parts)
    assert sorted(set(numbers)) == list(range(parts))
    assert list(numbers) == sorted(numbers)
    # The division does not depend on the unit: sizes of one replica or of all.
    assert agn_schedule.divide([8 * s for s in sizes], parts) == numbers
    largest = max(
      sum(s for s, n in zip(sizes, numbers, strict=True) if n == part)
      for part in range(parts)
    )
    assert largest == least_largest(sizes, parts)


def least_largest(sizes, parts):
  """Returns the largest part of the best division, by dynamic programming."""
  if parts == 1:
    return sum(sizes)
  return min(
    max(sum(sizes[:i]), least_largest(sizes[i:], parts - 1))
    for i in range(1, len(sizes) - parts + 2)
  )


def test_fragments_by_path_leaves_out_parameters_without_a_gradient():
  tree = {"a": jnp.ones(4), "b": {"c": None, "d": jnp.ones(3)}, "e": None}
  numbers = agn_schedule.fragments_by_path(tree, 2)
  assert numbers == {"a": 0, "b/d": 1}
  with pytest.raises(ValueError, match=r"fragments=3 must be at most .* 2"):
    agn_schedule.fragments_by_path(tree, 3)
  chosen = agn_schedule.select(tree, numbers, (1,))
  assert chosen["a"] is None and chosen["b"]["d"] is tree["b"]["d"]


@pytest.mark.parametrize(
  ("kwargs", "steps"),
  [
    ({}, {12: (0,), 24: (0,)}),
    ({"fragments": 3}, {4: (0,), 8: (1,), 12: (2,), 16: (0,), 24: (2,)}),
    ({"fragments": 3, "fragment_offset": 0}, {12: (0, 1, 2)}),
    ({"fragments": 3, "fragment_offset": 1}, {10: (0,), 11: (1,), 12: (2,)}),
  ],
)
def test_due_and_arriving(kwargs, steps):
  agn = fs.AGN(12, **kwargs)
  found = {s: agn_schedule.due(agn, s) for s in range(25)}
  found = {s: fragments for s, fragments in found.items() if fragments}
  assert found == {**found, **steps}
  delayed = fs.AGN(12, **kwargs, delay=5)
  late = {s: agn_schedule.arriving(delayed, s) for s in range(30)}
  assert {s - 5: f for s, f in late.items() if f} == found
