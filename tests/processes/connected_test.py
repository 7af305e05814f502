"""Connected processes: what ends all of them, runs that go on, and mistakes."""

import re
import signal
import time

import faulty
import pytest
from tree_equality import assert_trees_equal
import two_processes

import flaxshard as fs

pytestmark = pytest.mark.slow

# A program with its own loop; `sys.argv[4]` is what happens in a step. Its
# variables are those of torchrun.
_PROGRAM = """
import os, signal, socket, sys, time
port, index = sys.argv[1:3]
os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", WORLD_SIZE="2",
                   RANK=index, JAX_COORDINATOR_PORT=port)
import jax
jax.config.update("jax_platforms", "cpu")
import flaxshard as fs
from flaxshard.processes import failures

index = int(index)
cluster = fs.initialize(heartbeat_timeout=10)
assert "torchrun" in cluster.source
# A second call does nothing.
assert fs.initialize() == cluster
# All processes are on this machine: no other address of it has the port open.
assert socket.socket().connect_ex(("127.0.0.2", int(port)))
import numpy as np
from jax.experimental import multihost_utils

for step in range(6):
  found = multihost_utils.process_allgather(np.array([index]))
  assert found.ravel().tolist() == [0, 1]
  if step == int(sys.argv[3]):
    exec(sys.argv[4])
"""
_RAISE = "raise ValueError('an error of the user')"


def _without_gloo(program):
  """Returns what a program prints, but for a note of its collectives."""
  return re.sub(r"^\[Gloo\] .*\n", "", program.printed, flags=re.M)


def _run(programs, code, step=3):
  """Returns the exit code of each process, and what it prints."""
  start = time.monotonic()
  started = two_processes.start(programs, _PROGRAM, str(step), code)
  ended = [(program.wait(), _without_gloo(program)) for program in started]
  assert time.monotonic() - start < 60
  return ended


