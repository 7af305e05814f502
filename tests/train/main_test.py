"""The program: flags, mistakes, virtual devices, signals, a kill, a bucket."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import bucket_servers
from etils import epath
from forked_programs import wait_until
import pytest
import tiny
from tree_equality import assert_trees_equal

import flaxshard as fs
from flaxshard import train
from flaxshard.checkpoint import __main__ as inspection
from flaxshard.checkpoint import steps
from flaxshard.core import files
from flaxshard.train import report

pytestmark = pytest.mark.slow

_DRAW = report.draw
_ROOT = pathlib.Path(__file__).parents[2]


def test_help_and_mistakes(programs, tmp_path):
  """Mistakes that only a process finds are one message, too."""
  (tmp_path / "file").write_text("")
  mistakes = {
    "--local_processes=3 --config.mesh.virtual_devices=8": (
      "config.mesh.virtual_devices=8 --local_processes=3"
    ),
    "--local_processes=2 --process_id=1": "--process_id=1 --local_processes=2",
    "--plan=v5e:2x2 --num_processes=2": "--num_processes=2 --plan=v5e:2x2",
    f"--workdir={tmp_path}/file": f"{tmp_path}/file cannot be written",
    f"--synchronize --workdir={tmp_path}/file/run": "cannot be written",
  }
  start = lambda *arguments: programs.start(tmp_path, *arguments)
  usage, fields, listed = map(start, ("--help", "--help=config", "--list"))
  failed = {
    facts: start("--config=digits", "--workdir=w", *arguments.split())
    for arguments, facts in mistakes.items()
  }
  # absl exits with 1 after --help.
  printed = usage.end(code=1)
  for part in ("--config.batch_size=", "--workdir", "metrics.jsonl"):
    assert part in printed, part
  assert "mesh.virtual_devices" in fields.end()
  assert "lm_text_fsdp" in listed.end()
  for facts, program in failed.items():
    output = program.end(code=1)
    for fact in ("flaxshard: ", *facts.split()):
      assert fact in output, output
    assert "Traceback" not in output
    assert len(output.splitlines()) <= 4


_FULL = """
import atexit
import resource

from absl import logging

import flaxshard as fs


def get_config():
  atexit.register(lambda: logging.error("of the user"))
  # The output of the program is a file as well.
  resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
  return fs.config.read("digits")
"""


def test_a_save_that_fails_is_one_message(programs, tmp_path):
  (tmp_path / "full.py").write_text(_FULL)
  fields = "--config.num_train_steps=1", "--config.writer=none"
  program = programs.start(
    tmp_path, "--config=full.py", "--workdir=run", *fields
  )
  output = program.end(code=1)
  assert "flaxshard: step 1 could not be saved in " in output
  # TensorStore may print tracebacks of its own.
  assert "/orbax/" not in output, output
  assert "of the user" in output


def test_import_starts_no_backend_and_is_lazy():
  # Nor does a check, which comes before a run sets the number of devices.
  code = """
