"""Runs whose workdir is in a bucket, with local servers of GCS and S3."""

import json
import pathlib
import signal
import subprocess
import sys
import time

import bucket_servers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
import two_processes

import flaxshard as fs
from flaxshard import checkpoint
from flaxshard import train
from flaxshard.checkpoint import inspection
from flaxshard.core import bucket_lock
from flaxshard.core import conditional_objects
from flaxshard.core import directories
from flaxshard.core import files
from flaxshard.train import mirror

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("servers")]

_TESTS = pathlib.Path(__file__).parents[1]
_CONFIG = dict(
  num_train_steps=6,
  log_every_steps=1,
  eval_every_steps=3,
  checkpoint_every_steps=2,
  writer="tensorboard",
  precision="float32",
)

# Trains in this process, or in each of two.
_TRAIN = """
import json, sys
import numpy as np
import jax
workdir, output, tests, config = sys.argv[-4:]
sys.path.insert(0, tests)
import tiny
from flaxshard import train

state = train.train_and_evaluate(tiny.config(**json.loads(config)), workdir)
if jax.process_index() == 0:
  np.savez(output, *map(np.asarray, jax.tree.leaves(state.params)))
"""


@pytest.fixture(params=["gs", "s3"])
def folder(request):
  """A folder of its own for each test and scheme."""
  test = request.node.name.partition("[")[0]
  return f"{request.param}://{bucket_servers.BUCKET}/{test}"


def _arguments(workdir, output):
  return [str(workdir), str(output), str(_TESTS), json.dumps(_CONFIG)]


def _train(workdir):
  """Returns the final parameters of a run in this process."""
  state = train.train_and_evaluate(tiny.config(**_CONFIG), str(workdir))
  return [np.asarray(x) for x in jax.tree.leaves(state.params)]


def _rows(path):
  rows = [json.loads(line) for line in files.read_bytes(path).splitlines()]
  return [{k: v for k, v in r.items() if k != "steps_per_second"} for r in rows]


@pytest.fixture(scope="module")
def local_run(tmp_path_factory):
  """The final parameters and the rows of a run on the disk."""
  workdir = tmp_path_factory.mktemp("local")
  return _train(workdir), _rows(workdir / "metrics.jsonl")


def _assert_same_arrays(found, expected, **tolerance):
  assert len(found) == len(expected) > 3
  for x, y in zip(found, expected, strict=True):
    np.testing.assert_allclose(x, y, **tolerance)


def _damage(step_dir):
  """Overwrites the largest object of a step with zeros; returns its path."""
  path = max(files.find(f"{step_dir}/default"), key=files.size)
  files.write_bytes(path, bytes(files.size(path)))
  return path


def _copy_to_disk(step_dir, directory):
  """Copies a step to a directory of the disk, and verifies it."""
  for path in files.find(step_dir):
    copy = directory / path.removeprefix(f"{step_dir.rpartition('/')[0]}/")
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_bytes(files.read_bytes(path))
  assert inspection.main([str(directory), "--verify"]) == 0


# The next test saves and restores in S3.
@pytest.mark.parametrize("folder", ["gs"], indirect=True)
def test_a_killed_run_with_a_damaged_step_ends_like_a_local_run(
  folder, tmp_path, local_run, caplog
):
  process = subprocess.Popen(
    [sys.executable, "-c", _TRAIN, *_arguments(folder, "none.npz")],
    env=bucket_servers.child_environment(),
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
    text=True,
  )
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
  path = _damage(f"{folder}/checkpoints/{newest}")
  # The output of a save that was killed.
  files.write_bytes(f"{folder}/checkpoints/{newest + 1}/default/x", b"half")

  found = _train(folder)
  assert f"{path} has" in caplog.text and "took over from" in caplog.text
  _assert_same_arrays(found, local_run[0], rtol=0)
  assert _rows(f"{folder}/metrics.jsonl") == local_run[1]
  names = files.list_names(folder)
  assert {"config.json", "data.json", "training.png"} < set(names)
  assert [n.partition(".out.")[0] for n in names].count("events") == 2
  # Nothing is locked any more.
  assert ".lock" not in names
  assert ".lock" not in files.list_names(f"{folder}/checkpoints")
  assert max(inspection.steps(f"{folder}/checkpoints")) == 6
  assert f"{newest}.damaged" in files.list_names(f"{folder}/checkpoints")
  _copy_to_disk(f"{folder}/checkpoints/6", tmp_path)
  assert inspection.main([folder, "--verify"]) == 0


