"""The files in launch/, without the clusters that they are for."""

import json
import os
import pathlib
import re
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import textwrap

import pytest
import tiny
import xla_flags
import yaml

from flaxshard.processes import cluster

_ROOT = pathlib.Path(__file__).parents[1]
_LAUNCH = _ROOT / "launch"
_SLURM = _LAUNCH / "slurm.sbatch"
_CLOUD_TPU = _LAUNCH / "cloud_tpu.sh"
_JOB_SET = yaml.safe_load((_LAUNCH / "jobset.yaml").read_text())
[_REPLICATED_JOB] = _JOB_SET["spec"]["replicatedJobs"]
_JOB = _REPLICATED_JOB["template"]["spec"]


def _write_program(path, text):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(textwrap.dedent(text).lstrip())
  path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.mark.slow
def test_shellcheck_finds_nothing():
  shellcheck = shutil.which("shellcheck") or shutil.which(
    "shellcheck", path=os.path.dirname(sys.executable)
  )
  if not shellcheck:
    pytest.skip("needs shellcheck: pip install '.[test-launch]'")
  subprocess.run([shellcheck, _SLURM, _CLOUD_TPU], check=True)


# Slurm.


@pytest.fixture
def slurm(tmp_path):
  """Returns a function that runs the script as Slurm's sbatch does.

  `srun`, `squeue` and `scontrol` are programs of the test; `scontrol` writes
  its arguments to the file `scontrol`.
  """
  programs = tmp_path / "bin"
  _write_program(
    programs / "scontrol", f'#!/bin/sh\necho "$@" >> {tmp_path}/scontrol\n'
  )
  _write_program(programs / "squeue", "#!/bin/sh\necho $FAKE_STATE\n")
  _write_program(
    programs / "python", f'#!/bin/sh\nexec {sys.executable} "$@"\n'
  )
  _write_program(tmp_path / "venv" / "bin" / "activate", "")

  def run(*arguments, srun, state="RUNNING", **variables):
    _write_program(programs / "srun", f"#!{sys.executable}\n{srun}")
    options = dict(
      line.removeprefix("#SBATCH --").partition("=")[::2]
      for line in _SLURM.read_text().splitlines()
      if line.startswith("#SBATCH --")
    )
    nodes = int(options["nodes"])
    return subprocess.run(
      ["bash", _SLURM, *arguments],
      cwd=tmp_path,
      capture_output=True,
      text=True,
      timeout=300,
      env={
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{_ROOT}{os.pathsep}{_ROOT / 'tests'}",
        "JAX_PLATFORMS": "cpu",
        # Those of the tests make eight devices in each process.
        "XLA_FLAGS": xla_flags.FAST,
        "VENV": str(tmp_path / "venv"),
        "FAKE_STATE": state,
        # What sbatch sets for the script.
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_NTASKS": str(nodes * int(options["ntasks-per-node"])),
        "SLURM_CPUS_PER_TASK": options["cpus-per-task"],
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        **variables,
      },
    )

  return run


@pytest.mark.parametrize(
  ("code", "state", "is_requeued"),
  [
    (0, "RUNNING", False),
    (1, "RUNNING", False),
    (143, "RUNNING", True),
    (143, "COMPLETING", False),
  ],
)
def test_slurm_requeues_a_running_job_that_was_terminated(
  slurm, tmp_path, code, state, is_requeued
):
  result = slurm("--config=c.py", srun=f"raise SystemExit({code})", state=state)
  assert result.returncode == code, result.stderr
  calls = tmp_path / "scontrol"
  assert calls.exists() == is_requeued
  if is_requeued:
    assert calls.read_text() == "requeue 4711\n"


def test_slurm_passes_the_arguments_to_srun(slurm):
  value = "--config.wrappers=(('agn', {'n': 2}),)"
  result = slurm(value, srun="import sys; print(sys.argv[1:])")
  expected = ["--cpus-per-task=16", "python", "-m", "flaxshard", value]
  assert result.stdout.strip() == str(expected)


