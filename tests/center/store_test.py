"""Objects in a store: conditions, bytes and damage."""

import center_workers
import jax.numpy as jnp
import numpy as np
import pytest

from flaxshard.center import store

TREE = {
  "step": 3,
  "name": "a b",
  "scale": 0.1,
  "shape": [2, 3],
  "nothing": None,
  "arrays": {
    "w/a": np.arange(6, dtype=np.float32).reshape(2, 3).T,
    "half": np.asarray(jnp.ones(3, jnp.bfloat16)),
    "numbers": np.arange(-3, 3, dtype=np.int8),
    "pairs": np.array([15, 240], np.uint8),
    "flag": np.array(True),
    "z": np.array([1 + 2j], np.complex64),
    "empty": np.zeros((0, 2), np.float32),
    "scalar": np.float32(2.5),
  },
}


def test_a_tree_is_the_same_after_it_was_bytes():
  found = store.unpack("key", store.pack(TREE))
  assert {**found, "arrays": 0} == {**TREE, "arrays": 0}
  assert found["arrays"].keys() == TREE["arrays"].keys()
  for name, x in TREE["arrays"].items():
    y = found["arrays"][name]
    assert (y.dtype, y.shape) == (x.dtype, x.shape), name
    np.testing.assert_array_equal(x, y)
    assert not y.flags.writeable


def test_every_damage_is_found():
  content = store.pack(TREE)
  damaged = [content[:n] for n in range(0, len(content), 7)]
  for n in range(0, len(content), 5):
    damaged.append(content[:n] + bytes([content[n] ^ 4]) + content[n + 1 :])
  damaged += [content + b"\0", bytes(4), bytes(12), bytes(100), b"{}"]
  for found in damaged:
    with pytest.raises(store.DamagedError, match="a/key"):
      store.unpack("a/key", found)


@pytest.fixture(params=["memory", "files"])
def url(request, tmp_path):
  if request.param == "files":
    return str(tmp_path / "center")
  return center_workers.new_directory()


def test_a_write_needs_the_generation_that_was_read(url):
  one, two = store.Objects(url), store.Objects(url)
  content, missing = one.read("head/0")
  assert content is None
  first = one.write("head/0", b"1", missing)
  assert two.read("head/0") == (b"1", first)
  assert two.write("head/0", b"2", missing) is None
  second = two.write("head/0", b"2", first)
  # The same content again is another generation.
  assert one.write("head/0", b"1", first) is None
  third = one.write("head/0", b"2", second)
  assert third not in (None, second)
  two.delete(["head/0"])
  assert one.write("head/0", b"3", third) is None
  assert one.read("head/0")[0] is None


def test_objects_of_unique_names(url):
  one, two = store.Objects(url), store.Objects(url)
  one.write_all({"center/0/1-a": b"a", "center/0/2-b": b"b", "slots/0/1": b"s"})
  one.write_all({"center/10/1": b"c"})
  keys = ["center/0/2-b", "missing", "center/0/1-a", "center/0/2-b"]
  for objects in (one, two):
    assert objects.read_all(keys) == [b"b", None, b"a", b"b"]
  assert one.list("center/0/") == ["center/0/1-a", "center/0/2-b"]
  assert one.list("c") == ["center/0/1-a", "center/0/2-b", "center/10/1"]
  assert one.list("commit/") == one.read_all([]) == []
  one.delete(["center/0/1-a", "missing"])
  assert two.list("center/0/") == ["center/0/2-b"]
  assert two.read_all(["center/0/1-a"]) == [None]
  assert two.num_bytes == 3 and one.num_bytes >= 4
