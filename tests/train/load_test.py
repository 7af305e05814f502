"""fs.load: states of runs, on other devices, and of damaged workdirs."""

import json
import os
import pathlib
import shutil

import jax
import numpy as np
import pytest
import tiny
import tree_equality
import two_processes

import flaxshard as fs
from flaxshard import data
from flaxshard import train


def digits_from_disk() -> data.Splits:
  """Returns the digits; a test lets it fail, as where they are not on disk."""
  return data.digits()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A run with checkpoints of steps 4 and 8: its workdir and final state."""
  workdir = str(tmp_path_factory.mktemp("run"))
  config = tiny.config(
    data={"name": f"{__name__}:digits_from_disk"},
    mesh={"replica": 2},
    precision="float32",
    wrappers=(("ema", {"decay": 0.5}),),
    best_metric="eval_loss",
    eval_every_steps=4,
  )
  return workdir, train.train_and_evaluate(config, workdir)


@pytest.fixture
def copy(run, tmp_path):
  """A copy of the workdir, to be changed."""
  path = str(tmp_path / "run")
  shutil.copytree(run[0], path)
  return path


def images() -> np.ndarray:
  return data.digits().eval.inputs[:3]


def test_a_run_is_loaded_without_its_data(run, monkeypatch):
  workdir, state = run

  def fail():
    raise FileNotFoundError("the data is elsewhere")

  monkeypatch.setattr(f"{__name__}.digits_from_disk", fail, raising=True)
  loaded = fs.load(workdir)
  assert loaded.step == 8
  assert int(loaded.state.step) == 8
  tree_equality.assert_trees_equal(loaded.state.params, state.params)
  tree_equality.assert_trees_equal(loaded.state.opt_state, state.opt_state)
  tree_equality.assert_trees_equal(loaded.params, state.eval_params)
  assert loaded.config.model.name == "cnn"
  assert loaded.task.name == "Classification"
  assert loaded.example["inputs"].shape == (8, 8, 1)
  assert loaded.strategy.num_replicas_in_sync == 2
  assert workdir in repr(loaded) and "step=8" in repr(loaded)

  # The averages of EMA predict, in evaluation mode.
  logits = loaded.predict({"inputs": images()})
  expected = state.apply_fn({"params": state.eval_params}, images())
  np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)


def test_the_step_can_be_chosen(run):
  workdir, _ = run
  losses = {row["step"]: row.get("eval_loss") for row in tiny.rows(workdir)}
  assert fs.load(workdir, 4).step == 4
  best = min((4, 8), key=losses.get)
  assert fs.load(workdir, "best").step == best
  with pytest.raises(ValueError, match=r"step 5 .*\[4, 8\]"):
    fs.load(workdir, 5)
  with pytest.raises(ValueError, match="step must be an integer"):
    fs.load(workdir, "bets")


def test_a_run_is_loaded_on_other_devices(run):
  workdir, state = run
  strategy = fs.Strategy(
    devices=jax.devices()[:4], mesh_shape={"replica": 1, "model": 4}
  )
  loaded = fs.load(
    workdir, strategy=strategy, rules=(("dense/kernel", ("model", None)),)
  )
  kernel = loaded.state.params["dense"]["kernel"]
  assert kernel.sharding.spec[0] == "model"
  assert kernel.sharding.mesh.size == 4
  tree_equality.assert_trees_equal(loaded.state.params, state.params)
  shape = loaded.predict({"inputs": images()}).shape
  assert shape == (3, 10)


def test_a_damaged_latest_checkpoint_is_passed_over(copy, caplog):
  shutil.rmtree(os.path.join(copy, "checkpoints", "8", "default"))
  assert fs.load(copy).step == 4
  assert "step 8 is damaged" in caplog.text


@pytest.mark.parametrize(
  ("fields", "fact"),
  [
    ({"bach_size": 3}, "config.bach_size"),
    (None, "config.json is broken"),
    # A model that has changed since.
    ({"model": {"name": "cnn", "features": [], "dense": 9}}, "dense/"),
    # A task that was an object is given again.
    ({"task": "<mine.Task>"}, "'<mine.Task>' was an object: give it again as"),
  ],
)
def test_a_config_that_does_not_fit_raises(copy, fields, fact):
  path = pathlib.Path(copy, "config.json")
  values = json.loads(path.read_text())
  path.write_text("" if fields is None else json.dumps({**values, **fields}))
  with pytest.raises(ValueError) as e:
    fs.load(copy)
  assert fact in str(e.value)
  if fields and "task" in fields:
    task = fs.tasks.Classification(num_classes=10)
    assert fs.load(copy, task=task).task.task is task


def test_what_is_not_a_workdir_raises(tmp_path):
  with pytest.raises(ValueError, match=r"not the workdir .*config\.json") as e:
    fs.load(tmp_path)
  assert f"workdir={str(tmp_path)!r}" in str(e.value)


_LOAD = """
import numpy as np
import flaxshard as fs

loaded = fs.load(sys.argv[3], "best", rules=({"name": "fsdp", "min_size": 8},))
logits = loaded.predict({"inputs": np.load(sys.argv[4])})
whole = jax.jit(
  lambda x: x, out_shardings=loaded.state.step.sharding)(logits)
print("loaded", loaded.step, len(loaded.strategy.mesh.devices.ravel()))
np.save(f"{sys.argv[4]}.{rank}.npy", np.asarray(whole.addressable_data(0)))
"""


@pytest.mark.slow
def test_two_processes_load_a_run_of_one(run, tmp_path):
  workdir, _ = run
  path = str(tmp_path / "inputs.npy")
  np.save(path, images())
  outs = two_processes.run(_LOAD, workdir, path, devices=1)
  loaded = fs.load(workdir, "best")
  assert all(f"loaded {loaded.step} 2" in out for out, _ in outs), outs
  expected = loaded.predict({"inputs": images()})
  for rank in (0, 1):
    logits = np.load(f"{path}.{rank}.npy")
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)