def test_slurm_without_arguments_shows_the_usage(slurm):
  result = slurm(srun="raise AssertionError")
  assert result.returncode == 2
  assert "--config" in result.stderr


# As srun does, with one task on each of two nodes: the variables of a step, and
# SIGTERM for every task. Both "nodes" are this machine.
_SRUN = """
import os, signal, subprocess, sys

count = int(os.environ["SLURM_NTASKS"])
command = [a for a in sys.argv[1:] if not a.startswith("--cpus-per-task")]
tasks = [
  subprocess.Popen(
    command,
    env={
      **os.environ,
      "SLURM_STEP_ID": "0",
      "SLURM_STEP_NODELIST": "localhost,other",
      "SLURM_STEP_NUM_NODES": str(count),
      "SLURM_STEP_NUM_TASKS": str(count),
      "SLURM_STEP_TASKS_PER_NODE": f"1(x{count})",
      "SLURM_PROCID": str(rank),
      "SLURM_LOCALID": "0",
      "SLURM_NODEID": str(rank),
    },
  )
  for rank in range(count)
]
signal.signal(
  signal.SIGTERM, lambda *_: [t.send_signal(signal.SIGTERM) for t in tasks]
)
try:
  codes = [task.wait(timeout=250) for task in tasks]
finally:
  for task in tasks:
    task.kill()
sys.exit(max(128 - code if code < 0 else code for code in codes))
"""


def _job_id_of_a_free_port() -> int:
  """Returns a job id whose port for the coordinator is free."""
  for job_id in range(os.getpid() % 2**11, 2**12):
    with socket.socket() as s:
      try:
        s.bind(("", 2**16 - 2**12 + job_id))
      except OSError:
        continue
    return 2**12 + job_id
  raise AssertionError("no free port")


@pytest.mark.slow
def test_slurm_job_saves_at_sigterm_and_continues(slurm, tmp_path):
  workdir = tmp_path / "run"
  config = tmp_path / "config.py"
  config.write_text(
    "import tiny\n\n\ndef get_config():\n"
    "  return tiny.config(\n"
    "    num_train_steps=24,\n"
    "    checkpoint_every_steps=100,\n"
    f"    data={{'name': 'faulty_data:terminated_once',"
    f" 'workdir': {str(workdir)!r}}},\n"
    "  )\n"
  )
  arguments = (f"--config={config}", f"--workdir={workdir}")
  job_id = str(_job_id_of_a_free_port())

  first = slurm(*arguments, srun=_SRUN, SLURM_JOB_ID=job_id)
  assert first.returncode == 143, first.stderr[-3000:]
  assert (tmp_path / "scontrol").read_text() == f"requeue {job_id}\n"
  saved = tiny.rows(workdir)[-1]["step"]
  assert 4 <= saved < 24

  second = slurm(
    *arguments, srun=_SRUN, SLURM_JOB_ID=job_id, SLURM_RESTART_COUNT="1"
  )
  assert second.returncode == 0, second.stderr[-3000:]
  assert f"resuming from step {saved}" in second.stderr
  assert tiny.rows(workdir)[-1]["step"] == 24
  metadata = workdir / "checkpoints" / "24" / "flaxshard" / "metadata"
  assert json.loads(metadata.read_text())["processes"] == 2


# Kubernetes.


def test_job_set_has_fields_of_its_api_only():
  # https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/
  assert _JOB_SET["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
  assert _JOB_SET["kind"] == "JobSet"
  spec = _JOB_SET["spec"]
  assert set(spec) == {"network", "failurePolicy", "replicatedJobs"}
  assert set(spec["network"]) == {"enableDNSHostnames", "subdomain"}
  assert set(spec["failurePolicy"]) == {"maxRestarts", "rules"}
  [rule] = spec["failurePolicy"]["rules"]
  assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
  assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
  assert set(_REPLICATED_JOB) == {"name", "replicas", "template"}


@pytest.mark.slow
def test_job_follows_the_schema_of_kubernetes():
  kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="needs pip install '.[test-launch]'"
  )
  job = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"name": "workers"},
    "spec": _JOB,
  }
  for version in ("1.31", "1.34"):
    kubernetes_validate.validate(job, version, strict=True)
  job["spec"] = {**_JOB, "paralelism": 2}
  with pytest.raises(kubernetes_validate.ValidationError):
    kubernetes_validate.validate(job, "1.34", strict=True)


