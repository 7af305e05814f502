"""The files in launch/, without the clusters that they are for."""

import json
import os
import pathlib
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from unittest import mock

import pytest
import yaml

from flaxshard import ray
from flaxshard import train
from flaxshard.processes import cluster

_ROOT = pathlib.Path(__file__).parents[1]
_LAUNCH = _ROOT / "launch"
_SLURM = _LAUNCH / "slurm.sbatch"
_WORKERS = _LAUNCH / "workers.sbatch"
_JOB_SET = yaml.safe_load((_LAUNCH / "jobset.yaml").read_text())
[_REPLICATED_JOB] = _JOB_SET["spec"]["replicatedJobs"]
_JOB = _REPLICATED_JOB["template"]["spec"]
_WORKERS_JOB = yaml.safe_load((_LAUNCH / "workers.yaml").read_text())


def _write_program(path, text, interpreter="/bin/sh"):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(f"#!{interpreter}\n{text}\n")
  path.chmod(0o700)


def _run(command, programs, cwd, **variables):
  """Runs a script that finds the programs of a folder first."""
  variables["PATH"] = f"{programs}{os.pathsep}{os.environ['PATH']}"
  return subprocess.run(
    command,
    cwd=cwd,
    capture_output=True,
    text=True,
    timeout=60,
    env=os.environ | variables,
  )


@pytest.mark.slow
def test_shellcheck_finds_nothing():
  folders = f"{os.environ['PATH']}{os.pathsep}{os.path.dirname(sys.executable)}"
  shellcheck = shutil.which("shellcheck", path=folders)
  if not shellcheck:
    pytest.skip("needs shellcheck: pip install '.[test-launch]'")
  scripts = sorted([*_LAUNCH.glob("*.sh"), *_LAUNCH.glob("*.sbatch")])
  assert len(scripts) == 3
  subprocess.run([shellcheck, *scripts], check=True)


# Slurm.


@pytest.mark.parametrize(
  ("script", "code", "state", "restarts", "is_requeued"),
  [
    (_SLURM, 0, "RUNNING", "0", False),
    (_SLURM, 1, "RUNNING", "0", False),
    (_SLURM, 143, "RUNNING", "0", True),
    (_SLURM, 143, "COMPLETING", "0", False),
    (_WORKERS, 0, "RUNNING", "0", False),
    (_WORKERS, 1, "RUNNING", "", True),
    (_WORKERS, 1, "RUNNING", "2", True),
    (_WORKERS, 1, "RUNNING", "3", False),
    (_WORKERS, 137, "RUNNING", "50", True),
    (_WORKERS, 143, "COMPLETING", "0", False),
  ],
)
def test_slurm_passes_arguments_and_requeues_a_job_that_was_terminated(
  tmp_path, script, code, state, restarts, is_requeued
):
  programs, calls = tmp_path / "bin", tmp_path / "calls"
  _write_program(programs / "srun", f"""printf '%s\\n' "$@"; exit {code}""")
  _write_program(programs / "squeue", f"echo {state}")
  _write_program(programs / "scontrol", f'echo "$@" >> {calls}')
  _write_program(tmp_path / "venv" / "bin" / "activate", "")
  argument = "--config.wrappers=(('agn', {'n': 2}),)"
  result = _run(
    ["bash", script, argument],
    programs,
    tmp_path,
    VENV=str(tmp_path / "venv"),
    # What sbatch sets for the script.
    SLURM_JOB_ID="4711",
    SLURM_CPUS_PER_TASK="8",
    SLURM_ARRAY_TASK_COUNT="4",
    SLURM_ARRAY_TASK_ID="2",
    SLURM_RESTART_COUNT=restarts,
  )
  assert result.returncode == code, result.stderr
  flags = ["--num_processes=4", "--process_id=2"] if script == _WORKERS else []
  command = ["python", "-m", "flaxshard", *flags, argument]
  assert result.stdout.splitlines() == ["--cpus-per-task=8", *command]
  assert calls.exists() == is_requeued
  assert not is_requeued or calls.read_text() == "requeue 4711\n"


# Kubernetes.


@pytest.mark.slow
def test_job_follows_the_schema_of_kubernetes():
  kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="needs pip install '.[test-launch]'"
  )
  job = {**_WORKERS_JOB, "spec": _JOB}
  for version in ("1.31", "1.34"):
    kubernetes_validate.validate(job, version, strict=True)
    kubernetes_validate.validate(_WORKERS_JOB, version, strict=True)
  job["spec"] = {**_JOB, "paralelism": 2}
  with pytest.raises(kubernetes_validate.ValidationError):
    kubernetes_validate.validate(job, "1.34", strict=True)


def test_pods_of_the_job_set_find_each_other():
  [container] = _JOB["template"]["spec"]["containers"]
  environ = {entry["name"]: entry["value"] for entry in container["env"]}
  pods = range(_JOB["completions"])
  found = [
    cluster.find({**environ, "JOB_COMPLETION_INDEX": str(k)}) for k in pods
  ]
  assert [c.process_id for c in found] == [*pods]
  assert {c.num_processes for c in found} == {len(pods)}
  [port] = [entry["containerPort"] for entry in container["ports"]]
  network = _JOB_SET["spec"]["network"]
  assert network["enableDNSHostnames"]
  host = f"{_JOB_SET['metadata']['name']}-{_REPLICATED_JOB['name']}-0-0"
  address = f"{host}.{network['subdomain']}:{port}"
  assert {c.coordinator_address for c in found} == {address}
  assert _JOB["backoffLimit"] == 0


# Ray.


