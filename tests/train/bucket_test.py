"""Runs whose workdir is in a bucket, with local servers of GCS and S3."""

import json
import pathlib
import signal
import subprocess
import sys
import time

import bucket_servers
import numpy as np
import pytest
import two_processes
import xla_flags

from flaxshard import checkpoint
from flaxshard.checkpoint import inspection
from flaxshard.core import bucket_lock
from flaxshard.core import directories
from flaxshard.core import files

pytestmark = pytest.mark.slow

_STEPS = 6
_TESTS = pathlib.Path(__file__).parents[1]

# Trains with one or two processes, and keeps the final state on the disk.
_TRAIN = """
import sys
import numpy as np
import jax
workdir, output, tests = sys.argv[-3:]
sys.path.insert(0, tests)
import tiny
from flaxshard import train

config = tiny.config(
  num_train_steps=6, log_every_steps=1, eval_every_steps=3,
  checkpoint_every_steps=2, writer="tensorboard", precision="float32",
)
state = train.train_and_evaluate(config, workdir)
if jax.process_index() == 0:
  np.savez(output, *map(np.asarray, jax.tree.leaves(state.params)))
"""


@pytest.fixture(scope="module", autouse=True)
def servers():
  with bucket_servers.start():
    yield


@pytest.fixture(params=["gs", "s3"])
def folder(request):
  """A folder of its own for each test and scheme."""
  test = request.node.name.partition("[")[0]
  return f"{request.param}://{bucket_servers.BUCKET}/{test}"


def _start(workdir, output):
  return subprocess.Popen(
    [sys.executable, "-c", _TRAIN, str(workdir), str(output), str(_TESTS)],
    env=bucket_servers.child_environment(XLA_FLAGS=xla_flags.FAST),
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
    text=True,
  )


def _finish(process):
  log = process.communicate(timeout=240)[1]
  assert process.returncode == 0, log
  return log


def _rows(path):
  rows = [json.loads(line) for line in files.read_bytes(path).splitlines()]
  return [{k: v for k, v in r.items() if k != "steps_per_second"} for r in rows]


@pytest.fixture(scope="module")
def local_run(tmp_path_factory):
  """The final parameters and the rows of a run on the disk."""
  path = tmp_path_factory.mktemp("local")
  _finish(_start(path / "run", path / "final.npz"))
  return path / "final.npz", _rows(path / "run" / "metrics.jsonl")


def _assert_same_arrays(path, expected_path, **tolerance):
  with np.load(path) as found, np.load(expected_path) as expected:
    assert found.files == expected.files and len(found.files) > 3
    for name in expected.files:
      np.testing.assert_allclose(found[name], expected[name], **tolerance)


def test_a_killed_run_with_a_damaged_step_ends_like_a_local_run(
  folder, tmp_path, local_run
):
  process = _start(folder, tmp_path / "none.npz")
  deadline = time.monotonic() + 120
  while not files.exists(f"{folder}/checkpoints/4/commit_success.txt"):
    assert process.poll() is None, process.stderr.read()
    assert time.monotonic() < deadline
    time.sleep(0.05)
  process.send_signal(signal.SIGKILL)
  process.communicate()
  assert files.exists(f"{folder}/.lock")
  rows = _rows(f"{folder}/metrics.jsonl")
  assert [row["step"] for row in rows][:4] == [1, 2, 3, 4]

  newest = max(inspection.steps(f"{folder}/checkpoints"))
  path = max(
    (p for p in files.find(f"{folder}/checkpoints/{newest}/default")),
    key=files.size,
  )
  files.write_bytes(path, bytes(files.size(path)))
  # The output of a save that was killed.
  files.write_bytes(f"{folder}/checkpoints/{newest + 1}/default/x", b"half")

  log = _finish(_start(folder, tmp_path / "final.npz"))
  assert f"{path} has" in log and "took over from" in log
  _assert_same_arrays(tmp_path / "final.npz", local_run[0], rtol=0)
  assert _rows(f"{folder}/metrics.jsonl") == local_run[1]
  names = files.list_names(folder)
  assert {"config.json", "data.json", "training.png"} < set(names)
  assert [n.partition(".out.")[0] for n in names].count("events") == 2
  # Nothing is locked any more.
  assert ".lock" not in names
  assert ".lock" not in files.list_names(f"{folder}/checkpoints")
  assert sorted(inspection.steps(f"{folder}/checkpoints"))[-1] == _STEPS
  assert f"{newest}.damaged" in files.list_names(f"{folder}/checkpoints")

  # A step that is copied to the disk is read there, by Orbax's own handlers.
  files_of_step = files.find(f"{folder}/checkpoints/{_STEPS}")
  for path in files_of_step:
    copy = tmp_path / path.partition("checkpoints/")[2]
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_bytes(files.read_bytes(path))
  assert inspection.main([str(tmp_path), "--verify"]) == 0
  assert inspection.main([folder, "--verify"]) == 0


# In S3 the processes write arrays with our own handler.
@pytest.mark.parametrize("folder", ["s3"], indirect=True)
def test_two_processes_train_in_a_bucket(folder, tmp_path, local_run):
  output = tmp_path / "final.npz"
  two_processes.run(_TRAIN, folder, str(output), str(_TESTS))
  # Sums over two processes are rounded in another order.
  _assert_same_arrays(output, local_run[0], rtol=1e-4, atol=1e-5)
  rows = _rows(f"{folder}/metrics.jsonl")
  assert [row["step"] for row in rows] == list(range(1, _STEPS + 1))
  assert sorted(inspection.steps(f"{folder}/checkpoints")) == [2, 4, 6]