def _create_state(value):
  state = fs.TrainState.create(
    apply_fn=None,
    params={
      "w": jnp.full((8, 4), value),
      "b": jnp.full(3, value, jnp.bfloat16),
    },
    tx=optax.adam(0.1),
  )
  return state.replace(step=jnp.int32(value))


# The run above saves and restores in Google Cloud Storage.
@pytest.mark.parametrize("folder", ["s3"], indirect=True)
def test_steps_are_saved_restored_and_copied(folder, tmp_path, caplog):
  with fs.Checkpointer(folder) as checkpointer:
    for step in (1, 2, 3):
      checkpointer.save(step, _create_state(float(step)))
  _damage(f"{folder}/3")
  with fs.Checkpointer(folder, max_to_keep=2) as checkpointer:
    restored = checkpointer.restore(_create_state(0.0))
    assert checkpointer.restored_step == 2
    np.testing.assert_array_equal(restored.params["w"], np.full((8, 4), 2.0))
    assert restored.params["b"].dtype == jnp.bfloat16
    checkpointer.save(3, restored.replace(step=jnp.int32(3)))
  assert "step 3 is damaged" in caplog.text
  assert files.list_names(folder) == ["2", "3", "3.damaged"]

  # Orbax's own handlers read a copy.
  _copy_to_disk(f"{folder}/3", tmp_path)
  restored = fs.Checkpointer(tmp_path).restore(_create_state(0.0))
  np.testing.assert_array_equal(restored.params["w"], np.full((8, 4), 2.0))


# In S3 the processes write arrays with our own handler.
@pytest.mark.parametrize("folder", ["s3"], indirect=True)
def test_two_processes_train_in_a_bucket(folder, tmp_path, local_run):
  output = tmp_path / "final.npz"
  two_processes.run(_TRAIN, *_arguments(folder, output))
  with np.load(output) as found:
    # Sums over two processes are rounded in another order.
    _assert_same_arrays(
      [found[x] for x in found.files], local_run[0], rtol=1e-4, atol=1e-5
    )
  rows = _rows(f"{folder}/metrics.jsonl")
  assert [row["step"] for row in rows] == list(range(1, 7))
  assert sorted(inspection.steps(f"{folder}/checkpoints")) == [2, 4, 6]
  # One process loads the run, and exports it into the bucket.
  loaded = fs.load(folder)
  assert loaded.step == 6
  _assert_same_arrays(
    jax.tree.leaves(loaded.state.params), local_run[0], rtol=1e-4, atol=1e-5
  )
  fs.export(loaded, f"{folder}_model")
  assert sorted(files.list_names(f"{folder}_model")) == [
    "model.json",
    "model.safetensors",
    "model.stablehlo",
  ]
  with pytest.raises(ValueError, match="overwrite"):
    fs.export(loaded, f"{folder}_model")


_HOLD = """
import sys, time
from flaxshard.core import bucket_lock, directories
bucket_lock.RENEW_SECONDS = 0.2
for folder in sys.argv[1:]:
  directories.lock("workdir", folder)
print("locked", flush=True)
time.sleep(120)
"""


def test_a_lock_is_refused_while_it_is_renewed_and_free_after_a_kill():
  folders = [f"{x}://{bucket_servers.BUCKET}/held" for x in ("gs", "s3")]
  holder = subprocess.Popen(
    [sys.executable, "-c", _HOLD, *folders],
    env=bucket_servers.child_environment(),
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    text=True,
  )
  try:
    assert holder.stdout.readline() == "locked\n"
    for folder in folders:
      match = f"workdir.*process {holder.pid} on"
      with pytest.raises(ValueError, match=match):
        directories.lock("workdir", folder)
  finally:
    holder.kill()
    holder.communicate()
  start = time.monotonic()
  for folder in folders:
    directories.lock("workdir", folder)()
    assert not files.exists(f"{folder}/.lock")
  assert time.monotonic() - start < bucket_lock.LEASE_SECONDS / 2


_OTHER = json.dumps({"holder": "process 1 on elsewhere"}).encode()


def test_a_stale_lock_of_another_machine_is_taken_over(folder, monkeypatch):
  monkeypatch.setattr(bucket_lock, "LEASE_SECONDS", 1.5)
  path = f"{folder}/.lock"
  files.write_bytes(path, _OTHER)
  start = time.monotonic()
  release = directories.lock("workdir", folder)
  assert time.monotonic() - start >= 1.5
  with pytest.raises(ValueError, match="this process"):
    directories.lock("workdir", folder)
  again = directories.lock("workdir", folder, reentrant=True)
  release()
  assert files.exists(path)
  again()
  assert not files.exists(path)


