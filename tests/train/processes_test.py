"""The training loop in several processes."""

import ast
import importlib
import pathlib

import jax
import numpy as np
import pytest
import tiny
import two_processes

import flaxshard as fs
from flaxshard import train

pytestmark = pytest.mark.slow

_TESTS = str(pathlib.Path(__file__).parents[1])
_ROOT = str(pathlib.Path(__file__).parents[2])


_PREAMBLE = """
sys.path[:0] = [sys.argv[3], sys.argv[3] + "/train", sys.argv[4]]
import processes_test
from flaxshard import train
from flaxshard.train import report
"""

# Prints a dict with the number of each operation that needs other processes:
# calls of the coordination service in the main thread, and executions of
# programs that run on the devices of both processes. Those of JAX's
# `process_allgather` and the like are programs, too.
_COUNT = """
import collections, glob, re, threading
import orbax.checkpoint as ocp
import tiny
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
  for num_steps in (8, 16):
    counts.clear()
    path = f"{sys.argv[5]}/{per_replica}_{num_steps}"
    config = tiny.config(
      data={"name": "digits"},
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
    print("counts", (per_replica, num_steps, dict(counts)))
"""


@pytest.fixture(scope="module")
def two_process_runs(tmp_path_factory):
  """Runs in two processes: 8 and 16 counted steps, then the small configs.

  Returns:
    The folder of the workdirs, and for each process the counts by
    `(per_replica, num_steps)`.
  """
  path = tmp_path_factory.mktemp("two")
  outs = two_processes.run(
    _PREAMBLE + _COUNT + _TRAIN, _TESTS, _ROOT, str(path), *_SMALL_CONFIGS
  )
  results = []
  for out, _ in outs:
    lines = [x[7:] for x in out.splitlines() if x.startswith("counts ")]
    parsed = map(ast.literal_eval, lines)
    results.append({tuple(x[:2]): x[2] for x in parsed})
  return path, results


def test_cross_process_operations_do_not_grow_with_steps(two_process_runs):
  for result in two_process_runs[1]:
    short, long = dict(result[False, 8]), dict(result[False, 16])
    for counts, num_steps in ((short, 8), (long, 16)):
      assert counts.pop("jit_train_step") == num_steps
    # A row of metrics needs no operation either: the long run has four.
    assert short == long
    # The counters count: two evaluations, and the exchanges of two saves.
    assert short["jit_eval_step"] > 2
    assert short["wait_at_barrier"] > 2


def test_a_row_of_per_replica_metrics_is_one_program(two_process_runs):
  for result in two_process_runs[1]:
    short, long = dict(result[True, 8]), dict(result[True, 16])
    for counts, num_steps in ((short, 8), (long, 16)):
      assert counts.pop("jit_run") == num_steps
      assert counts.pop("jit_combine_replicas") == num_steps // 4
    assert short == long


# Overrides of the real configs. All have four replicas.
_SMALL = {
  "num_train_steps": 12,
  "schedule.warmup_steps": 2,
  "log_every_steps": 6,
  "eval_every_steps": 12,
  "checkpoint_every_steps": 12,
  "mesh.replica": 4,
  "mesh.virtual_devices": 0,
  # The rounding of float16 would be larger than the differences to find.
  "precision": "float32",
  "writer": "none",
}
_SMALL_CONFIGS = {
  "digits": {
    "model.features": (4,),
    "model.dense": 8,
    "accumulate_steps": 2,
    "freeze": ("^head/bias",),
    "learning_rates": (("^dense/", 2.0),),
    # Splits parameters, slots, sums and averages over both processes.
    "mesh.rules": ({"name": "fsdp", "min_size": 0},),
    "wrappers": (("loss_scale", {"scale": "dynamic"}), ("ema", {})),
  },
  "lm_text_fsdp": {
    "num_train_steps": 6,
    "eval_every_steps": 6,
    "model.num_layers": 1,
    "model.num_heads": 2,
    "model.embed_dim": 16,
    "model.mlp_dim": 32,
    "model.max_length": 16,
    "data.path": f"{_ROOT}/flaxshard/models",
    "data.eval_every": 4,
    "data.length": 16,
    # Also splits the small parameters over the replicas.
    "mesh.rules": ({"name": "fsdp", "min_size": 32},),
  },
}


def small_config(name):
  """Returns a config of `configs/` with fewer steps and a smaller model."""
  config = importlib.import_module(f"configs.{name}").get_config()
  with config.ignore_type():
    config.update_from_flattened_dict({**_SMALL, **_SMALL_CONFIGS[name]})
  return config


_TRAIN = """
report.draw = lambda *args: None
for name in sys.argv[6:]:
  config = processes_test.small_config(name)
  train.train_and_evaluate(config, f"{sys.argv[5]}/{name}")
"""


def test_two_processes_train_the_same_parameters_as_one(
  two_process_runs, tmp_path
):
  for name in _SMALL_CONFIGS:
    wanted_dir = str(tmp_path / "one" / name)
    wanted = train.train_and_evaluate(small_config(name), wanted_dir)
    wanted_rows = tiny.untimed_rows(wanted_dir)
    assert wanted_rows[0]["step"] == 6
    assert {"train_loss", "eval_loss", "eval_accuracy"} < set(wanted_rows[-1])
    workdir = two_process_runs[0] / name
    state = fs.checkpoint.restore(str(workdir), wanted)
    _assert_close(state, wanted)
    rows = tiny.untimed_rows(workdir)
    for row, wanted_row in zip(rows, wanted_rows, strict=True):
      assert row == pytest.approx(wanted_row, rel=1e-5), name


def _assert_close(state, wanted):
  leaves = jax.tree_util.tree_leaves_with_path(state)
  for (path, a), b in zip(leaves, jax.tree.leaves(wanted), strict=True):
    where = jax.tree_util.keystr(path)
    # Attention does not depend on the bias of its keys, so the true gradient is
    # zero, and Adam takes steps in the direction of rounding errors.
    atol = 1e-2 if "key" in where and "bias" in where else 1e-6
    # The order in which gradients are added up makes differences of up to 3e-8
    # in parameters of up to 1 (seen with JAX 0.10.2).
    np.testing.assert_allclose(a, b, rtol=0, atol=atol, err_msg=where)
