"""A center in a bucket, with a local server of Google Cloud Storage."""

import bucket_servers
import pytest
import tiny

import flaxshard as fs
from flaxshard import train
from flaxshard.center import heads
from flaxshard.center.store import Objects

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("servers")]


def test_a_generation_protects_an_object():
  objects = Objects(f"gs://{bucket_servers.BUCKET}/objects/center")
  content, missing = objects.read("head")
  assert content is None
  first = objects.write("head", b"1", missing)
  assert objects.write("head", b"other", missing) is None
  assert objects.read("head") == (b"1", first)
  assert objects.write("head", b"2", first) not in (None, first)
  assert objects.write("head", b"3", first) is None
  objects.write_all({"commit/0/a": b"a", "commit/1/b": b"b"})
  assert objects.list("commit/0/") == ["commit/0/a"]
  objects.delete(["commit/0/a", "commit/0/missing"])
  assert objects.list("commit/") == ["commit/1/b"]


def test_a_run_in_a_bucket_ends_with_one_center():
  workdir = f"gs://{bucket_servers.BUCKET}/run"
  agn = {
    "communication_period": 3,
    "commit": "mean",
    "transport": {"deadline": 2.0, "grace": 0.2},
  }
  config = tiny.config(
    wrappers=(("agn", agn),),
    precision="float32",
    mesh={"replica": 2},
  )
  with tiny.importable("buckets_test", __name__):
    states = [
      train.train_and_evaluate(
        config, workdir, worker_id=k, num_workers=2, start_timeout=0.2
      )
      for k in range(2)
    ]
  head, _ = heads.read(Objects(f"{workdir}/center"), 0)
  assert head.finished and head.version == 2
  loaded = [fs.load(path) for path in (workdir, f"{workdir}/workers/1")]
  assert [x.step for x in loaded] == [8, 8]
  kernels = [x.params["head"]["kernel"].tolist() for x in (*states, *loaded)]
  assert kernels == [kernels[0]] * 4
  rows = [tiny.rows(x.workdir)[-1] for x in loaded]
  assert rows[0]["eval_loss"] == pytest.approx(rows[1]["eval_loss"])
