"""fs.load: states of runs, on other devices, and of damaged workdirs."""

import json
import os
import shutil

import jax
import numpy as np
import pytest
import tiny
import two_processes

import flaxshard as fs
from flaxshard import data
from flaxshard import train

_THIS = "load_test_factories"


@pytest.fixture(scope="module", autouse=True)
def importable():
  """Lets configs name the data of this file; draws no plots."""
  with tiny.importable(_THIS, __name__):
    yield


def digits_from_disk() -> data.Splits:
  """Returns the digits; a test lets it fail, as where they are not on disk."""
  return data.digits()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A run with checkpoints of steps 4 and 8: its workdir and final state."""
  workdir = str(tmp_path_factory.mktemp("run"))
  config = tiny.config(
    data={"name": f"{_THIS}:digits_from_disk"},
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


def edit_json(path, **fields) -> None:
  with open(path) as f:
    values = json.load(f)
  with open(path, "w") as f:
    json.dump({**values, **fields}, f)


def images() -> np.ndarray:
  return data.digits().eval.inputs[:3]


def assert_same(a, b) -> None:
  jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_run_is_loaded_without_its_data(run, monkeypatch):
  workdir, state = run

  def fail():
    raise FileNotFoundError("the data is elsewhere")

  monkeypatch.setattr(f"{__name__}.digits_from_disk", fail, raising=True)
  loaded = fs.load(workdir)
  assert loaded.step == 8
  assert int(loaded.state.step) == 8
  assert_same(loaded.state.params, state.params)
  assert_same(loaded.state.opt_state, state.opt_state)
  assert_same(loaded.params, state.eval_params)
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
  with pytest.raises(ValueError, match=r"step must be one of 'best'"):
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
  assert_same(loaded.state.params, state.params)
  shape = loaded.predict({"inputs": images()}).shape
  assert shape == (3, 10)


def test_rules_that_do_not_fit_the_strategy_raise(copy):
  path = os.path.join(copy, "config.json")
  rules = [["dense/kernel", [None, "model"]]]
  edit_json(path, mesh={"axes": [["model", 2]], "rules": rules})
  assert fs.load(copy).strategy.mesh.shape["model"] == 2
  strategy = fs.Strategy(devices=jax.devices()[:1])
  with pytest.raises(ValueError) as e:
    fs.load(copy, strategy=strategy)
  for fact in (path, "config.mesh.rules", "'model'", "rules=()"):
    assert fact in str(e.value), str(e.value)
  assert fs.load(copy, strategy=strategy, rules=()).step == 8


def test_a_mesh_that_does_not_fit_uses_the_first_device(copy):
  mesh = {"axes": [["model", 512]], "rules": [["kernel", [None, "model"]]]}
  edit_json(os.path.join(copy, "config.json"), mesh=mesh)
  assert fs.load(copy).strategy.mesh.size == 1


def test_a_damaged_latest_checkpoint_is_passed_over(copy, caplog):
  shutil.rmtree(os.path.join(copy, "checkpoints", "8", "default"))
  assert fs.load(copy).step == 4
  assert "step 8 is damaged" in caplog.text


def test_what_is_not_a_workdir_raises(run, copy, tmp_path):
  cases = [
    (copy + "s", ("there is no such path", f"Did you mean '{copy}'")),
    (str(tmp_path), ("no config.json",)),
    (os.path.join(copy, "checkpoints"), (f"Did you mean '{copy}'",)),
  ]
  for path, facts in cases:
    with pytest.raises(ValueError) as e:
      fs.load(path)
    for fact in (path, "workdir", *facts):
      assert fact in str(e.value), str(e.value)


def test_a_broken_file_is_named(copy):
  edit_json(os.path.join(copy, "data.json"), example=3)
  with pytest.raises(ValueError, match=r"data\.json is broken"):
    fs.load(copy)
  path = os.path.join(copy, "config.json")
  edit_json(path, bach_size=3)
  with pytest.raises(ValueError, match=r"config\.json: config\.bach_size"):
    fs.load(copy)
  with open(path, "w") as f:
    f.write("{")
  with pytest.raises(ValueError, match=r"config\.json is broken"):
    fs.load(copy)


def test_a_model_that_has_changed_since_raises(copy):
  path = os.path.join(copy, "config.json")
  edit_json(path, model={"name": "cnn", "features": [], "dense": 9})
  with pytest.raises(ValueError, match="dense/"):
    fs.load(copy)
  edit_json(path, model={"name": "no_such_package:Model"})
  with pytest.raises(ValueError, match=r"config\.json: .*no_such_package"):
    fs.load(copy)


def test_a_task_that_was_an_object_is_given_again(copy):
  edit_json(os.path.join(copy, "config.json"), task="<my_package.tasks.Mine>")
  with pytest.raises(ValueError) as e:
    fs.load(copy)
  for fact in ("config.json", "<my_package.tasks.Mine>", "argument task"):
    assert fact in str(e.value), str(e.value)
  with pytest.raises(TypeError, match=r"^task must be an object"):
    fs.load(copy, task=fs.tasks.Classification)
  task = fs.tasks.Classification(num_classes=10)
  assert fs.load(copy, task=task).task.task is task


def test_best_needs_a_best_metric(copy):
  edit_json(os.path.join(copy, "config.json"), best_metric="none")
  with pytest.raises(ValueError, match=r"config\.best_metric"):
    fs.load(copy, "best")


def test_shapes_that_an_older_version_did_not_store_are_those_of_the_data(copy):
  path = os.path.join(copy, "data.json")
  with open(path, "w") as f:
    json.dump({"num_train_examples": 1437}, f)
  assert fs.load(copy).example["inputs"].shape == (8, 8, 1)


def test_an_invalid_batch_raises(run):
  loaded = fs.load(run[0])
  cases = [
    (np.ones((2, 8, 8, 1)), TypeError, ("dict", "'inputs'")),
    ({"input": 1}, ValueError, ("'input'", "Did you mean 'inputs'?")),
    (
      {"inputs": np.ones((8, 8, 1))},
      ValueError,
      ("(batch, 8, 8, 1)", "(8, 8, 1)"),
    ),
  ]
  for batch, kind, facts in cases:
    with pytest.raises(kind) as e:
      loaded.predict(batch)
    for fact in facts:
      assert fact in str(e.value), str(e.value)


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
