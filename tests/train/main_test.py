"""The command line: flags, errors, virtual devices and signals."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import forked_programs
import pytest
import tiny

_ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
def test_help_and_mistakes(tmp_path):
  """Mistakes in flags, in the config and in the workdir are one message."""
  file = tmp_path / "file"
  file.write_text("")
  mistakes = {
    "--config.batch_size=0": ("config.batch_size", "0"),
    "--local_processes=3 --config.mesh.virtual_devices=8": (
      "config.mesh.virtual_devices=8",
      "--local_processes=3",
    ),
    "--local_processes=2 --process_id=1": ("--process_id",),
    "--num_processes=2": ("--process_id", "--coordinator_address"),
    f"--workdir={file}": (str(file), "cannot be written"),
  }
  with forked_programs.Programs() as programs:

    def start(*arguments):
      return programs.start(tmp_path, *arguments)

    usage, fields, names = map(start, ("--help", "--help=config", "--list"))
    failed = {
      facts: start(
        "--config=digits", f"--workdir={tmp_path}/w", *arguments.split()
      )
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
      for fact in ("flaxshard: ", *facts):
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
def test_virtual_devices_and_signals(tmp_path):
  """Starts a process without the eight devices of the test environment."""
  workdir = tmp_path / "run"
  with forked_programs.Programs() as programs:
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
    forked_programs.wait_until(has_row, "row", program)
    program.send(signal.SIGTERM)
    for _ in range(20):  # an impatient user
      time.sleep(0.1)
      if not program.has_ended:
        program.send(signal.SIGINT)
    log = program.end(code=128 + signal.SIGTERM)
  assert "8 of 8 cpu devices, Strategy(replica=4, m0=2)" in log
  step = int(re.search(r"SIGTERM: saved step (\d+)", log)[1])
  assert str(step) in os.listdir(workdir / "checkpoints")
