"""Objects in a store, runs in buckets, and what objects contain."""

import bucket_servers
import center_workers
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tree_equality import assert_trees_equal

import flaxshard as fs
from flaxshard import train
from flaxshard.center import encoding
from flaxshard.center import heads
from flaxshard.center import store


@pytest.fixture
def s3():
  with bucket_servers.start_s3() as server:
    yield server


@pytest.fixture(
  params=["memory", "files", "s3", pytest.param("gs", marks=pytest.mark.slow)]
)
def url(request, tmp_path):
  if request.param == "files":
    return str(tmp_path / "center")
  if request.param == "memory":
    return center_workers.new_directory()
  request.getfixturevalue("s3" if request.param == "s3" else "servers")
  return f"{request.param}://{bucket_servers.BUCKET}/objects/center"


def test_a_write_needs_the_generation_that_was_read(url):
  one, two = store.Objects(url), store.Objects(url)
  content, missing = one.read("head/0")
  assert content is None
  first = one.write("head/0", b"1", missing)
  assert two.read("head/0") == (b"1", first)
  assert two.write("head/0", b"2", missing) is None
  second = two.write("head/0", b"2", first)
  assert second not in (None, first)
  # An older generation does not count.
  assert one.write("head/0", b"1", first) is None
  assert one.read("head/0") == (b"2", second)
  two.delete(["head/0"])
  assert one.write("head/0", b"3", second) is None
  assert one.read("head/0")[0] is None


def test_objects_of_unique_names(url):
  one, two = store.Objects(url), store.Objects(url)
  one.write_all({"center/0/1-a": b"a", "center/0/2-b": b"b", "slots/0/1": b"s"})
  one.write_all({f"slots/1/{k}": b"x" for k in ("1-a", "1-b", "2")})
  one.write_all({"center/10/1": b"c"})
  keys = ["center/0/2-b", "missing", "center/0/1-a", "center/0/2-b"]
  for objects in (one, two):
    assert objects.read_all(keys) == [b"b", None, b"a", b"b"]
  assert one.keys("center/0/") == ["center/0/1-a", "center/0/2-b"]
  assert one.keys("c") == ["center/0/1-a", "center/0/2-b", "center/10/1"]
  assert one.keys("commit/") == one.read_all([]) == []
  one.delete_before("slots/1/1-b")
  assert one.keys("slots/") == ["slots/0/1", "slots/1/1-b", "slots/1/2"]
  one.delete(["center/0/1-a", "missing"])
  assert two.keys("center/0/") == ["center/0/2-b"]
  assert two.read_all(["center/0/1-a"]) == [None]
  assert two.num_bytes == 3


def test_a_write_is_refused_by_the_server_itself(s3, monkeypatch):
  # TensorStore asks for the ETag first. Here another write comes in between.
  objects = store.Objects("s3://bucket/run/center")
  name = "bucket/run/center/head"
  put = s3.RequestHandlerClass.do_PUT

  def put_after_another(self):
    s3.objects[name] = b"another"
    put(self)

  _, missing = objects.read("head")
  for before in (None, b"1"):
    s3.objects.clear()
    generation = before and objects.write("head", before, missing)
    with monkeypatch.context() as patch:
      patch.setattr(s3.RequestHandlerClass, "do_PUT", put_after_another)
      assert objects.write("head", b"2", generation or missing) is None
    assert objects.read("head")[0] == b"another"
    assert s3.requests.count(("PUT", name, 412)) == (2 if before else 1)


@pytest.mark.slow
def test_a_run_in_a_bucket_of_google_ends_with_one_center(servers):
  workdir = f"gs://{bucket_servers.BUCKET}/run"
  transport = {"deadline": 2.0, "grace": 0.2}
  agn = {"communication_period": 3, "commit": "mean", "transport": transport}
  config = tiny.config(
    wrappers=(("agn", agn),),
    precision="float32",
    mesh={"replica": 2},
    checkpoint_every_steps=8,
  )
  with tiny.importable("store_test", __name__):
    states = [
      train.train_and_evaluate(
        config, workdir, worker_id=k, num_workers=2, start_timeout=0.2
      )
      for k in range(2)
    ]
  head = heads.read(store.Objects(f"{workdir}/center"))
  assert head.finished and head.versions == [2]
  loaded = [fs.load(path) for path in (workdir, f"{workdir}/workers/1")]
  assert [x.step for x in loaded] == [8, 8]
  kernels = [x.params["head"]["kernel"].tolist() for x in (*states, *loaded)]
  assert kernels == [kernels[0]] * 4


