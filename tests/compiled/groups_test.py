"""Device groups and the mesh axes that they span."""

import pytest

from flaxshard.compiled import groups


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    ("replica_groups={{0,1},{2,3}}, x", ((0, 1), (2, 3))),
    ("replica_groups={}, x", ((0, 1, 2, 3),)),
    ("replica_groups=[2,2]<=[4], x", ((0, 1), (2, 3))),
    ("replica_groups=[2,2]<=[2,2]T(1,0), x", ((0, 2), (1, 3))),
    ("replica_groups=[4,1]<=[4]", ((0,), (1,), (2,), (3,))),
    ("replica_groups=mesh['a'=2,'b'=2] {'a'}, x", ((0, 2), (1, 3))),
    ("replica_groups=mesh['a'=2,'b'=2] {'b'}, x", ((0, 1), (2, 3))),
    ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}", ((0, 1, 2, 3),)),
    ("replica_groups=mesh['a'=4] {'a':(1)2}", ((0, 2), (1, 3))),
    ("replica_groups=mesh['a'=4] {'a':(2)2}", ((0, 1), (2, 3))),
    (
      "replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}, x",
      ((0, 1), (2, 3)),
    ),
    (
      "replica_groups=mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'a'}",
      ((0, 1), (2, 3)),
    ),
    ("dimensions={0}", None),
  ],
)
def test_replica_groups(text, expected):
  assert groups.replica_groups(text, 4) == expected
