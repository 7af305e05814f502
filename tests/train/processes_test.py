"""The training loop in several processes: costs, values, resuming, hooks."""

import json
import os
import re
import signal
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tiny
from tiny_runs import assert_same_rows
from tiny_runs import digits
from tiny_runs import IMAGES
from tiny_runs import run
from tiny_runs import TEXT
from tree_equality import assert_trees_close
import two_processes

import flaxshard as fs
from flaxshard.train import endings

pytestmark = pytest.mark.slow

_PREAMBLE = """
from train import processes_test
from flaxshard.train import report
report.draw = lambda *args: None
"""

# Two processes against one. Four replicas split parameters, slots, sums and
# averages over both processes.
_FSDP = {"name": "fsdp", "min_size": 32}
CONFIGS = {
  "images": {
    **IMAGES,
    "accumulate_steps": 2,
    "freeze": ("^head/bias",),
    "learning_rates": (("^dense/", 2.0),),
    "wrappers": (("loss_scale", {"scale": "dynamic"}), ("ema", {})),
  },
  "text": TEXT,
}


def train_small(name, workdir):
  mesh = {"replica": 4, "rules": (_FSDP,)}
  return run(workdir, **CONFIGS[name], mesh=mesh, eval_every_steps=4)


# Counts each operation that needs other processes: calls of the coordination
# service in the main thread, and executions of programs that run on the devices
# of both processes. Those of JAX's `process_allgather` and the like are
# programs, too.
_COUNT = """
import collections, glob, json, re, threading
import numpy as np
import orbax.checkpoint as ocp
import tiny
from tiny_runs import digits
import flaxshard as fs
from flaxshard import train
from flaxshard.processes import failures

failures.watch()  # once per program, so not counted
counts = collections.Counter()
main_thread = threading.main_thread()

def count_calls(cls, name):
  method = getattr(cls, name)
  def counted(*args, **kwargs):
    if threading.current_thread() is main_thread:
      counts[name] += 1
    return method(*args, **kwargs)
  setattr(cls, name, counted)

client = type(ocp.multihost.get_jax_distributed_client())
for name in dir(client):
  # Deletions wait for no process, and the first exchange has none.
  if name.startswith(("key_value", "blocking", "wait")) and "del" not in name:
    count_calls(client, name)

options = jax.profiler.ProfileOptions()
options.python_tracer_level = 0

def count_programs(path):
  (file,) = glob.glob(path + "/**/*.xplane.pb", recursive=True)
  for plane in jax.profiler.ProfileData.from_file(file).planes:
    for line in plane.lines:
      for event in line.events:
        # Such as "CommonPjRtLoadedExecutable::Execute (jit_train_step)".
        match = re.fullmatch(r"\\w+::Execute \\((jit_.*)\\)", event.name)
        if match:
          counts[match[1]] += 1

# The second run has twice the steps and rows, and as many evaluations and
# saves.
for per_replica in (False, True):
  found = []
  for num_steps in (8, 16):
    counts.clear()
    path = f"{sys.argv[3]}/{per_replica}_{num_steps}"
    config = tiny.config(
      mesh={"replica": -1, "per_replica": per_replica},
      num_train_steps=num_steps,
      log_every_steps=4,
      eval_every_steps=num_steps // 2,
      checkpoint_every_steps=num_steps // 2,
      writer="tensorboard",
    )
    profile = f"{path}_profile_{rank}"
    with jax.profiler.trace(profile, profiler_options=options):
      train.train_and_evaluate(config, path)
    count_programs(profile)
    found.append(dict(counts))
  print(f"counts {per_replica}", json.dumps(found))

for name in processes_test.CONFIGS:
  processes_test.train_small(name, f"{sys.argv[3]}/{name}")

loaded = fs.load(f"{sys.argv[3]}/images")
logits = loaded.predict({"inputs": digits().eval.inputs})
whole = jax.jit(lambda x: x, out_shardings=loaded.state.step.sharding)(logits)
np.save(f"{sys.argv[3]}/{rank}.npy", whole.addressable_data(0))
"""


