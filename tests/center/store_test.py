"""Objects in a store: conditions, bytes and damage; runs in buckets."""

import bucket_servers
import center_workers
import pytest
import s3_server
import tiny

import flaxshard as fs
from flaxshard import train
from flaxshard.center import heads
from flaxshard.center import store


@pytest.fixture
def s3():
  with s3_server.start() as server:
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
