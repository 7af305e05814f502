"""Runs the commands of a page, shortened; says which ones other tests run."""

from __future__ import annotations

import contextlib
import io
import pathlib
import re
import shlex
import sys
from typing import Any

from absl import flags
import ml_collections
import numpy as np
import page_blocks
import pytest
import tiny

from flaxshard import train
from flaxshard.checkpoint import __main__ as inspection
from flaxshard.train import command_line
from flaxshard.train import config as config_lib
from flaxshard.train import console
from flaxshard.train import report

# Blocks that the runner does not run: (kind, pattern, what covers them). The
# pattern is searched in a command of a "bash" block, or in a whole block. What
# covers it is a file (and a name in it), or the reason why nothing can.
ELSEWHERE = (
  ("bash", r"^python3 -m venv .*-m (flaxshard|pytest)", ".ci/run"),
  (
    "bash",
    r"^(python3 -m venv \.venv$|\.venv/bin/(ruff|python -m (pytest|sphinx)) )",
    ".ci/run",
  ),
  ("bash", r"^git clone ", "none: the tests need no network"),
  ("bash", r"^python docs/pictures/", "tests/docs/pictures_test.py"),
  ("bash", r"^python benchmarks/", "none: a benchmark takes minutes"),
  ("bash", r"^(\S*/)?(pip|python3? -m pip) install ", "pyproject.toml"),
  ("bash", r"--local_processes=", "tests/processes/local_test.py"),
  ("bash", r"--plan=", "tests/plans/config_test.py"),
  (
    "bash",
    r"--config=imagenet|tensorflow_datasets as tfds",
    "tests/examples/imagenet_test.py",
  ),
  ("bash", r"gs://", "tests/train/bucket_test.py"),
  (
    "bash",
    r"--workdir=/shared/digits$",
    "tests/processes/cluster_test.py",
  ),
  ("python", r"fs\.ray\.fit\(", "tests/ray_test.py"),
  (
    "python",
    r"^import tensorflow as tf\n",
    "tests/docs/tensorflow_tables_test.py",
  ),
)

# Pages whose blocks without a kind are figures that were measured, with their
# conditions.
MEASURED = ("benchmarks/README.md", "docs/start.md")

_SMALL_MODELS: dict[str, dict[str, Any]] = {
  "cnn": {"features": (4,), "dense": 16},
  # FSDP splits parameters of at least 16,384 elements: the embeddings of the
  # 256 bytes.
  "transformer": {
    "num_layers": 1,
    "num_heads": 2,
    "embed_dim": 64,
    "mlp_dim": 64,
    "max_length": 16,
  },
}


def covered_by(kind: str, text: str) -> str:
  """Returns the test or the reason of the table above, or an empty string.

  Args:
    kind: The kind of a block.
    text: The text of the block; of a "bash" block, one of its commands.
  """
  for known, pattern, test in ELSEWHERE:
    if kind == known and re.search(pattern, text.strip()):
      return test
  return ""


def commands(text: str) -> list[str]:
  """Returns the commands of a block, without comments and line breaks."""
  lines = text.replace("\\\n", " ").splitlines()
  return [x.strip() for x in lines if x.strip() and not x.lstrip()[0] == "#"]


def can_run(command: str) -> bool:
  """Returns whether `Runner` can run a command."""
  return _parse(command)[0] is not None


def _parse(command: str) -> tuple[str | None, list[str]]:
  """Returns a command's program and arguments."""
  words = shlex.split(command, comments=True)
  if words[:1] == ["flaxshard"]:
    return "flaxshard", words[1:]
  if words[:3] == ["python", "-m", "flaxshard.checkpoint"]:
    return "checkpoint", words[3:]
  return None, []


class Runner:
  """Runs the commands of a page in process.

  Args:
    page: The page.
    folder: The current folder of the commands.
  """

  def __init__(self, page: page_blocks.Page, folder: pathlib.Path):
    self._page = page
    self._folder = folder
    self._runs: dict[str, int] = {}

  def run(self, block: page_blocks.Block, may_fail: bool) -> str:
    """Returns what the commands of a block print.

    Args:
      block: The block.
      may_fail: Whether a command may end with an error.
    """
    output = io.StringIO()
    with (
      contextlib.redirect_stdout(output),
      contextlib.redirect_stderr(output),
    ):
      for command in commands(block.text):
        if covered_by("bash", command):
          continue
        try:
          self._run(command, block)
        except SystemExit as end:
          if end.code and not may_fail:
            message = f"{command}\n{output.getvalue()}"
            raise AssertionError(message) from end
    return output.getvalue()

  def _run(self, command: str, block: page_blocks.Block) -> None:
    program, arguments = _parse(command)
    if program == "checkpoint":
      sys.exit(inspection.main(arguments))
    self._write_config(arguments, block)
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(report, "draw", lambda *args: None)
      self._train(arguments)

  def _write_config(
    self, arguments: list[str], block: page_blocks.Block
  ) -> None:
    """Writes the config file that a command names and a block above has."""
    for argument in arguments:
      match = re.fullmatch(r"--config=([\w/]+\.py)(:.*)?", argument)
      if not match or pathlib.Path(match[1]).exists():
        continue
      sources = [
        other.text
        for other in self._page.blocks
        if other.line < block.line and "def get_config(" in other.text
      ]
      assert sources, f"no block above has get_config() of {match[1]}"
      path = self._folder / match[1]
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_text(sources[-1])

  def _train(self, arguments: list[str]) -> None:
    values = flags.FlagValues()
    for name in ("config", "workdir", "plan"):
      flags.DEFINE_string(name, None, "", flag_values=values)
    for name in ("list", "synchronize", "version"):
      flags.DEFINE_boolean(name, False, "", flag_values=values)
    flags.DEFINE_integer("verbosity", 0, "", flag_values=values)
    command_line.parse_flags(["flaxshard", *arguments], values)
    workdir = values.workdir
    self._runs[workdir] = self._runs.get(workdir, 0) + 1
    with (
      command_line.report_mistakes(verbose=False),
      console.show_log(always=True),
    ):
      config = config_lib.check(values.config)
      _shorten(config)
      if config.resume == "extend":
        config.num_train_steps *= self._runs[workdir]
      train.train_and_evaluate(config, workdir)
    rows = tiny.rows(workdir)
    assert rows[-1]["step"] == config.num_train_steps, rows
    assert all(np.isfinite(row.get("train_loss", 0)) for row in rows), rows


def _shorten(config: ml_collections.ConfigDict) -> None:
  """Makes a run of two steps of a tiny model of a config."""
  with config.unlocked(), config.ignore_type():
    config.num_train_steps = 2
    config.log_every_steps = 1
    config.eval_every_steps = 1_000_000
    config.batch_size = min(config.batch_size, 16)
    config.writer = "none"
    if config.model.get("name") in _SMALL_MODELS:
      config.model.update(_SMALL_MODELS[config.model.name])
    if config.data.get("name") == "text":
      config.batch_size = 8
      config.data.update(eval_every=10, length=16)
      config.data.path = config.data.path or str(
        page_blocks.ROOT / "flaxshard" / "core"
      )