@pytest.fixture(scope="module")
def two_process_runs(tmp_path_factory, program_server):
  """Runs in two processes: their folder, and what each has printed."""
  path = tmp_path_factory.mktemp("two")
  script = _PREAMBLE + _COUNT
  return path, two_processes.run(program_server, script, str(path))


def test_cross_process_operations_do_not_grow_with_steps(two_process_runs):
  for out in two_process_runs[1]:
    for per_replica in (False, True):
      line = re.search(f"^counts {per_replica} (.*)$", out, re.M)
      short, long = json.loads(line[1])
      for counts, num_steps in ((short, 8), (long, 16)):
        if per_replica:
          assert counts.pop("jit_run") == num_steps
          # A row of metrics is one program.
          assert counts.pop("jit_combine_replicas") == num_steps // 4
        else:
          assert counts.pop("jit_train_step") == num_steps
      # A row of metrics needs no operation either: the long run has four.
      assert short == long
      # The counters count: two evaluations, and the exchanges of two saves.
      assert short["wait_at_barrier"] > 2
      assert per_replica or short["jit_eval_step"] > 2


@pytest.mark.parametrize("name", CONFIGS)
def test_two_processes_train_the_same_parameters_as_one(
  two_process_runs, tmp_path, name
):
  wanted, wanted_rows = train_small(name, tmp_path)
  workdir = two_process_runs[0] / name
  # The order in which gradients are added up makes differences of some ulps of
  # the largest, such as 1.3e-6 in a slot whose gradients are up to 1.3.
  state = fs.checkpoint.restore(str(workdir), wanted)
  assert_trees_close(state, wanted, rtol=1e-5, atol=1e-5)
  assert_same_rows(tiny.untimed_rows(workdir), wanted_rows)


def test_two_processes_load_a_run_and_predict(two_process_runs):
  path = two_process_runs[0]
  loaded = fs.load(path / "images")
  expected = loaded.predict({"inputs": digits().eval.inputs})
  for rank in (0, 1):
    logits = np.load(path / f"{rank}.npy")
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)


# Runs that resume on another number of processes.

_DEVICES = 12  # over all processes
_STEPS = 32
_DYNAMIC = {"type": "dynamic", "growth_interval": 5}
_LOSS_SCALE = ("loss_scale", {"scale": _DYNAMIC})
# "fsdp" splits parameters over the processes; with "agn" each replica has its
# own.
_KINDS = {
  "fsdp": {
    "mesh": {"replica": _DEVICES, "rules": (_FSDP,)},
    "wrappers": (_LOSS_SCALE,),
  },
  "agn": {
    "mesh": {"replica": _DEVICES, "per_replica": True},
    "wrappers": (_LOSS_SCALE, ("agn", {"communication_period": 4})),
  },
}


def run_stage(path: str, runs: list[str]) -> None:
  """Continues runs until they stop; called in each process.

  Args:
    path: Path of a folder for the workdirs.
    runs: For each run the kind of its config, its workdir, and the step after
      which to stop: a number, "sigterm" for a signal to the last process at
      step 9, or "end".
  """
  agree_on_signal = endings.StopRequest.agree
  for kind, workdir, stop in map(str.split, runs):

    def agree(request, step, stop=stop):
      if stop == "sigterm":
        if step == 9 and jax.process_index() == jax.process_count() - 1:
          os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)  # JAX looks for signals once a second
        return agree_on_signal(request, step)
      return signal.SIGTERM if str(step) == stop else None

    endings.StopRequest.agree = agree
    code = None
    try:
      run(
        os.path.join(path, workdir),
        model={"name": "cnn", "features": (), "dense": 24},
        batch_size=24,
        optimizer={"name": "adam"},
        num_train_steps=_STEPS,
        log_every_steps=1000,
        eval_every_steps=1000,
        checkpoint_every_steps=1000,
        **_KINDS[kind],
      )
    except SystemExit as e:
      code = e.code
    assert code == (None if stop == "end" else 128 + signal.SIGTERM), code


