"""What the command says about a directory of checkpoints."""

import subprocess
import sys

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import flaxshard as fs
from flaxshard import checkpoint
from flaxshard.checkpoint import inspection


@pytest.fixture(scope="module")
def state():
  return fs.create_train_state(
    nn.Dense(3),
    jax.random.key(0),
    np.ones((1, 2), np.float32),
    optax.sgd(0.1),
    wrappers=[fs.LossScale(128.0)],
  )


@pytest.fixture
def path(state, tmp_path):
  path = tmp_path / "checkpoints"
  with checkpoint.Checkpointer(path, config={"seed": 5}) as checkpointer:
    checkpointer.save(1, state)
    checkpointer.save(20, state)
  return path


def run(capsys, *argv):
  """Runs `main`, and returns its status, stdout and stderr."""
  code = inspection.main([str(a) for a in argv])
  said = capsys.readouterr()
  return code, said.out, said.err


def test_steps_and_what_the_newest_holds(path, capsys):
  code, out, err = run(capsys, path)
  assert (code, err) == (0, "")
  lines = out.splitlines()
  assert lines[0] == str(path)
  assert [line.split()[0] for line in lines[1:3]] == ["1", "20"]
  assert all(line.endswith("kB  complete") for line in lines[1:3])
  assert lines[3:] == [
    "",
    str(path / "20"),
    f"  flaxshard: {fs.__version__}",
    f"  jax: {jax.__version__}",
    f"  orbax: {ocp.__version__}",
    "  step: 20",
    "  state_step: 0",
    '  items: ["default", "wrappers"]',
    "  processes: 1",
    "  wrapper: loss_scale(scale=128.0)",
    "  config.seed: 5",
    "default: 3 arrays, 40 B",
    "  params/bias    float32[3]",
    "  params/kernel  float32[2,3]",
    "  step           int32[]",
    "wrappers: 4 arrays, 16 B",
    "  loss_scale/bad_steps      int32[]",
    "  loss_scale/good_steps     int32[]",
    "  loss_scale/scale          float32[]",
    "  loss_scale/skipped_steps  int32[]",
  ]


def test_a_workdir_and_a_step(path, capsys):
  code, out, _ = run(capsys, path.parent, "--step", 1, "--verify")
  assert code == 0
  assert out.splitlines()[0] == str(path)
  assert out.count("complete, verified") == 2
  assert f"\n\n{path / '1'}\n" in out
  assert "  step: 1\n" in out


def test_damaged_steps(path, capsys):
  file = path / "20" / "default" / "_METADATA"
  content = bytearray(file.read_bytes())
  content[9] ^= 1
  file.write_bytes(content)
  (path / "30").mkdir()
  (path / "20.damaged").mkdir()
  # The size is what it was; the empty directory is seen.
  code, out, err = run(capsys, path)
  assert code == 1
  assert err.startswith(f"error: {path / '20'} cannot be read: KeyError: ")
  assert "  complete\n" in out
  assert f"damaged: {path / '30'} is empty.\n" in out
  assert "  not counted: 20.damaged\n" in out
  code, out, _ = run(capsys, path, "--verify")
  assert code == 1
  assert f"damaged: {file} has crc32 " in out
  # The newest that is complete is shown.
  assert f"\n\n{path / '1'}\n" in out
  code, out, _ = run(capsys, path, "--verify", "--step", 20)
  assert code == 1
  assert "params/kernel" not in out


def test_a_plain_checkpoint(state, tmp_path, capsys):
  with ocp.CheckpointManager(tmp_path) as manager:
    manager.save(2, args=ocp.args.StandardSave(state.without_wrappers()))
  code, out, _ = run(capsys, tmp_path, "--verify")
  assert code == 0
  assert "complete, without digests" in out
  assert "not written by flaxshard" in out
  assert "  params/kernel  float32[2,3]\n" in out


def test_files_of_flax(state, tmp_path, capsys):
  content = flax.serialization.to_bytes(state.without_wrappers())
  (tmp_path / "checkpoint_2").write_bytes(content)
  (tmp_path / "checkpoint_10").write_bytes(content[:50])
  code, out, _ = run(capsys, tmp_path)
  assert code == 1
  lines = out.splitlines()
  size = f"{len(content)} B"
  assert lines[1] == f"  {2:>8}  {size:>9}  complete, without digests"
  assert "checkpoint_10 is no checkpoint of Flax" in lines[2]
  assert "checkpoint_2: 3 arrays, 40 B" in lines
  assert "  params/kernel  float32[2,3]" in lines
  assert not any("not counted" in line for line in lines)


def test_wrappers_that_no_config_can_hold(tmp_path):
  state = fs.TrainState.create(
    apply_fn=None,
    params={"w": jnp.zeros(2)},
    tx=optax.sgd(0.1),
    wrappers=[fs.AGN(4, outer_tx=optax.sgd(0.7))],
  )
  with checkpoint.Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(1, state)
  text = inspection.describe(tmp_path / "1")
  assert "  wrapper: AGN(communication_period=4" in text


def test_errors(path, tmp_path, capsys):
  nothing = tmp_path / "nothing"
  nothing.mkdir()
  for arguments, sentence in (
    ([tmp_path / "missing"], f"there is no directory {tmp_path / 'missing'}."),
    ([nothing], f"{nothing} has no checkpoints."),
    ([path, "--step", "4"], f"{path} has no step 4; there are [1, 20]."),
  ):
    assert run(capsys, *arguments) == (2, "", f"error: {sentence}\n")


def test_the_command(path):
  done = subprocess.run(
    [sys.executable, "-m", "flaxshard.checkpoint", path, "--step", "4"],
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert done.returncode == 2
  assert done.stdout == ""
  sentence = f"{path} has no step 4; there are [1, 20]."
  assert done.stderr == f"error: {sentence}\n"