def test_pods_of_the_job_set_find_each_other():
  pods = _JOB["completions"]
  assert _JOB["parallelism"] == pods
  assert (_JOB["completionMode"], _JOB["backoffLimit"]) == ("Indexed", 0)
  [container] = _JOB["template"]["spec"]["containers"]
  environ = {entry["name"]: entry["value"] for entry in container["env"]}
  found = [
    cluster.find({**environ, "JOB_COMPLETION_INDEX": str(index)})
    for index in range(pods)
  ]
  assert [c.process_id for c in found] == [*range(pods)]
  assert {c.num_processes for c in found} == {pods}
  [address] = {c.coordinator_address for c in found}
  [port] = [entry["containerPort"] for entry in container["ports"]]
  job_set = _JOB_SET["metadata"]["name"]
  network = _JOB_SET["spec"]["network"]
  assert network["enableDNSHostnames"]
  host = f"{job_set}-{_REPLICATED_JOB['name']}-0-0"
  assert address == f"{host}.{network['subdomain']}:{port}"


def test_pods_of_the_job_set_receive_sigterm_and_save():
  pod = _JOB["template"]["spec"]
  [container] = pod["containers"]
  # Python itself, and not a shell, gets the signal.
  assert container["command"][:3] == ["python", "-m", "flaxshard"]
  assert pod["terminationGracePeriodSeconds"] >= 60
  # A policy for failures needs it.
  assert pod["restartPolicy"] == "Never"
  [config, workdir] = container["command"][3:]
  assert (_ROOT / config.removeprefix("--config=")).is_file()
  [mount] = container["volumeMounts"]
  assert workdir.removeprefix("--workdir=").startswith(mount["mountPath"])
  assert [volume["name"] for volume in pod["volumes"]] == [mount["name"]]


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


def _cloud_tpu(arguments, **variables):
  return subprocess.run(
    [_CLOUD_TPU, *arguments],
    cwd=_ROOT,
    capture_output=True,
    text=True,
    timeout=60,
    env={**os.environ, **variables},
  )


@pytest.fixture
def gcloud(tmp_path):
  """A `gcloud` that writes its arguments to a file, and has three states."""
  _write_program(
    tmp_path / "bin" / "gcloud",
    f"""
    #!{sys.executable}
    import json, os, pathlib, sys
    calls = pathlib.Path({str(tmp_path)!r}, "calls")
    before = calls.read_text().splitlines() if calls.exists() else []
    with calls.open("a") as f:
      print(json.dumps(sys.argv[1:]), file=f)
    if sys.argv[4] == "describe":
      if not any('"create"' in line for line in before):
        sys.exit("NOT_FOUND")
      is_new = '"create"' in before[-1]
      print("PROVISIONING" if is_new else os.environ["FAKE_STATE"])
    """,
  )
  calls = tmp_path / "calls"
  variables = {
    "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
    "POLL_SECONDS": "0",
    "TMPDIR": str(tmp_path),
    "FAKE_STATE": "ACTIVE",
  }

  def run(*arguments, **changed):
    result = _cloud_tpu(arguments, **{**variables, **changed})
    lines = calls.read_text().splitlines() if calls.exists() else []
    return result, [json.loads(line) for line in lines]

  return run