@pytest.mark.parametrize(
  ("step", "process", "fault", "code", "text"),
  [
    (3, 0, _RAISE, 1, "ValueError: an error of the user"),
    # The other one is at the end of the program already.
    (5, 1, f"time.sleep(2); {_RAISE}", 1, "ValueError: an error of the user"),
    (3, 1, "with failures.share(): sys.exit(3)", 3, "SystemExit: 3"),
    (3, 1, "raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
  ],
)
def test_failure_ends_all_processes(programs, step, process, fault, code, text):
  ended = _run(programs, f"if index == {process}:\n  {fault}", step)
  assert [e[0] for e in ended] == ([code, 1] if process == 0 else [1, code])
  assert re.search(
    rf"process {process} \(host .*, pid \d+\) failed: {text}",
    ended[1 - process][1],
  )
  assert "Fatal" not in ended[process][1]


def test_each_process_reports_its_own_exception(programs):
  for code, log in _run(programs, _RAISE):
    assert code == 1
    assert log.count("Traceback") == 1
    assert log.splitlines()[-1] == "ValueError: an error of the user"


def test_an_exception_that_all_catch_ends_nothing(programs):
  caught = f"try:\n  with failures.share(): {_RAISE}\nexcept ValueError: pass"
  assert _run(programs, caught) == [(0, ""), (0, "")]


def test_killed_process_is_named(programs):
  (code_0, log_0), (code_1, _) = _run(
    programs, "if index == 1: os.kill(os.getpid(), signal.SIGKILL)"
  )
  assert (code_0, code_1) == (1, -signal.SIGKILL)
  assert "no answer from process 1" in log_0
  # JAX ends process 1, because the service of process 0 has ended.
  (code_0, _), (code_1, log_1) = _run(
    programs, "if index == 0: os.kill(os.getpid(), signal.SIGKILL)"
  )
  assert (code_0, code_1) == (-signal.SIGKILL, -signal.SIGABRT)
  assert "leader" in log_1


# Runs that go on.


def run(programs, workdir, signum=None):
  """Runs two connected processes; see `faulty`.

  Returns:
    The exit code of each process, and what it logs.
  """
  address = f"127.0.0.1:{two_processes.free_port()}"
  both = [
    programs.start(
      workdir.parent,
      f"--config={faulty.__file__}",
      f"--workdir={workdir}",
      f"--coordinator_address={address}",
      "--num_processes=2",
      f"--process_id={k}",
      "--heartbeat_timeout=8",
      FAULT=f"1 {int(signum)} {workdir}" if signum else "",
    )
    for k in range(2)
  ]
  codes = [program.wait(seconds=120) for program in both]
  return codes, [program.printed for program in both]


def finish(programs, workdir):
  """Runs without a fault; returns the parameters at the end."""
  codes, logs = run(programs, workdir)
  assert codes == [0, 0] and "damaged" not in "".join(logs), logs
  loaded = fs.load(str(workdir))
  assert loaded.step == 60
  return loaded.params


def test_a_run_resumes_after_faults(programs, tmp_path):
  undisturbed = finish(programs, tmp_path / "undisturbed")
  workdir = tmp_path / "run"
  (code, killed), (log, _) = run(programs, workdir, signal.SIGKILL)
  assert killed == -signal.SIGKILL and code in (1, -signal.SIGABRT), log
  unhealthy = r"(?s)unhealthy|no answer from process 1.*The same command"
  assert re.search(unhealthy, log)
  # The other one ends as for JAX's notice of preemption, which is SIGTERM.
  codes, logs = run(programs, workdir, signal.SIGINT)
  assert codes == [128 + signal.SIGTERM, 128 + signal.SIGINT], logs
  saved = re.findall(r"(?:SIGTERM|SIGINT): saved step (\d+)", "".join(logs))
  assert len(set(saved)) == 1, logs
  assert_trees_equal(finish(programs, workdir), undisturbed)


# Processes that disagree.

# In each case process 1 differs.
_DISAGREEMENTS = """
import importlib.metadata
import os, pathlib, sys, time, types
import numpy as np
import small_tasks
import tiny
from flaxshard import data, train
from flaxshard.train import same_run

path = pathlib.Path(sys.argv[3])

def check(words, workdir="run", **fields):
  config = tiny.config(num_train_steps=2, eval_every_steps=2, **fields)
  start = time.monotonic()
  try:
    train.train_and_evaluate(config, str(path / workdir))
  except ValueError as e:
    message = str(e)
  else:
    message = "no error"
  assert all(word in message for word in words), message
  assert time.monotonic() - start < 60

check(["config.learning_rate: 0.05 in process 0 (h", "0.01 in process 1 (h"],
      learning_rate=(0.05, 0.01)[rank])

version = importlib.metadata.version
importlib.metadata.version = lambda name: (
  "9.8.7" if rank and name == "optax" else version(name))
check(["version of.optax: ", "'9.8.7' in process 1"])
importlib.metadata.version = version

def load():
  inputs = np.random.default_rng(rank).normal(size=(64, 8, 8, 1))
  arrays = data.Arrays(inputs.astype("f"), np.arange(64, dtype="i") % 10)
  return data.Splits(train=arrays, eval=arrays, num_classes=10)

sys.modules["of_rank"] = types.SimpleNamespace(load=load)
check(["the data.train.first example"], data={"name": "of_rank:load"})

def stream():
  example = {"inputs": np.full((8, 8, 1), rank, "f"), "labels": np.int32(0)}
  return data.Splits(small_tasks.Forever([example]), num_classes=10)

sys.modules["of_rank"].stream = stream
check(["the data.train.first example"], data={"name": "of_rank:stream"})

with jax.default_matmul_precision("highest" if rank else "default"):
  check(["the traced train step"], precision="float32")

# A file of process 0 is not visible.
same_run._VISIBLE_SECONDS = 1.0
check(["is not the same directory for all", "process 1 does"], f"run_{rank}")
# Process 0 deletes its file before it raises; the other one may be sooner.
assert rank or not any(path.glob("run_*/.same*"))
check(["no error"])
print("checked")
"""


def test_processes_that_disagree_raise_before_the_first_step(
  programs, tmp_path
):
  for text in two_processes.run(programs, _DISAGREEMENTS, str(tmp_path)):
    assert "checked" in text.splitlines()
