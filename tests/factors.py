"""Factorizations of integers, for tests of meshes."""


def factorizations(count, rank):
  """Returns all tuples of `rank` positive integers with the product `count`."""
  if rank == 1:
    return [(count,)]
  return [
    (first, *rest)
    for first in range(1, count + 1)
    if count % first == 0
    for rest in factorizations(count // first, rank - 1)
  ]
