"""Runs that resume on another number of processes: data, states, metrics."""

import functools
import json
import os
import pathlib
import re
import signal
import sys
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tiny
import two_processes

from flaxshard import data
from flaxshard import train
from flaxshard.data import iterators
from flaxshard.train import preemption
from flaxshard.train import report

pytestmark = pytest.mark.slow

_TESTS = str(pathlib.Path(__file__).parents[1])
_DEVICES = 12  # over all processes
_BATCH_SIZE = 24
_EXAMPLES = 96  # an epoch of four batches
_STEPS = 32

_STAGE = """
sys.path[:0] = [sys.argv[3], os.path.dirname(sys.argv[3])]
from train import resume_processes_test
resume_processes_test.run_stage(sys.argv[4], sys.argv[5:])
"""


def numbered_noise() -> data.Splits:
  """Returns random images whose labels are the indices of the examples."""
  rng = np.random.default_rng(0)
  inputs = rng.random((_EXAMPLES, 8, 8, 1), np.float32)
  source = data.Arrays(inputs, np.arange(_EXAMPLES, dtype=np.int32))
  return data.Splits(source, source, _EXAMPLES)


# "fsdp" splits parameters over the processes; with "agn" each replica has its
# own.
_MESHES = {
  "fsdp": {"replica": _DEVICES, "rules": ({"name": "fsdp", "min_size": 64},)},
  "agn": {"replica": _DEVICES, "per_replica": True},
}
_DYNAMIC = {"type": "dynamic", "growth_interval": 5}
_LOSS_SCALE = ("loss_scale", {"scale": _DYNAMIC})
_WRAPPERS = {
  "fsdp": (_LOSS_SCALE,),
  "agn": (_LOSS_SCALE, ("agn", {"communication_period": 4})),
}


def _config(kind: str):
  return tiny.config(
    model={"name": "cnn", "features": (), "dense": 24},
    data={"name": "resume_data:numbered_noise"},
    batch_size=_BATCH_SIZE,
    num_train_steps=_STEPS,
    schedule={"name": "constant"},
    wrappers=_WRAPPERS[kind],
    mesh=_MESHES[kind],
    precision="float32",
    log_every_steps=1000,
    eval_every_steps=1000,
    checkpoint_every_steps=1000,
  )


def run_stage(path: str, runs: list[str]) -> None:
  """Continues runs until they stop; called in each process.

  Args:
    path: Path of a folder for the workdirs and the records of rows.
    runs: For each run the kind of its config, its workdir, and the step after
      which to stop: a number, "sigterm" for a signal to the last process at
      step 9, or "end".
  """
  sys.modules["resume_data"] = sys.modules[__name__]
  report.draw = lambda *args: None
  next_batch = iterators.DistributedIterator.__next__
  agree_on_signal = preemption.agree_on_signal
  rows: list[tuple[int, int, list[int]]] = []

  def record_rows(self):
    batch = next_batch(self)
    if "mask" not in batch:
      step = self.get_state()["next_index"]
      for shard in batch["labels"].addressable_shards:
        start = shard.index[0].start or 0
        rows.append((step, start, np.asarray(shard.data).tolist()))
    return batch

  iterators.DistributedIterator.__next__ = record_rows
  for kind, workdir, stop in map(str.split, runs):

    def agree(step, request, stop=stop):
      if stop == "sigterm":
        if step == 9 and jax.process_index() == jax.process_count() - 1:
          os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)  # JAX looks for signals once a second
        return agree_on_signal(step, request)
      return signal.SIGTERM if str(step) == stop else None

    preemption.agree_on_signal = agree
    code = None
    try:
      train.train_and_evaluate(_config(kind), os.path.join(path, workdir))
    except SystemExit as e:
      code = e.code
    assert code == (None if stop == "end" else 128 + signal.SIGTERM), code
    name = f"{workdir}-{time.monotonic_ns()}-{jax.process_index()}.json"
    pathlib.Path(path, name).write_text(json.dumps(rows))
    rows.clear()


def _read_rows(path: pathlib.Path, workdir: str) -> dict[int, list[int]]:
  """Returns the examples of each step of a run, in the order of their rows."""
  blocks: dict[tuple[int, int], list[int]] = {}
  for file in path.glob(f"{workdir}-*.json"):
    for step, start, labels in json.loads(file.read_text()):
      assert (step, start) not in blocks  # no row is read twice
      blocks[step, start] = labels
  steps: dict[int, list[int]] = {}
  for (step, _), labels in sorted(blocks.items()):
    steps.setdefault(step, []).extend(labels)
  return steps


def _read_arrays(path: pathlib.Path, workdir: str, item: str):
  item_dir = path / workdir / "checkpoints" / str(_STEPS) / item
  checkpointer = ocp.PyTreeCheckpointer()
  tree = checkpointer.metadata(item_dir).item_metadata.tree
  args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
  return checkpointer.restore(item_dir, restore_args=args)


def test_run_on_2_1_and_3_processes_equals_an_undisturbed_one(tmp_path):
  stages = [
    (2, ["fsdp a 6", "agn b sigterm"]),
    (1, ["fsdp a 9", "agn b 26", "fsdp c end", "agn d end"]),
    (3, ["fsdp a end", "agn b end"]),
  ]
  logs = ""
  for processes, runs in stages:
    outs = two_processes.run(
      _STAGE,
      _TESTS,
      str(tmp_path),
      *runs,
      processes=processes,
      devices=_DEVICES // processes,
    )
    logs += "".join(out + err for out, err in outs)
  # The replicas are as many as before: no state of a wrapper is dropped.
  assert "dropped" not in logs and "passed over" not in logs
  # The signal at step 9 stopped the run soon.
  resumed = re.findall(r"resuming from step (\d+) in \S+/b\n", logs)
  assert len(resumed) == 2 and 9 <= int(resumed[0]) < int(resumed[1]) == 26

  # XLA adds in another order within a process than between processes. AGN's
  # replicas take their steps alone, and commit in order.
  for workdir, undisturbed, atol in (("a", "c", 1e-6), ("b", "d", 0)):
    rows = _read_rows(tmp_path, workdir)
    assert sorted(rows) == list(range(1, _STEPS + 1))
    assert rows == _read_rows(tmp_path, undisturbed)
    for first in range(1, _STEPS, _EXAMPLES // _BATCH_SIZE):
      epoch = [label for i in range(4) for label in rows[first + i]]
      assert sorted(epoch) == list(range(_EXAMPLES))
    for item in ("default", "wrappers"):
      jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=0, atol=atol),
        _read_arrays(tmp_path, workdir, item),
        _read_arrays(tmp_path, undisturbed, item),
      )