def test_a_renewal_notices_that_the_lock_is_lost(folder, monkeypatch):
  monkeypatch.setattr(bucket_lock, "RENEW_SECONDS", 0.2)
  release = directories.lock("workdir", folder)
  directories.check_lock("workdir", folder)
  files.write_bytes(f"{folder}/.lock", _OTHER)
  deadline = time.monotonic() + 60
  with pytest.raises(ValueError, match=r"workdir.*process 1 on elsewhere"):
    while time.monotonic() < deadline:
      directories.check_lock("workdir", folder)
      time.sleep(0.1)
  release()
  # The lock of the other program stays.
  assert files.read_bytes(f"{folder}/.lock") == _OTHER


def _sleep_for_ten_minutes(monkeypatch):
  """Lets the clocks of the lock advance, as while a computer sleeps."""
  monkeypatch.setattr(
    bucket_lock, "_read_clocks", lambda: (time.monotonic(), time.time() + 600)
  )


def test_a_program_that_slept_writes_nothing_after_another_took_over(
  folder, monkeypatch
):
  release = directories.lock("workdir", folder)
  metrics = f"{folder}/metrics.jsonl"
  with fs.Checkpointer(f"{folder}/checkpoints") as checkpointer:
    checkpointer.save(1, _create_state(1.0))
    checkpointer.wait()
    with pytest.raises(ValueError, match="process 1 on elsewhere"):
      with mirror.open_folder(folder, ("metrics.jsonl",)) as (path, copy):
        pathlib.Path(path, "metrics.jsonl").write_text("old")
        copy(True)
        assert files.read_bytes(metrics) == b"old"
        for name in (".lock", "checkpoints/.lock"):
          files.write_bytes(f"{folder}/{name}", _OTHER)
        files.write_bytes(metrics, b"new")
        _sleep_for_ten_minutes(monkeypatch)
        pathlib.Path(path, "metrics.jsonl").write_text("older")
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
          copy(False)
          time.sleep(0.1)
    with pytest.raises(ValueError, match="process 1 on elsewhere"):
      checkpointer.save(2, _create_state(2.0))
  release()
  assert files.read_bytes(metrics) == b"new"
  assert files.read_bytes(f"{folder}/.lock") == _OTHER
  assert files.list_names(f"{folder}/checkpoints") == [".lock", "1"]


def test_a_save_is_not_completed_after_another_program_took_over(
  folder, monkeypatch
):
  path_of_other = f"{folder}/1/of_the_other_program"
  with fs.Checkpointer(folder) as checkpointer:
    checkpointer.save(0, _create_state(0.0))
    checkpointer.wait()
    check, calls = bucket_lock.check, []

    def lose(path):
      calls.append(path)
      if len(calls) > 1:
        files.write_bytes(path_of_other, b"")
        raise bucket_lock.LockedError("process 1 on elsewhere")
      check(path)

    monkeypatch.setattr(bucket_lock, "check", lose)
    checkpointer.save(1, _create_state(1.0))
    with pytest.raises(checkpoint.SaveError, match="process 1 on elsewhere"):
      checkpointer.wait()
  assert list(inspection.steps(folder)) == [0]
  assert files.exists(path_of_other)


def test_a_renewal_whose_answer_was_lost_keeps_the_lock(folder, monkeypatch):
  release = directories.lock("workdir", folder)
  files.write_bytes(f"{folder}/.lock", bucket_lock._describe_self(1000))
  _sleep_for_ten_minutes(monkeypatch)
  directories.check_lock("workdir", folder)
  release()
  assert not files.exists(f"{folder}/.lock")


def test_only_one_of_several_writers_satisfies_a_precondition(folder):
  store = conditional_objects.open_object(f"{folder}/.lock")
  missing = conditional_objects.read(store).stamp.generation

  def write(content, version):
    return conditional_objects.write(store, content, version, lambda _: False)

  first = write(b"first", missing)
  assert first is not None
  assert write(b"second", missing) is None
  second = write(b"second", first)
  assert second is not None
  assert write(b"third", first) is None
  assert write(None, first) is None
  assert conditional_objects.read(store).value == b"second"


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
    fs.Checkpointer(missing)


def test_a_server_that_does_not_answer_raises_in_time():
  script = """
from flaxshard.core import directories
directories._BUCKET_TIMEOUT = 1.0
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