@pytest.mark.slow
def test_ray_example_starts_workers_that_start_again_one_by_one(
  monkeypatch, capsys
):
  pytest.importorskip("ray.train", reason="needs pip install '.[test-launch]'")
  fit = mock.Mock(return_value=ray.FitResult({"step": 8}, "/shared/run"))
  monkeypatch.setattr(ray, "fit", fit)
  config_file = str(_ROOT / "configs" / "digits_agn_host.py")
  flags = [f"--config={config_file}", "--workdir=/shared/run"]
  runpy.run_path(str(_LAUNCH / "workers.py"))["main"](flags)
  assert capsys.readouterr().out == "{'step': 8}\n"
  assert fit.call_args.args == (train.config.read(config_file), "/shared/run")
  options = fit.call_args.kwargs
  scaling = options["scaling_config"]
  assert (scaling.num_workers, scaling.num_gpus_per_worker) == (4, 1)
  assert options["run_config"].failure_config.max_failures == 20


# Cloud TPU.

_REQUEST = [
  "--name=digits",
  "--zone=us-central2-b",
  "--accelerator_type=v4-16",
  "--runtime_version=tpu-ubuntu2204-base",
]
_TRAINING = [
  "--config=configs/digits.py",
  "--workdir=gs://bucket/digits",
  "--config.wrappers=(('agn', {'n': 2}),)",
]


@pytest.fixture
def cloud_tpu(tmp_path):
  """Returns a function that runs the script with a `gcloud` of the test.

  It returns the result, and the arguments of each call of `gcloud`. That has
  three states: not found until `create`, provisioning once, and active.
  """
  calls = tmp_path / "calls"
  calls.touch()
  program = f"""
import json, pathlib, sys
calls = pathlib.Path({str(calls)!r})
before = calls.read_text()
calls.write_text(before + json.dumps(sys.argv[1:]) + "\\n")
if sys.argv[4] == "describe":
  if '"create"' not in before:
    sys.exit("NOT_FOUND")
  is_new = '"create"' in before.splitlines()[-1]
  print("PROVISIONING" if is_new else "ACTIVE")
"""
  _write_program(tmp_path / "bin" / "gcloud", program, sys.executable)
  variables = {"POLL_SECONDS": "0", "TMPDIR": str(tmp_path)}

  def run(*arguments):
    command = [_LAUNCH / "cloud_tpu.sh", *arguments]
    result = _run(command, tmp_path / "bin", _ROOT, **variables)
    return result, [json.loads(x) for x in calls.read_text().splitlines()]

  return run


def test_cloud_tpu_requests_waits_copies_and_trains(cloud_tpu, tmp_path):
  result, calls = cloud_tpu(*_REQUEST, "--spot", "--", *_TRAINING)
  assert result.returncode == 0, result.stderr
  for call in calls:
    assert call[:3] == ["compute", "tpus", "queued-resources"]
    assert call[-1] == "--zone=us-central2-b"
  assert [call[3] for call in calls] == (
    ["describe", "create", "describe", "describe", "scp", "ssh", "ssh"]
  )
  assert calls[1][4:-1] == [
    "digits",
    "--accelerator-type=v4-16",
    "--runtime-version=tpu-ubuntu2204-base",
    "--node-id=digits",
    "--spot",
  ]
  archive = tmp_path / "digits.tar.gz"
  assert calls[4][4:6] == [str(archive), "digits:flaxshard.tar.gz"]
  for call in calls[4:]:
    assert {"--node=all", "--worker=all"} <= set(call)
  names = subprocess.check_output(["tar", "-tzf", archive], text=True).split()
  assert {"pyproject.toml", "configs/digits.py"} <= set(names)
  assert not any(name.startswith((".git/", ".venv/")) for name in names)

  setup, train = (call[-2].removeprefix("--command=") for call in calls[5:])
  for command in (setup, train):
    subprocess.run(["bash", "-n", "-c", command], check=True)
  assert "python3.11 -m venv" in setup
  words = shlex.split(train.splitlines()[-1])
  assert words[2:] == ["-m", "flaxshard", *_TRAINING]

  # --dry_run prints the same commands. Bash reads its own quotes: $'...' is not
  # POSIX.
  dry_run = [*_REQUEST, "--spot", "--dry_run", "--", *_TRAINING]
  result, calls_after = cloud_tpu(*dry_run)
  assert calls_after == calls
  printed = subprocess.check_output(
    ["bash", "-c", f"gcloud() {{ printf '%s\\0' \"$@\" ; }}\n{result.stdout}"],
    text=True,
  )
  without_polls = [*calls[1:3], *calls[4:]]
  words = [word for call in without_polls for word in call]
  assert printed.split("\0")[:-1] == words


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (_REQUEST, "arguments of the training"),
    ([*_REQUEST[1:], "--", *_TRAINING], "--name is missing"),
    ([*_REQUEST, "--name=A_b", "--", *_TRAINING], "'A_b'"),
    ([*_REQUEST, "--slices=0", "--", *_TRAINING], "--slices .*'0'"),
    ([*_REQUEST, "--", _TRAINING[1]], "--config is missing"),
    ([*_REQUEST, "--", "--config=c.py", _TRAINING[1]], "c.py is not a file"),
    ([*_REQUEST, "--", _TRAINING[0], "--workdir=/tmp/x"], "gs://.*'/tmp/x'"),
  ],
)
def test_cloud_tpu_rejects_invalid_arguments(cloud_tpu, arguments, message):
  result, calls = cloud_tpu(*arguments)
  assert (result.returncode, calls) == (2, [])
  assert re.search(message, result.stderr)
