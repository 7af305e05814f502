"""Workers that are killed, stopped, started twice and started late."""

import signal
import time

from forked_programs import wait_until
import pytest
import tiny
from tree_equality import assert_trees_equal

import flaxshard as fs
from flaxshard.center import heads
from flaxshard.center.store import Objects

pytestmark = pytest.mark.slow

_CONFIG = """
import time
import tiny

def get_config():
  agn = dict(communication_period=2, commit="sequential",
             transport={"deadline": 4.0, "grace": 2.0})
  return tiny.config(
    wrappers=(("agn", agn),), precision="float32", num_train_steps=26,
    log_every_steps=1, eval_every_steps=26, checkpoint_every_steps=6)

def wait(step, state, metrics):
  while step >= int(open("last").read()):
    time.sleep(0.02)
"""
# Such a program waits at the step that `wait_at` names.
_HELD = "--config.hooks=('my_config:wait',)"


@pytest.fixture
def start(programs, tmp_path):
  """Starts one of some workers with the config."""
  (tmp_path / "my_config.py").write_text(_CONFIG)

  def start_worker(worker_id, *arguments, of=2):
    return programs.start(
      tmp_path,
      "--config=my_config.py",
      "--workdir=run",
      f"--num_processes={of}",
      f"--process_id={worker_id}",
      "--initialization_timeout=1",
      *arguments,
    )

  return start_worker


def folder(tmp_path, worker_id):
  return tmp_path / "run" / (f"workers/{worker_id}" if worker_id else "")


def head(tmp_path):
  return heads.read(Objects(f"{tmp_path}/run/center"))


def wait_at(tmp_path, step):
  """Lets programs with `_HELD` go on to a step."""
  (tmp_path / "new").write_text(str(step))
  (tmp_path / "new").rename(tmp_path / "last")


def step_of(tmp_path, worker_id):
  rows = tiny.rows(folder(tmp_path, worker_id))
  return rows[-1]["step"] if rows else 0


def wait_for_step(tmp_path, worker_id, step, *programs):
  is_there = lambda: step_of(tmp_path, worker_id) >= step
  wait_until(is_there, f"step {step} of worker {worker_id}", *programs)


def wait_for(program, words):
  wait_until(lambda: words in program.printed, words, program)


def assert_ended(tmp_path, *worker_ids):
  """All workers have saved the final center, in which each commit is once."""
  found = head(tmp_path)
  assert found.finished
  loaded = [fs.load(folder(tmp_path, k)) for k in worker_ids]
  assert {x.step for x in loaded} == {26}
  for other in loaded:
    assert_trees_equal(other.params, loaded[0].params)
    agn = other.state.wrapper_states["agn"]
    assert agn.versions.tolist() == found.versions


def test_workers_that_are_killed_come_back(start, programs, tmp_path):
  synchronize = "--synchronize", "--workdir=run"
  waiting = programs.start(tmp_path, *synchronize)
  wait_for(waiting, "waiting for the first worker")
  waiting.send(signal.SIGTERM)
  wait_at(tmp_path, 8)
  first = [start(k, _HELD) for k in range(2)]
  waiting.end(code=128 + signal.SIGTERM)
  wait_for_step(tmp_path, 1, 4, *first)
  first[1].kill()
  wait_at(tmp_path, 16)
  wait_for_step(tmp_path, 0, 12, *first)
  second = start(1, _HELD)
  wait_for(second, "goes on from")
  first[0].kill()
  second.send(signal.SIGTERM)
  wait_at(tmp_path, 20)
  assert "SIGTERM: saved step" in second.end(code=128 + signal.SIGTERM)
  before = head(tmp_path)
  assert before.versions[0] >= 4 and not before.finished
  # All are gone. Now a synchronizer merges.
  synchronizer = programs.start(tmp_path, *synchronize)
  wait_for(synchronizer, "merging the commits")
  outputs = [x.end() for x in [start(k) for k in range(2)]]
  assert "the run has ended" in synchronizer.end()
  assert "done: step 26: eval_loss=" in outputs[0]
  assert "Traceback" not in "".join(outputs)
  # The center has gone on: what it had taken is still in it.
  after = head(tmp_path)
  assert before.heads[0].taken.items() <= after.heads[0].taken.items()
  assert after.versions > before.versions
  assert_ended(tmp_path, 0, 1)


def stop(program, center):
  """Stops a program while it holds no lock, which others would wait for."""
  while True:
    program.send(signal.SIGSTOP)
    time.sleep(0.1)
    if not list(center.rglob("*.__lock")):
      return
    program.send(signal.SIGCONT)
    time.sleep(0.1)


def test_worker_0_that_was_stopped_and_one_that_comes_late_find_the_end(
  start, tmp_path
):
  wait_at(tmp_path, 8)
  stopped, other = start(0, _HELD, of=4), start(1, _HELD, of=4)
  wait_for_step(tmp_path, 0, 8, stopped)
  stop(stopped, tmp_path / "run/center")
  wait_at(tmp_path, 27)
  assert "the final center is in the store only: workdir=" in other.end()
  before = head(tmp_path)
  assert before.finished
  found = fs.load(tmp_path / "run")
  assert step_of(tmp_path, 0) < found.step
  assert_trees_equal(found.params, fs.load(folder(tmp_path, 1)).params)
  late = start(2, of=4)
  stopped.send(signal.SIGCONT)
  for program in (stopped, late):
    assert "finds that the run has ended" in program.end()
  assert "done: step 26: eval_loss=" in stopped.printed
  assert head(tmp_path) == before
  assert_ended(tmp_path, 0, 1, 2)
