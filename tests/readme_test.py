"""Every snippet of the README runs."""

import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest
import xla_flags

_ROOT = pathlib.Path(__file__).parent.parent
_README = (_ROOT / "README.md").read_text()
# The two set-up commands make a virtual environment: .ci/run runs those.
_COMMANDS = [
  line
  for block in re.findall(r"```bash\n(.*?)```", _README, re.S)
  for line in block.splitlines()
  if line.startswith("python -m flaxshard")
]


def test_python_snippets_run_in_order() -> None:
  snippets = re.findall(r"```python\n(.*?)```", _README, re.S)
  assert len(snippets) >= 8
  names: dict[str, object] = {}
  for snippet in snippets:
    exec(compile(snippet, "README.md", "exec"), names)
  # The last state of the tour came from the snippet with its own wrapper.
  assert set(names["state"].wrapper_states) == {"loss_scale", "sign_gradients"}


@pytest.mark.parametrize("command", _COMMANDS)
def test_commands_run(command: str, tmp_path: pathlib.Path) -> None:
  arguments = shlex.split(command)[1:]
  arguments = [
    f"--workdir={tmp_path}" if a.startswith("--workdir") else a
    for a in arguments
  ]
  # A few steps of the command as it stands, on one device.
  short = ["--config.num_train_steps=2", "--config.eval_every_steps=1000000"]
  if "lm_text" in command:
    short += ["--config.data.path=" + str(_ROOT / "flaxshard")]
    short += ["--config.data.eval_every=10", "--config.model.num_layers=1"]
  result = subprocess.run(
    [sys.executable, *arguments, *short],
    cwd=_ROOT,
    env={**os.environ, "XLA_FLAGS": xla_flags.FAST, "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert result.returncode == 0, result.stderr
  assert "done: step=2" in result.stderr
  assert (tmp_path / "training.png").exists()


def test_there_is_a_command_for_the_main_job_and_one_for_the_tests() -> None:
  for part in ("--config=configs/digits.py", "-m pytest"):
    lines = [
      line
      for line in _README.splitlines()
      if line.startswith("python3 -m venv") and part in line
    ]
    assert len(lines) == 1, part
