"""A center in a bucket of S3, with a local server."""

import center_workers
import jax
import numpy as np
import optax
import pytest
import s3_server

import flaxshard as fs
from flaxshard.center import heads
from flaxshard.center.store import Objects

URL = "s3://bucket/run"


@pytest.fixture
def server():
  with s3_server.start() as started:
    yield started


def test_an_etag_protects_an_object(server):
  objects = Objects(f"{URL}/center")
  content, missing = objects.read("head")
  assert content is None
  first = objects.write("head", b"1", missing)
  assert objects.write("head", b"other", missing) is None
  assert objects.read("head") == (b"1", first)
  assert objects.write("head", b"2", first) not in (None, first)
  assert objects.write("head", b"3", first) is None
  objects.write_all({"commit/0/a": b"a", "commit/1/b": b"b"})
  assert objects.read_all(["commit/0/a", "commit/0/missing"]) == [b"a", None]
  assert objects.list("commit/0/") == ["commit/0/a"]
  objects.delete(["commit/0/a", "commit/0/missing"])
  assert objects.list("commit/") == ["commit/1/b"]


def test_a_write_is_refused_by_the_server_itself(server, monkeypatch):
  # TensorStore asks for the ETag first. Here another write comes in between.
  objects = Objects(f"{URL}/center")
  name = "bucket/run/center/head"
  _, missing = objects.read("head")
  handler = server.RequestHandlerClass
  put = handler.do_PUT

  def put_after_another(self):
    server.objects[name] = b"another"
    put(self)

  for before in (None, b"1"):
    generation = missing
    if before is not None:
      objects.delete(["head"])
      generation = objects.write("head", before, missing)
    with monkeypatch.context() as patch:
      patch.setattr(handler, "do_PUT", put_after_another)
      assert objects.write("head", b"2", generation) is None
    assert objects.read("head")[0] == b"another"
    assert ("PUT", name, 412) in server.requests
    server.requests.clear()


@pytest.mark.filterwarnings("ignore:AGN. communication_period")
@pytest.mark.parametrize("commit", ["sum", "sequential"])
def test_two_workers_commit_in_a_bucket(server, commit):
  state = fs.TrainState.create(
    apply_fn=None,
    params={"w": np.zeros(3, np.float32)},
    tx=optax.sgd(1.0),
    wrappers=[fs.AGN(2, commit, transport="store")],
  )
  step = jax.jit(lambda s, x: s.minimize(lambda p: (p["w"] * x).sum())[0])
  with center_workers.Workers([state] * 2, step, URL) as group:
    for _ in range(4):
      group.step([np.float32(1), np.float32(2)])
    states = group.finish()
  # The mean of the two steps of each of four commits.
  for state in states:
    np.testing.assert_array_equal(state.params["w"], [-6.0] * 3)
  head, _ = heads.read(Objects(f"{URL}/center"), 0)
  assert head.finished and head.step == 4
  kinds = {name.split("/")[3] for name in server.objects}
  assert kinds == {"run", "head", "center", "slots", "worker"}