# What objects contain.

TREE = {
  "step": 3,
  "name": "a b",
  "scale": 0.1,
  "shape": [2, 3],
  "nothing": None,
  "arrays": {
    "w/a": np.arange(6, dtype=np.float32).reshape(2, 3).T,
    "half": np.ones(3, jnp.bfloat16),
    "numbers": np.arange(-3, 3, dtype=np.int8),
    "pairs": np.array([15, 240], np.uint8),
    "flag": np.array(True),
    "z": np.array([1 + 2j], np.complex64),
    "empty": np.zeros((0, 2), np.float32),
    "scalar": np.float32(2.5),
  },
}
LARGEST = {"int8": 127, "int4": 7}
RNG = np.random.default_rng(0)


def test_a_tree_is_the_same_after_it_was_bytes():
  found = encoding.unpack("key", encoding.pack(TREE))
  assert {**found, "arrays": 0} == {**TREE, "arrays": 0}
  assert_trees_equal(found["arrays"], TREE["arrays"])


def test_every_damage_is_found():
  content = encoding.pack(TREE)
  damaged = [content[:n] for n in range(0, len(content), 7)]
  for n in range(0, len(content), 5):
    damaged.append(content[:n] + bytes([content[n] ^ 4]) + content[n + 1 :])
  damaged += [content + b"\0", bytes(4), bytes(12), bytes(100), b"{}"]
  for found in damaged:
    with pytest.raises(encoding.DamagedError, match="a/key"):
      encoding.unpack("a/key", found)


def round_trip(x, dtype):
  return encoding.decode(encoding.encode(x, dtype))


def test_known_values():
  x = np.array([[254, -254, 2], [3, 0, -1]], np.float32)
  encoded = encoding.encode(x, "int8")
  assert encoded["numbers"].tolist() == [127, -127, 1, 2, 0, 0]
  assert encoded["scales"].tolist() == [2.0]
  assert round_trip(x, "int8").tolist() == [[254, -254, 2], [4, 0, 0]]
  x = np.array([7, -7, 0.6], np.float32)
  encoded = encoding.encode(x, "int4")
  # Two numbers plus eight in a byte, the first one in the low bits.
  assert encoded["numbers"].tolist() == [15 + (1 << 4), 9 + (8 << 4)]
  assert round_trip(x, "int4").tolist() == [7, -7, 1]
  x = np.array([1 + 2**-7, 1 + 2**-9], np.float32)
  assert round_trip(x, "bfloat16").tolist() == [1 + 2**-7, 1.0]


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("size", [1, 2, 255, 256, 257, 1000])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_errors_are_at_most_half_a_scale(dtype, size, kind):
  x = RNG.normal(size=size) * 10 ** RNG.uniform(-3, 3, size)
  # A block of zeros, or of numbers whose scale would be zero.
  x[256:512] = 1e-45 if size > 257 else 0
  x = np.asarray(jnp.asarray(x, kind))
  found = round_trip(x, dtype)
  assert found.dtype == np.float32
  wide = x.astype(np.float32)
  for start in range(0, size, 256):
    block = slice(start, start + 256)
    scale = np.abs(wide[block]).max() / LARGEST[dtype]
    assert np.abs(found[block] - wide[block]).max() <= 0.5001 * scale + 1e-45
  # What is exact stays so.
  np.testing.assert_allclose(round_trip(found, dtype), found, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4", None])
def test_other_arrays_stay(dtype):
  for name in ("numbers", "z", "empty", "scalar"):
    x = TREE["arrays"][name]
    assert_trees_equal(round_trip(x, dtype), np.asarray(x))