import sys
import flaxshard
heavy = {"orbax.checkpoint", "grain", "clu", "matplotlib", "tensorflow"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
assert flaxshard.Checkpointer is flaxshard.checkpoint.Checkpointer
config = flaxshard.config.read("digits")
for name in ("adafactor", "adamw", "ftrl", "lion", "rmsprop", "sgd"):
  config.optimizer = {"name": name}
  flaxshard.config.check(config)
import jax
# JAX refuses this once a backend has started.
jax.config.update("jax_num_cpu_devices", 3)
assert jax.device_count() == 3
"""
  # Without XLA_FLAGS, which set the number of devices for the other tests.
  environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
  result = subprocess.run(
    [sys.executable, "-c", code],
    cwd=_ROOT,
    env={**environment, "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
  )
  assert result.returncode == 0, result.stderr


def test_virtual_devices_and_signals(programs, tmp_path):
  """Starts a process without the eight devices of the test environment."""
  workdir = tmp_path / "run"
  program = programs.start(
    tmp_path,
    *("--config=digits", "--workdir=run", "--config.writer=none"),
    *("--config.mesh.virtual_devices=8", "--config.mesh.logical_devices=2"),
    "--config.mesh.split={'inputs': (1, 2, 1, 1)}",
    *("--config.model.features=(4,)", "--config.model.dense=8"),
    *("--config.precision=float32", "--config.wrappers=()"),
    *("--config.num_train_steps=100000", "--config.log_every_steps=2"),
  )
  has_row = lambda: workdir.exists() and bool(tiny.rows(workdir))
  wait_until(has_row, "row", program)
  program.send(signal.SIGTERM)
  for _ in range(20):  # an impatient user
    time.sleep(0.1)
    if not program.has_ended:
      program.send(signal.SIGINT)
  log = program.end(code=128 + signal.SIGTERM)
  assert "8 of 8 cpu devices, Strategy(replica=4, m0=2)" in log
  step = int(re.search(r"SIGTERM: saved step (\d+)", log)[1])
  assert str(step) in os.listdir(workdir / "checkpoints")


# A run whose workdir is in a bucket, with a local server.

_CONFIG = dict(
  num_train_steps=6,
  log_every_steps=1,
  eval_every_steps=3,
  checkpoint_every_steps=2,
  writer="tensorboard",
  precision="float32",
)


def damage(step_dir):
  """Shortens the largest object of a step; returns its path."""
  found = files.files_in(f"{step_dir}/default")
  sizes = {p: p.stat().length for p in found}
  path = max(sizes, key=sizes.get)
  path.write_bytes(bytes(sizes[path] - 1))
  return path


def names(folder):
  return sorted(p.name for p in epath.Path(folder).iterdir())


def test_a_killed_run_in_a_bucket_ends_like_a_local_one(
  servers, programs, caplog, tmp_path, monkeypatch
):
  """With a damaged step, too."""
  folder = f"gs://{bucket_servers.BUCKET}/killed"
  checkpoints = f"{folder}/checkpoints"
  local = tmp_path / "local"
  monkeypatch.setattr(report, "draw", _DRAW)
  config = tiny.config(**_CONFIG)
  wanted = train.train_and_evaluate(config, str(local))
  (tmp_path / "my_config.py").write_text(
    f"import tiny\n\ndef get_config():\n  return tiny.config(**{_CONFIG})\n"
  )
  program = programs.start(
    tmp_path, "--config=my_config.py", f"--workdir={folder}", **os.environ
  )
  saved = epath.Path(f"{checkpoints}/4/commit_success.txt")
  wait_until(saved.exists, "step 4", program)
  program.kill()
  assert [row["step"] for row in tiny.rows(folder)][:4] == [1, 2, 3, 4]

  newest = max(steps.find(epath.Path(checkpoints)))
  path = damage(f"{checkpoints}/{newest}")
  # The output of a save that was killed.
  half = epath.Path(f"{checkpoints}/{newest + 1}/default/x")
  half.write_bytes(b"half")

  found = train.train_and_evaluate(config, folder)
  assert f"{path} has" in caplog.text
  assert_trees_equal(found.params, wanted.params)
  assert tiny.untimed_rows(folder) == tiny.untimed_rows(local)
  assert {"config.json", "data.json", "training.png"} < set(names(folder))
  kinds = [name.partition(".out.")[0] for name in names(folder)]
  assert kinds.count("events") == 2
  assert max(steps.find(epath.Path(checkpoints))) == 6
  assert f"{newest}.damaged" in names(checkpoints)
  assert inspection.main([folder, "--verify"]) == 0
  fs.export(folder, f"{folder}_model")
  assert "model.json" in names(f"{folder}_model")
  with pytest.raises(ValueError, match="another folder"):
    fs.export(folder, f"{folder}_model")

  # A step that is copied to the disk is a step there.
  for path in files.files_in(f"{checkpoints}/6"):
    copy = tmp_path / "disk/6" / path.relative_to(f"{checkpoints}/6")
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_bytes(path.read_bytes())
  assert inspection.main([str(tmp_path / "disk"), "--verify"]) == 0
