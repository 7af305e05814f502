"""The command that shows a directory of checkpoints."""

import checkpoint_states as states
import flax
import jax
import pytest

import flaxshard as fs
from flaxshard.checkpoint import __main__ as main_lib

STATE = states.weights(wrappers=[fs.LossScale(128.0)])


@pytest.fixture
def path(tmp_path):
  path = tmp_path / "checkpoints"
  with fs.Checkpointer(path, config={"seed": 5}) as checkpointer:
    checkpointer.save(1, STATE)
    checkpointer.save(20, STATE, data=states.Counter(3))
  return path


@pytest.fixture
def run(capsys):
  """Returns a function that runs `main`: its exit status, stdout, stderr."""

  def run_main(*argv):
    code = main_lib.main([str(a) for a in argv])
    return code, *capsys.readouterr()

  return run_main


def test_newest_step_is_shown(path, run):
  code, out, err = run(path)
  assert (code, err) == (0, "")
  first, *steps = out.splitlines()[:3]
  assert first == str(path)
  assert [x.split() for x in steps] == [["1", "complete"], ["20", "complete"]]
  # The metadata, and the arrays, of the newest step.
  for line in (
    str(path / "20"),
    f'  jax: "{jax.__version__}"',
    "  step: 20",
    f'  wrappers: ["{fs.LossScale(128.0)!r}"]',
    '  config: {"seed": 5}',
    '  input_iterator: {"positions": [3], "is_bytes": false}',
    "default: 5 arrays",
    f"  {'params/w':17}  float32[3]",
    "wrappers: 4 arrays",
    "  loss_scale/scale          float32[]",
  ):
    assert line in out.splitlines()


def test_damaged_steps_are_marked(path, run):
  file = path / "20" / "default" / "_METADATA"
  states.flip(file, 9)
  (path / "30").mkdir()
  # Files of Flax, in msgpack.
  content = flax.serialization.to_bytes(STATE.without_wrappers())
  (path / "checkpoint_2").write_bytes(content)
  (path / "checkpoint_10").write_bytes(content[:50])
  # Without --verify only sizes and missing files show damage.
  code, out, err = run(path)
  assert (code, err) == (1, "")
  for line in (
    "         1  complete\n",
    "         2  complete, without digests\n",
    "        20  not restorable: KeyError: ",
    f"        30  damaged: {path / '30'} is empty.\n",
    f"damaged: {path / 'checkpoint_10'} is no checkpoint of Flax",
    # The newest complete step is shown.
    f"\n\n{path / 'checkpoint_2'}\n  not written by flaxshard\n",
    "checkpoint_2: 5 arrays\n",
  ):
    assert line in out
  code, out, _ = run(path, "--verify", "--step", 20)
  assert code == 1 and "params/w" not in out
  assert f"        20  damaged: {file} has crc32 " in out


def test_nothing_to_show_exits_with_2(path, tmp_path, run):
  for arguments, fact in (
    ([tmp_path / "missing"], "/missing: there is no such path"),
    ([path / "1" / "flaxshard"], "/flaxshard: it has no steps"),
    ([path, "--step", "4"], f"{path} has no step 4, only [1, 20]"),
  ):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and fact in err
