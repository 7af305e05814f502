"""The files in launch/ for workers of AGN over hosts."""

import os
import pathlib
import stat
import subprocess
import sys

import pytest
import yaml

_ROOT = pathlib.Path(__file__).parents[1]
_SLURM = _ROOT / "launch" / "workers.sbatch"
_JOB = yaml.safe_load((_ROOT / "launch" / "workers.yaml").read_text())
_POD = _JOB["spec"]["template"]["spec"]


@pytest.mark.slow
def test_shellcheck_finds_nothing():
  # Beside the Python of the tests, if it is not in the path.
  environ = {
    **os.environ,
    "PATH": os.pathsep.join(
      [os.environ["PATH"], os.path.dirname(sys.executable)]
    ),
  }
  try:
    subprocess.run(["shellcheck", _SLURM], check=True, env=environ)
  except FileNotFoundError:
    pytest.skip("needs shellcheck: pip install '.[test-launch]'")


@pytest.fixture
def slurm(tmp_path):
  """Returns a function that runs a job of the array as Slurm does."""
  programs = tmp_path / "bin"
  programs.mkdir()
  activate = tmp_path / "venv" / "bin" / "activate"
  activate.parent.mkdir(parents=True)
  activate.write_text("")

  def run(*arguments, srun, state="RUNNING", **variables):
    for name, text in {
      "scontrol": f'echo "$@" >> {tmp_path}/scontrol',
      "squeue": f"echo {state}",
      "srun": srun,
    }.items():
      path = programs / name
      path.write_text(f"#!/bin/sh\n{text}\n")
      path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return subprocess.run(
      ["bash", _SLURM, *arguments],
      cwd=tmp_path,
      capture_output=True,
      text=True,
      timeout=60,
      env={
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "VENV": str(tmp_path / "venv"),
        "SLURM_JOB_ID": "4713",
        "SLURM_ARRAY_TASK_COUNT": "4",
        "SLURM_ARRAY_TASK_MIN": "0",
        "SLURM_ARRAY_TASK_ID": "2",
        "SLURM_CPUS_PER_TASK": "8",
        **variables,
      },
    )

  return run


def test_job_of_the_array_is_a_worker(slurm):
  srun = 'echo "$JAX_PROCESS_ID of $JAX_NUM_PROCESSES: $@"'
  result = slurm("--config=c.py", srun=srun)
  assert result.returncode == 0, result.stderr
  command = "--cpus-per-task=8 python -m flaxshard --config=c.py"
  assert result.stdout == f"2 of 4: {command}\n"


@pytest.mark.parametrize(
  ("code", "state", "is_requeued"),
  [
    (0, "RUNNING", False),
    (1, "RUNNING", False),
    (137, "RUNNING", True),
    (143, "RUNNING", True),
    (143, "COMPLETING", False),
  ],
)
def test_worker_that_was_killed_is_queued_again(
  slurm, tmp_path, code, state, is_requeued
):
  result = slurm("--config=c.py", srun=f"exit {code}", state=state)
  assert result.returncode == code, result.stderr
  calls = tmp_path / "scontrol"
  assert calls.exists() == is_requeued
  if is_requeued:
    assert calls.read_text() == "requeue 4713\n"


def test_slurm_without_arguments_shows_the_usage(slurm):
  result = slurm(srun="exit 1")
  assert result.returncode == 2
  assert "--config" in result.stderr


@pytest.mark.slow
def test_job_follows_the_schema_of_kubernetes():
  kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="needs pip install '.[test-launch]'"
  )
  for version in ("1.31", "1.34"):
    kubernetes_validate.validate(_JOB, version, strict=True)


def test_pods_are_workers_that_start_again_one_by_one():
  spec = _JOB["spec"]
  assert spec["parallelism"] == spec["completions"]
  assert spec["completionMode"] == "Indexed"
  assert spec["backoffLimitPerIndex"] > 0
  assert _POD["restartPolicy"] == "Never"  # as backoffLimitPerIndex asks for
  [container] = _POD["containers"]
  values = {x["name"]: x.get("value") for x in container["env"]}
  assert values["JAX_NUM_PROCESSES"] == str(spec["completions"])
  [port] = [x["containerPort"] for x in container["ports"]]
  for name in ("FLAXSHARD_WORKER_ADDRESS", "FLAXSHARD_WORKER_BIND"):
    assert values[name].endswith(f":{port}")
  [config, workdir] = container["command"][3:]
  assert (_ROOT / config.removeprefix("--config=")).is_file()
  [mount] = container["volumeMounts"]
  assert workdir.removeprefix("--workdir=").startswith(mount["mountPath"])
