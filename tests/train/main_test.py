"""The command line: flags, errors, virtual devices and signals."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
import tiny
import xla_flags

_ROOT = pathlib.Path(__file__).parents[2]


def run_main(*arguments: str) -> subprocess.CompletedProcess:
  return subprocess.run(
    [sys.executable, "-m", "flaxshard", *arguments],
    cwd=_ROOT,
    capture_output=True,
    text=True,
    timeout=120,
  )


@pytest.mark.slow
def test_help_describes_flags_and_files():
  result = run_main("--help")
  for part in ("--config.batch_size=", "--workdir", "metrics.jsonl", "Ctrl-C"):
    assert part in result.stdout, part


@pytest.mark.slow
def test_mistakes_end_with_one_message(tmp_path):
  """Mistakes in flags, in the config and in the workdir."""
  file = tmp_path / "file"
  file.write_text("")
  for argument, facts in (
    ("--config.batch_siz=3", ("batch_siz", "Did you mean 'batch_size'")),
    ("--config.batch_size=0", ("config.batch_size", "0")),
    (
      "--local_processes=3 --config.mesh.virtual_devices=8",
      ("config.mesh.virtual_devices=8", "--local_processes=3"),
    ),
    ("--local_processes=2 --process_id=1", ("--process_id",)),
    ("--num_processes=2", ("--process_id", "--coordinator_address")),
    (f"--workdir={file}", (str(file), "it is a file")),
  ):
    result = run_main(
      *("--config=configs/digits.py", f"--workdir={tmp_path}"),
      *argument.split(),
    )
    assert result.returncode == 1
    for fact in ("flaxshard: ", *facts):
      assert fact in result.stderr, result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) <= 4


@pytest.mark.slow
def test_import_starts_no_backend_and_is_lazy():
  code = """
import sys
import flaxshard
heavy = {"orbax.checkpoint", "grain", "clu", "matplotlib", "tensorflow"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
assert flaxshard.Checkpointer is flaxshard.checkpoint.Checkpointer
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
  process = subprocess.Popen(
    [
      *(sys.executable, "-m", "flaxshard", "--config=configs/digits.py"),
      f"--workdir={workdir}",
      *("--config.mesh.virtual_devices=8", "--config.mesh.logical_devices=2"),
      "--config.mesh.split={'inputs': (1, 2, 1, 1)}",
      *("--config.model.features=(4,)", "--config.model.dense=8"),
      *("--config.precision=float32", "--config.wrappers=()"),
      *("--config.writer=none", "--config.log_every_steps=2"),
      "--config.num_train_steps=100000",
    ],
    cwd=_ROOT,
    env={**os.environ, "XLA_FLAGS": xla_flags.FAST},
    stderr=subprocess.PIPE,
    text=True,
  )
  try:
    deadline = time.monotonic() + 120
    while not (workdir / "metrics.jsonl").exists() or not tiny.rows(workdir):
      assert process.poll() is None and time.monotonic() < deadline
      time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    for _ in range(20):  # an impatient user
      time.sleep(0.1)
      process.send_signal(signal.SIGINT)
    _, log = process.communicate(timeout=60)
  finally:
    process.kill()
  assert process.returncode == 128 + signal.SIGTERM
  assert "8 of 8 cpu devices, Strategy(replica=4, m0=2)" in log
  step = int(re.search(r"SIGTERM: saved step (\d+)", log)[1])
  assert str(step) in os.listdir(workdir / "checkpoints")
