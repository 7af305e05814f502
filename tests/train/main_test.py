"""The program: flags, mistakes, virtual devices, signals, and a kill."""

import functools
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

from forked_programs import wait_until
import jax
import pytest
import tiny
from tree_equality import assert_trees_equal

import flaxshard as fs
from flaxshard.checkpoint import step_files

_ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
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
  start = functools.partial(programs.start, tmp_path)
  usage, fields, names = map(start, ("--help", "--help=config", "--list"))
  failed = {
    facts: start("--config=digits", "--workdir=w", *arguments.split())
    for arguments, facts in mistakes.items()
  }
  # absl exits with 1 after --help.
  printed = usage.end(code=1)
  for part in ("--config.batch_size=", "--workdir", "metrics.jsonl"):
    assert part in printed, part
  assert "mesh.virtual_devices" in fields.end()
  assert "lm_text_fsdp" in names.end()
  for facts, program in failed.items():
    output = program.end(code=1)
    for fact in ("flaxshard: ", *facts.split()):
      assert fact in output, output
    assert "Traceback" not in output
    assert len(output.splitlines()) <= 4


@pytest.mark.slow
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


@pytest.mark.slow
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


# Each step is saved, so that the kill interrupts a save.
_ARGUMENTS = (
  "--config=digits",
  "--config.model={'name': 'cnn', 'features': (), 'dense': 8}",
  "--config.batch_size=16",
  "--config.num_train_steps=8",
  "--config.log_every_steps=1",
  "--config.checkpoint_every_steps=1",
  "--config.max_to_keep=3",
  "--config.schedule=constant",
  "--config.writer=none",
)


def saved_steps(workdir) -> list[int]:
  path = workdir / "checkpoints"
  names = os.listdir(path) if path.exists() else []
  return sorted(int(name) for name in names if name.isdecimal())


@pytest.mark.slow
def test_a_killed_run_ends_like_an_uninterrupted_one(programs, tmp_path):
  killed = tmp_path / "killed"

  def start(name):
    return programs.start(tmp_path, *_ARGUMENTS, f"--workdir={name}")

  program = start("killed")
  reached = lambda: max(saved_steps(killed), default=0) >= 3
  wait_until(reached, "step 3", program)
  program.kill()
  # The newest three are kept; an older one may be half deleted.
  for step in saved_steps(killed)[-3:]:
    assert step_files.verify(str(killed / "checkpoints" / str(step)))
  for program in (start("whole"), start("killed")):
    program.end()
  states = (fs.load(tmp_path / name).state for name in ("killed", "whole"))
  assert_trees_equal(*map(jax.tree.leaves, states))
  assert tiny.untimed_rows(killed) == tiny.untimed_rows(tmp_path / "whole")
  rows = tiny.rows(tmp_path / "whole")
  assert [row["step"] for row in rows] == list(range(1, 9))