_HOLD = """
import sys, time
from flaxshard.core import bucket_lock, directories
bucket_lock.RENEW_SECONDS = 0.2
directories.lock("workdir", sys.argv[1])
print("locked", flush=True)
time.sleep(120)
"""


def test_a_lock_is_refused_while_it_is_renewed_and_free_after_a_kill(folder):
  holder = subprocess.Popen(
    [sys.executable, "-c", _HOLD, folder],
    env=bucket_servers.child_environment(),
    stdout=subprocess.PIPE,
    text=True,
  )
  try:
    assert holder.stdout.readline() == "locked\n"
    with pytest.raises(ValueError, match=f"workdir.*process {holder.pid} on"):
      directories.lock("workdir", folder)
  finally:
    holder.kill()
    holder.communicate()
  start = time.monotonic()
  directories.lock("workdir", folder)()
  assert time.monotonic() - start < bucket_lock.LEASE_SECONDS / 2
  assert not files.exists(f"{folder}/.lock")


def test_a_stale_lock_of_another_machine_is_taken_over(folder, monkeypatch):
  monkeypatch.setattr(bucket_lock, "LEASE_SECONDS", 2.5)
  path = f"{folder}/.lock"
  content = {"holder": "process 1 on elsewhere", "process_space": "there"}
  files.write_bytes(path, json.dumps(content).encode())
  start = time.monotonic()
  release = directories.lock("workdir", folder)
  assert time.monotonic() - start >= 2.5
  with pytest.raises(ValueError, match="this process"):
    directories.lock("workdir", folder)
  again = directories.lock("workdir", folder, reentrant=True)
  release()
  assert files.exists(path)
  again()
  assert not files.exists(path)


def test_a_process_that_lost_its_lock_stops_writing(folder, monkeypatch):
  monkeypatch.setattr(bucket_lock, "RENEW_SECONDS", 0.2)
  release = directories.lock("workdir", folder)
  directories.check_lock("workdir", folder)
  winner = {"holder": "process 1 on elsewhere"}
  files.write_bytes(f"{folder}/.lock", json.dumps(winner).encode())
  deadline = time.monotonic() + 60
  with pytest.raises(ValueError, match=r"workdir.*process 1 on elsewhere"):
    while time.monotonic() < deadline:
      directories.check_lock("workdir", folder)
      time.sleep(0.1)
  release()
  # The lock of the other program stays.
  assert files.exists(f"{folder}/.lock")


def test_only_one_of_several_writers_satisfies_a_precondition(folder):
  path = f"{folder}/.lock"
  first = bucket_lock._write(path, b"first", None)
  assert first is not None
  assert bucket_lock._write(path, b"second", None) is None
  second = bucket_lock._write(path, b"second", first)
  assert second is not None
  assert bucket_lock._write(path, b"third", first) is None
  assert bucket_lock._read(path).content == b"second"


def test_files_in_a_bucket(folder):
  with files.atomic_write(f"{folder}/a/b/file") as f:
    f.write("text")
  assert files.is_dir(f"{folder}/a") and not files.is_file(f"{folder}/a")
  assert files.is_file(f"{folder}/a/b/file")
  assert files.list_names(folder) == ["a"]
  assert files.size(f"{folder}/a/b/file") == 4
  files.rename(f"{folder}/a", f"{folder}/c")
  assert not files.exists(f"{folder}/a")
  assert files.files_in(folder) == [f"{folder}/c/b/file"]
  with files.open_to_read(f"{folder}/c/b/file") as f:
    assert f.read() == b"text"
  with pytest.raises(OSError, match=f"{folder}/none"):
    files.read_bytes(f"{folder}/none")
  files.remove_tree(folder)
  assert not files.exists(folder)


def test_a_missing_bucket_raises(folder):
  missing = folder.replace(f"//{bucket_servers.BUCKET}/", "//no-bucket/")
  with pytest.raises(ValueError, match=f"workdir='{missing}'.*no-bucket"):
    directories.check_writable("workdir", missing)
  with pytest.raises(ValueError, match=f"directory='{missing}'.*no-bucket"):
    checkpoint.Checkpointer(missing)


def test_a_server_that_does_not_answer_raises_in_time():
  script = """
from flaxshard.core import directories
directories._BUCKET_TIMEOUT = 3.0
for scheme in ("gs", "s3"):
  try:
    directories.check_writable("workdir", f"{scheme}://bucket/run")
  except ValueError as e:
    print(e)
"""
  url = "http://127.0.0.1:9"  # nobody listens
  done = subprocess.run(
    [sys.executable, "-c", script],
    env=bucket_servers.child_environment(
      STORAGE_EMULATOR_HOST=url, AWS_ENDPOINT_URL=url
    ),
    capture_output=True,
    text=True,
    timeout=60,
  )
  lines = done.stdout.splitlines()
  assert len(lines) == 2, done
  assert "workdir='gs://bucket/run' cannot be written" in lines[0]
  assert "workdir='s3://bucket/run' cannot be written" in lines[1]
