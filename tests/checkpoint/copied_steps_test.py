"""Steps that were copied or renamed, and links that lead nowhere."""

import json
import logging
import os
import shutil

import grain
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import flaxshard as fs
from flaxshard.checkpoint import inspection


def create(value=0.0):
  return fs.TrainState.create(
    apply_fn=None, params={"w": jnp.full(3, float(value))}, tx=optax.sgd(0.1)
  )


def batches(position=0):
  iterator = iter(grain.MapDataset.range(100).to_iter_dataset())
  for _ in range(position):
    next(iterator)
  return iterator


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  path = tmp_path_factory.mktemp("saved") / "checkpoints"
  with fs.Checkpointer(path) as checkpointer:
    for step in (5, 10):
      checkpointer.save(step, create(step), batches(step), {"loss": 1 / step})
  return path


@pytest.fixture
def path(saved, tmp_path):
  return shutil.copytree(saved, tmp_path / "checkpoints")


def copy(path):
  shutil.copytree(path / "5", path / "20")


def rename(path):
  shutil.move(path / "10", path / "20")


@pytest.mark.parametrize(
  "change", [copy, pytest.param(rename, marks=pytest.mark.slow)]
)
def test_copied_or_renamed_step_is_passed_over(path, change, caplog, capsys):
  change(path)
  newest, origin = (10, 5) if change is copy else (5, 10)
  message = rf"{path}/20 was saved as step {origin}: .* renamed to 20"
  data = batches()
  with fs.Checkpointer(path) as checkpointer:
    assert checkpointer.latest_step() == newest
    with caplog.at_level(logging.WARNING, "flaxshard"):
      restored = checkpointer.restore(create(), data=data)
    assert (checkpointer.restored_step, next(data)) == (newest, newest)
    assert float(restored.params["w"][0]) == newest
    with pytest.raises(ValueError, match=message):
      checkpointer.restore(create(), 20)
    assert f"{path}/20 was saved as step {origin}" in caplog.text
  restored = fs.checkpoint.restore(path, create())
  assert float(restored.params["w"][0]) == newest
  with pytest.raises(ValueError, match=message):
    fs.checkpoint.restore(path / "20", create())
  assert inspection.main([str(path)]) == 1
  assert f"was saved as step {origin}" in capsys.readouterr().out
  # It does not count as the newest step when the next one is saved.
  with fs.Checkpointer(path, max_to_keep=2) as checkpointer:
    assert checkpointer.save(11, create(11))
  assert "20.damaged" in os.listdir(path)


@pytest.mark.parametrize(
  "name",
  [
    "checkpoint_20",
    pytest.param("best-20", marks=pytest.mark.slow),
    pytest.param("020", marks=pytest.mark.slow),
  ],
)
def test_copy_with_a_prefix_or_zeros_is_passed_over(path, name, capsys):
  shutil.copytree(path / "5", path / name)
  restored = fs.checkpoint.restore(path, create())
  assert float(restored.params["w"][0]) == 10
  with fs.Checkpointer(path) as checkpointer:
    restored = checkpointer.restore(create())
    assert float(restored.params["w"][0]) == 10
    assert checkpointer.restored_step == checkpointer.latest_step() == 10
  for where, step in ((path, 20), (path / name, None)):
    with pytest.raises(ValueError, match=f"{name} was saved as step 5: "):
      fs.checkpoint.restore(where, create(), step)
  assert inspection.main([str(path)]) == 1
  assert f"{name} was saved as step 5: " in capsys.readouterr().out


def test_copy_with_another_kind_of_name_is_restored(path):
  shutil.copytree(path / "5", path.parent / "best")
  restored = fs.checkpoint.restore(path.parent / "best", create())
  assert float(restored.params["w"][0]) == 5