def test_cloud_tpu_requests_waits_copies_and_trains(gcloud, tmp_path):
  result, calls = gcloud(*_REQUEST, "--spot", "--", *_TRAINING)
  assert result.returncode == 0, result.stderr
  assert {tuple(call[:3]) for call in calls} == {
    ("compute", "tpus", "queued-resources")
  }
  assert {call[-1] for call in calls} == {"--zone=us-central2-b"}
  assert [call[3] for call in calls] == (
    ["describe", "create", "describe", "describe", "scp", "ssh", "ssh"]
  )
  create, scp, setup, train = (calls[i] for i in (1, 4, 5, 6))
  assert create[4:-1] == [
    "digits",
    "--accelerator-type=v4-16",
    "--runtime-version=tpu-ubuntu2204-base",
    "--node-id=digits",
    "--spot",
  ]
  archive = tmp_path / "digits.tar.gz"
  assert scp[4:6] == [str(archive), "digits:flaxshard.tar.gz"]
  for call in (scp, setup, train):
    assert {"--node=all", "--worker=all"} <= set(call)
  names = subprocess.check_output(["tar", "-tzf", archive], text=True).split()
  assert {"pyproject.toml", "configs/digits.py"} <= set(names)
  assert not any(name.startswith((".git/", ".venv/")) for name in names)

  commands = [
    next(a for a in call if a.startswith("--command=")).partition("=")[2]
    for call in (setup, train)
  ]
  for command in commands:
    subprocess.run(["bash", "-n", "-c", command], check=True)
  assert "python3.11 -m venv" in commands[0]
  last_line = commands[1].splitlines()[-1]
  words = shlex.split(last_line)
  assert words[2:] == ["-m", "flaxshard", *_TRAINING]


@pytest.mark.slow
def test_cloud_tpu_uses_an_existing_queued_resource(gcloud):
  gcloud(*_REQUEST, "--", *_TRAINING)
  result, calls = gcloud(*_REQUEST, "--", *_TRAINING)
  assert result.returncode == 0, result.stderr
  assert [call[3] for call in calls].count("create") == 1


def test_cloud_tpu_of_several_slices_names_its_nodes(gcloud):
  _, calls = gcloud(*_REQUEST, "--slices=2", "--project=mine", "--", *_TRAINING)
  assert {"--node-count=2", "--node-prefix=digits"} <= set(calls[1])
  assert all("--project=mine" in call for call in calls)


def test_cloud_tpu_ends_if_the_request_fails(gcloud):
  result, calls = gcloud(*_REQUEST, "--", *_TRAINING, FAKE_STATE="FAILED")
  assert result.returncode == 2
  assert "digits is FAILED" in result.stderr
  assert calls[-1][3] == "describe"


def test_cloud_tpu_dry_run_prints_the_commands(gcloud):
  _, calls = gcloud(*_REQUEST, "--", *_TRAINING)
  result, calls_after = gcloud(*_REQUEST, "--dry_run", "--", *_TRAINING)
  assert result.returncode == 0, result.stderr
  assert calls_after == calls
  # Bash reads its own quotes: $'...' is not POSIX.
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
    (["--nmae=x", "--", *_TRAINING], "--nmae=x"),
    ([*_REQUEST[1:], "--", *_TRAINING], "--name is missing"),
    ([*_REQUEST[:3], "--", *_TRAINING], "--runtime_version is missing"),
    ([*_REQUEST, "--name=A_b", "--", *_TRAINING], "'A_b'"),
    ([*_REQUEST, "--slices=0", "--", *_TRAINING], "--slices .*'0'"),
    ([*_REQUEST, "--", _TRAINING[1]], "--config is missing"),
    ([*_REQUEST, "--", "--config=c.py", _TRAINING[1]], "c.py is not a file"),
    ([*_REQUEST, "--", _TRAINING[0], "--workdir=/tmp/x"], "gs://.*'/tmp/x'"),
  ],
)
def test_cloud_tpu_rejects_invalid_arguments(arguments, message):
  result = _cloud_tpu([*arguments[:1], "--dry_run", *arguments[1:]])
  assert result.returncode == 2
  assert not result.stdout
  assert re.search(message, result.stderr)
