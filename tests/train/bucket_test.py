"""Runs whose workdir is in a bucket, with a local server."""

import os

import bucket_servers
from etils import epath
from forked_programs import wait_until
import pytest
import tiny
from tree_equality import assert_trees_equal

import flaxshard as fs
from flaxshard import train
from flaxshard.checkpoint import __main__ as inspection
from flaxshard.checkpoint import steps
from flaxshard.core import files
from flaxshard.train import report

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("servers")]

_DRAW = report.draw
_CONFIG = dict(
  num_train_steps=6,
  log_every_steps=1,
  eval_every_steps=3,
  checkpoint_every_steps=2,
  writer="tensorboard",
  precision="float32",
)


def _train(workdir):
  """Returns the final state of a run in this process."""
  return train.train_and_evaluate(tiny.config(**_CONFIG), str(workdir))


def _damage(step_dir):
  """Shortens the largest object of a step; returns its path."""
  found = files.files_in(f"{step_dir}/default")
  sizes = {p: p.stat().length for p in found}
  path = max(sizes, key=sizes.get)
  path.write_bytes(bytes(sizes[path] - 1))
  return path


def _names(folder):
  return sorted(p.name for p in epath.Path(folder).iterdir())


def test_a_killed_run_with_a_damaged_step_ends_like_a_local_run(
  programs, caplog, tmp_path, monkeypatch
):
  folder = f"gs://{bucket_servers.BUCKET}/killed"
  local = tmp_path / "local"
  local_state = _train(local)
  monkeypatch.setattr(report, "draw", _DRAW)
  (tmp_path / "my_config.py").write_text(
    f"import tiny\n\ndef get_config():\n  return tiny.config(**{_CONFIG})\n"
  )
  program = programs.start(
    tmp_path, "--config=my_config.py", f"--workdir={folder}", **os.environ
  )
  saved = epath.Path(f"{folder}/checkpoints/4/commit_success.txt")
  wait_until(saved.exists, "step 4", program)
  program.kill()
  assert [row["step"] for row in tiny.rows(folder)][:4] == [1, 2, 3, 4]

  newest = max(steps.find(f"{folder}/checkpoints"))
  path = _damage(f"{folder}/checkpoints/{newest}")
  # The output of a save that was killed.
  half = epath.Path(f"{folder}/checkpoints/{newest + 1}/default/x")
  half.write_bytes(b"half")

  found = _train(folder)
  assert f"{path} has" in caplog.text
  assert_trees_equal(found.params, local_state.params)
  assert tiny.untimed_rows(folder) == tiny.untimed_rows(local)
  names = _names(folder)
  assert {"config.json", "data.json", "training.png"} < set(names)
  assert [n.partition(".out.")[0] for n in names].count("events") == 2
  assert max(steps.find(f"{folder}/checkpoints")) == 6
  assert f"{newest}.damaged" in _names(f"{folder}/checkpoints")
  assert inspection.main([folder, "--verify"]) == 0
  fs.export(folder, f"{folder}_model")
  assert "model.json" in _names(f"{folder}_model")
  with pytest.raises(ValueError, match="another folder"):
    fs.export(folder, f"{folder}_model")

  # A step that is copied to the disk is a step there.
  for path in files.files_in(f"{folder}/checkpoints/6"):
    copy = tmp_path / "disk/6" / path.relative_to(f"{folder}/checkpoints/6")
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_bytes(path.read_bytes())
  assert inspection.main([str(tmp_path / "disk"), "--verify"]) == 0