def _read_arrays(workdir, item):
  item_dir = workdir / "checkpoints" / str(_STEPS) / item
  checkpointer = ocp.PyTreeCheckpointer()
  tree = checkpointer.metadata(item_dir).item_metadata.tree
  args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
  return checkpointer.restore(item_dir, restore_args=args)


def test_run_on_2_1_and_3_processes_equals_an_undisturbed_one(
  programs, tmp_path
):
  """Another batch, a row twice or a row that is left out would differ."""
  stages = [
    (2, ["fsdp a 6", "agn b sigterm"]),
    (1, ["fsdp a 9", "agn b 26", "fsdp c end", "agn d end"]),
    (3, ["fsdp a end", "agn b end"]),
  ]
  script = _PREAMBLE + "processes_test.run_stage(sys.argv[3], sys.argv[4:])"
  logs = ""
  for processes, runs in stages:
    arguments = str(tmp_path), *runs
    devices = _DEVICES // processes
    outs = two_processes.run(
      programs, script, *arguments, processes=processes, devices=devices
    )
    logs += "".join(outs)
  # The replicas are as many as before: no state of a wrapper is dropped.
  assert "dropped" not in logs and "passed over" not in logs
  # The signal at step 9 stopped the run soon.
  resumed = re.findall(r"resuming from step (\d+) in \S+/b\n", logs)
  assert len(resumed) == 2 and 9 <= int(resumed[0]) < int(resumed[1]) == 26
  # XLA adds in another order within a process than between processes. AGN's
  # replicas take their steps alone, and commit in order.
  for workdir, undisturbed, atol in (("a", "c", 1e-6), ("b", "d", 0)):
    for item in ("default", "wrappers"):
      assert_trees_close(
        _read_arrays(tmp_path / workdir, item),
        _read_arrays(tmp_path / undisturbed, item),
        rtol=0,
        atol=atol,
      )


# Hooks.

_HOOKS = """
import jax
import numpy as np
from jax.experimental import multihost_utils
import tiny


class Gather:
  def __init__(self, workdir):
    self.path = f"{workdir}/steps_{jax.process_index()}.txt"

  def __call__(self, step, state, metrics):
    values = np.array([step, metrics.get("eval_loss", -1)])
    both = multihost_utils.process_allgather(values)
    with open(self.path, "a") as f:
      f.write(f"{step} {bool((both[0] == both[1]).all())} ")


def fail_in_one(step, state, metrics):
  if step == 6 and jax.process_index() == 1:
    raise KeyError("a mistake of the user")


def get_config():
  rule = {"metric": "eval_loss", "patience": 1, "min_delta": 100.0}
  return tiny.config(
    num_train_steps=20,
    eval_every_steps=2,
    mesh={"virtual_devices": 2},
    early_stopping=rule,
    hooks=("my_hooks:Gather", "my_hooks:fail_in_one"),
  )
"""


def test_all_processes_stop_at_one_step_and_end_when_a_hook_raises(
  programs, tmp_path
):
  """A hook may use collectives; another one raises in process 1 alone."""
  (tmp_path / "my_hooks.py").write_text(_HOOKS)
  workdir = tmp_path / "run"
  arguments = "--config=my_hooks.py", "--workdir=run", "--local_processes=2"
  output = programs.start(tmp_path, *arguments).end(code=1)
  # The third evaluation ends the run in both processes.
  for index in (0, 1):
    text = (workdir / f"steps_{index}.txt").read_text()
    assert text == "2 True 4 True 6 True "
  assert [row["step"] for row in tiny.rows(workdir)] == [2, 4, 6]
  assert "6" in os.listdir(workdir / "checkpoints")
  for fact in ("my_hooks:fail_in_one", "step 6", "a mistake of the user"):
    assert fact in output
  assert "process 1" in output  # process 0 says whose error it is
