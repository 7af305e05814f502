"""--local_processes: several processes of one machine."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

from forked_programs import wait_until
import pytest

from flaxshard.processes import local

_ROOT = pathlib.Path(__file__).parents[2]


def run(tmp_path, script, num_processes=2, **kwargs):
  """Runs a script in several processes, with `index` as a variable."""
  file = tmp_path / "script.py"
  file.write_text(
    "import os, sys, time, signal\n"
    "index = int(sys.argv[-1].removeprefix('--process_id='))\n" + script
  )
  return local.run([sys.executable, str(file)], num_processes, **kwargs)


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch):
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")


def test_lines_have_the_index_in_front(tmp_path, capfdbinary, monkeypatch):
  # pytest replaces sys.stdout by an object without the file's buffer.
  code = """
sys.stdout.write("a\\nb")
sys.stdout.flush()
time.sleep(0.2)
sys.stdout.write("c\\n" + "x" * 100_000)
print(sys.argv[1:-1], os.environ.get("JAX_LOCAL_DEVICE_IDS"), file=sys.stderr)
"""
  monkeypatch.setattr(local, "_count_gpus", lambda: 4)
  for name, fd in (("stdout", 1), ("stderr", 2)):
    monkeypatch.setattr(sys, name, open(fd, "w", closefd=False))
  assert run(tmp_path, code) == 0
  out, err = capfdbinary.readouterr()
  for index in (b"[0] ", b"[1] "):
    lines = [x for x in out.splitlines() if x.startswith(index)]
    assert lines == [index + x for x in (b"a", b"bc", b"x" * 100_000)]
  assert len(out.splitlines()) == 6
  flags = err.splitlines()
  assert len(flags) == 2
  for flag in (b"--local_processes=0", b"--num_processes=2"):
    assert all(flag in line for line in flags)
  # The GPUs of the machine are divided.
  assert sorted(line[-3:] for line in flags) == [b"0,1", b"2,3"]


# Process 0 waits until process 1 has ended, and nobody waits for it any more.
_GO_ON = """
assert not any("coordinator" in flag for flag in sys.argv)
link = __file__ + ".pid"
if index:
  os.symlink(f"/proc/{os.getpid()}", link)
  sys.exit(3)
while not os.path.islink(link) or os.path.exists(link):
  time.sleep(0.05)
time.sleep(0.5)
print("went on", file=sys.stderr)
"""


@pytest.mark.parametrize(
  ("script", "connected", "code", "words"),
  [
    ("sys.exit(index * 3)", True, 3, "process 1 ended with exit code 3"),
    ("index and os.kill(os.getpid(), 9)", True, 137, "1 was killed by SIGKILL"),
    (_GO_ON, False, 3, "1 ended with exit code 3; the others go on\n[0] went"),
  ],
)
def test_exit_code_is_that_of_the_first_failure(
  tmp_path, capfd, script, connected, code, words
):
  assert run(tmp_path, script, connected=connected) == code
  assert words in capfd.readouterr().err


def test_one_failure_ends_all(tmp_path, capfd, monkeypatch):
  """SIGTERM first, then SIGKILL, also for processes that a process started."""
  monkeypatch.setattr(local, "_GRACE", 0.5)
  monkeypatch.setattr(local, "_TERM_GRACE", 1.0)
  script = f"""
import subprocess
if index == 0:
  while not os.path.exists({str(tmp_path / "child")!r}):
    time.sleep(0.1)
  sys.exit(7)
if index == 1:
  signal.signal(signal.SIGTERM, signal.SIG_IGN)
  sleep = [sys.executable, "-c", "import time; time.sleep(99)"]
  child = subprocess.Popen(sleep)
  open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
time.sleep(99)
"""
  start = time.monotonic()
  assert run(tmp_path, script, 3) == 7
  assert time.monotonic() - start < 90
  err = capfd.readouterr().err
  assert "process 0 ended with exit code 7" in err
  assert "SIGTERM to the processes that have not ended: 1, 2" in err
  assert "SIGKILL to the processes that have not ended: 1\n" in err
  wait_until_gone(int((tmp_path / "child").read_text()))


@pytest.mark.parametrize(
  ("gpus", "devices", "message"),
  [
    (0, 3, "virtual_devices=3 .* --local_processes=2"),
    (7, 0, "--local_processes=2: the 7 GPUs"),
  ],
)
def test_indivisible_devices_raise(gpus, devices, message, monkeypatch):
  monkeypatch.setattr(local, "_count_gpus", lambda: gpus)
  with pytest.raises(ValueError, match=message):
    local.run([], 2, virtual_devices=devices)


def is_running(pid):
  state = subprocess.run(
    ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True
  ).stdout
  # A zombie has ended.
  return bool(state) and not state.startswith("Z")


def wait_until_gone(*pids):
  wait_until(lambda: not any(map(is_running, pids)), "end", seconds=30)


@pytest.mark.slow
def test_ctrl_c_saves_a_checkpoint(programs, tmp_path):
  # The command of the guide, with two processes and a smaller model.
  [line] = re.findall(
    r"^flaxshard (--local_processes=4 --config=digits .*)$",
    (_ROOT / "docs" / "guides" / "processes.md").read_text(),
    re.M,
  )
  changed = dict(precision="float32", wrappers="()", writer="none")
  changed |= {"model.features": "(2,)", "model.dense": 4}
  changed |= {"mesh.virtual_devices": 2, "num_train_steps": 100_000}
  changed |= {"log_every_steps": 1, "checkpoint_every_steps": 100_000}
  program = programs.start(
    tmp_path,
    *line.split(),
    *("--local_processes=2", f"--workdir={tmp_path / 'run'}"),
    *(f"--config.{name}={value}" for name, value in changed.items()),
  )
  wait_until(lambda: " step 1: loss=" in program.printed, "step 1", program)
  program.send(signal.SIGINT)
  output = program.end(code=130)
  assert "2 of 2 cpu devices" in output
  # One process alone prints the rows.
  rows = [x for x in output.splitlines() if "loss=" in x]
  assert all(x.startswith("[0] ") for x in rows), output
  step = re.search(r"saved step (\d+) in", output)[1]
  assert os.listdir(tmp_path / "run" / "checkpoints") == [step]


@pytest.mark.slow
def test_end_of_the_parent_ends_the_processes(tmp_path):
  """They get SIGTERM, and SIGKILL if they do not end."""
  script = tmp_path / "script.py"
  script.write_text(f"""
import os, pathlib, signal, sys, time
from flaxshard.processes import local

index = sys.argv[-1].removeprefix("--process_id=")
folder = pathlib.Path({str(tmp_path)!r})

def handle(*_):
  (folder / f"signal{{index}}").touch()
  if index == "0":
    sys.exit()

signal.signal(signal.SIGTERM, handle)
local._GRACE = 3.0
local.end_with_parent()
(folder / f"part{{index}}").write_text(str(os.getpid()))
(folder / f"part{{index}}").rename(folder / f"pid{{index}}")
while True:
  time.sleep(0.1)
""")
  code = "import sys; from flaxshard.processes import local; "
  code += f"local.run([sys.executable, {str(script)!r}], 2)"
  parent = subprocess.Popen([sys.executable, "-c", code])
  files = [tmp_path / f"pid{index}" for index in range(2)]
  try:
    wait_until(lambda: all(f.exists() for f in files), "start", seconds=60)
  finally:
    parent.kill()
    parent.wait()
  wait_until_gone(*(int(f.read_text()) for f in files))
  assert {"signal0", "signal1"} <= set(os.listdir(tmp_path))
