"""Every snippet and every command of the README runs."""

import os
import pathlib
import re
import shlex
import subprocess
import sys

from absl import flags
import numpy as np
import pytest
import tiny
import xla_flags

from flaxshard import train
from flaxshard.train import charts
from flaxshard.train import command_line

_ROOT = pathlib.Path(__file__).parents[1]
_README = (_ROOT / "README.md").read_text()
# The two set-up commands make virtual environments: .ci/run runs those.
_COMMANDS = [
  line
  for block in re.findall(r"```bash\n(.*?)```", _README, re.S)
  for line in block.splitlines()
  if line.startswith("flaxshard --")
  # tests/processes/local_test.py runs the one with many processes.
  and "--local_processes" not in line
  # tests/analysis/config_plan_test.py plans.
  and "--plan" not in line
]


def _short(command: str, workdir: pathlib.Path) -> list[str]:
  """Returns the command's flags, for two steps of a tiny model.

  Args:
    command: A line of the README.
    workdir: The workdir to train in instead.
  """
  arguments = [
    f"--workdir={workdir}" if argument.startswith("--workdir") else argument
    for argument in shlex.split(command)[1:]
  ]
  arguments += [
    "--config.num_train_steps=2",
    "--config.log_every_steps=1",
    "--config.eval_every_steps=1000000",
  ]
  if "lm_text" in command:
    arguments += [
      f"--config.data.path={_ROOT / 'flaxshard' / 'core'}",
      "--config.data.eval_every=10",
      "--config.data.length=16",
      "--config.batch_size=8",
      "--config.model.num_layers=1",
      "--config.model.num_heads=2",
      # FSDP splits parameters of at least 16,384 elements: the embeddings of
      # the 256 bytes.
      "--config.model.embed_dim=64",
      "--config.model.mlp_dim=64",
      "--config.model.max_length=16",
    ]
  else:
    arguments += [
      "--config.batch_size=16",
      "--config.model.features=(4,)",
      "--config.model.dense=16",
    ]
  return arguments


def test_python_snippets_run_in_order() -> None:
  snippets = re.findall(r"```python\n(.*?)```", _README, re.S)
  assert len(snippets) >= 8
  names: dict[str, object] = {}
  for snippet in snippets:
    exec(compile(snippet, "README.md", "exec"), names)
  # The last snippet makes a state with its own wrapper.
  assert set(names["state"].wrapper_states) == {"loss_scale", "sign_gradients"}


@pytest.mark.parametrize(
  "command",
  [
    # The other steps take long to compile.
    command
    if "--config=digits " in command
    else pytest.param(command, marks=pytest.mark.slow)
    for command in _COMMANDS
  ],
)
def test_command_trains(
  command: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.chdir(_ROOT)
  values = flags.FlagValues()
  for name in ("config", "workdir"):
    flags.DEFINE_string(name, None, "", flag_values=values)
  flags.DEFINE_boolean("list", False, "", flag_values=values)
  flags.DEFINE_integer("verbosity", 0, "", flag_values=values)
  argv = ["flaxshard", *_short(command, tmp_path)]
  command_line.parse_flags(argv, values)
  if command != _COMMANDS[0]:  # a plot takes as long as a run
    monkeypatch.setattr(charts, "plot", lambda *args: None)
  train.train_and_evaluate(values.config, values.workdir)
  assert [row["step"] for row in tiny.rows(tmp_path)] == [1, 2]
  assert all(np.isfinite(row["train_loss"]) for row in tiny.rows(tmp_path))
  is_drawn = (tmp_path / "training.png").exists()
  assert is_drawn == (command == _COMMANDS[0])


@pytest.mark.slow
def test_first_command_as_a_program(tmp_path: pathlib.Path) -> None:
  result = subprocess.run(
    [sys.executable, "-m", "flaxshard", *_short(_COMMANDS[0], tmp_path)],
    cwd=_ROOT,
    env={**os.environ, "XLA_FLAGS": xla_flags.FAST, "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert result.returncode == 0, result.stderr
  assert "done: step 2" in result.stderr


def test_has_one_command_for_the_main_job_and_one_for_the_tests() -> None:
  for part in ("--config=configs/digits.py", "-m pytest"):
    lines = [
      line
      for line in _README.splitlines()
      if line.startswith("python3 -m venv") and part in line
    ]
    assert len(lines) == 1, part