def test_step_of_an_older_version_is_restored(path):
  # Its metadata do not name the step.
  shutil.rmtree(path / "10")
  with ocp.CheckpointManager(path) as manager:
    manager.save(10, args=ocp.args.StandardSave(create(10)))
  restored = fs.checkpoint.restore(path, create())
  assert float(restored.params["w"][0]) == 10


def test_position_of_another_step_is_damage_without_digests_too(tmp_path):
  with fs.Checkpointer(tmp_path, digests=False) as checkpointer:
    for step in (4, 5):
      checkpointer.save(step, create(step), batches(step))
  shutil.rmtree(tmp_path / "5" / "input_iterator")
  shutil.copytree(
    tmp_path / "4" / "input_iterator", tmp_path / "5" / "input_iterator"
  )
  with fs.Checkpointer(tmp_path) as checkpointer:
    with pytest.raises(ValueError, match="5/input_iterator/"):
      checkpointer.restore(create(), 5, batches())


def dangling_link(path):
  (path / "20").symlink_to(path / "nowhere")


def link_loop(path):
  (path / "20").symlink_to(path / "20")


def link_loop_in_a_step(path):
  shutil.move(path / "10", path / "20")
  (path / "20" / "default" / "_METADATA").unlink()
  (path / "20" / "default" / "_METADATA").symlink_to("_METADATA")


def dangling_link_in_a_step(path):
  shutil.move(path / "10", path / "20")
  (path / "20" / "default" / "_METADATA").unlink()
  (path / "20" / "default" / "_METADATA").symlink_to("nowhere")


def metadata_nested_too_deep(path):
  shutil.copytree(path / "10", path / "20")
  (path / "20" / "_CHECKPOINT_METADATA").write_text("[" * 100_000)


def metadata_is_a_list(path):
  shutil.copytree(path / "10", path / "20")
  (path / "20" / "_CHECKPOINT_METADATA").write_text(json.dumps([1]))


@pytest.mark.parametrize(
  "change",
  [
    pytest.param(dangling_link, marks=pytest.mark.slow),
    pytest.param(link_loop, marks=pytest.mark.slow),
    link_loop_in_a_step,
    pytest.param(dangling_link_in_a_step, marks=pytest.mark.slow),
    pytest.param(metadata_is_a_list, marks=pytest.mark.slow),
    pytest.param(metadata_nested_too_deep, marks=pytest.mark.slow),
  ],
)
def test_what_restore_passes_over_is_shown(path, change, caplog, capsys):
  change(path)
  newest = 10 if (path / "10").exists() else 5
  with caplog.at_level(logging.WARNING, "flaxshard"):
    restored = fs.checkpoint.restore(path, create())
    with fs.Checkpointer(path) as checkpointer:
      again = checkpointer.restore(create())
  for state in (restored, again):
    np.testing.assert_array_equal(state.params["w"], np.full(3, newest))
  assert caplog.text.count(f"{path / '20'}") >= 2
  assert inspection.main([str(path)]) == 1
  captured = capsys.readouterr()
  (line,) = [x for x in captured.out.splitlines() if x.startswith("        20")]
  assert "damaged: " in line and f"{path / '20'}" in line
  # The newest step that can be restored is shown.
  assert f"\n\n{path / str(newest)}\n" in captured.out
  with fs.Checkpointer(path) as checkpointer:
    assert checkpointer.restore(create()) is not None
    assert checkpointer.save(21, create(21))
    assert checkpointer.latest_step() == 21


def test_entries_that_are_no_steps_are_explained(path, capsys):
  (path / "15.damaged").mkdir()
  (path / "20.orbax-checkpoint-tmp").mkdir()
  (path / "link").symlink_to("nowhere")
  assert inspection.main([str(path)]) == 0
  out = capsys.readouterr().out
  assert "not counted: 15.damaged (a damaged step that was set aside" in out
  assert "not counted: 20.orbax-checkpoint-tmp (a save that has" in out
  assert "not counted: link (a link that leads nowhere)" in out
