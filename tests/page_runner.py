"""Runs the code blocks of a page, as a reader would from top to bottom.

Commands run in process, with tiny models; `ELSEWHERE` says which ones other
tests run.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
import contextlib
import functools
import io
import os
import pathlib
import re
import shlex
import sys
import traceback
import types
from typing import Any
from unittest import mock
import warnings

from absl import flags
import jax
import ml_collections
import numpy as np
from page_blocks import Block
from page_blocks import Page
from page_blocks import ROOT
import pytest
import tiny

from flaxshard import train
from flaxshard.checkpoint import __main__ as inspection
from flaxshard.train import command_line
from flaxshard.train import config as config_lib
from flaxshard.train import console
from flaxshard.train import report

# Blocks that the runner does not run, by kind: a pattern, and what covers them.
# The pattern is searched in a command of a "bash" block, or in a whole block.
# What covers it is a file, or the reason why nothing can.
ELSEWHERE = {
  "bash": {
    r"^python3 -m venv (\.venv$|.*-m (flaxshard|pytest))": ".ci/run",
    r"^\.venv/bin/(ruff|python -m (pytest|sphinx)) ": ".ci/run",
    r"^git clone ": "none: the tests need no network",
    r"^python docs/pictures/": "tests/docs/site_test.py",
    r"^python benchmarks/": "none: a benchmark takes minutes",
    r"^(\S*/)?(pip|python3? -m pip) install ": "pyproject.toml",
    r"--local_processes=": "tests/processes/local_test.py",
    r"--plan=": "tests/plans/config_test.py",
    r"--config=imagenet": "tests/examples/imagenet_test.py",
    r"tensorflow_datasets as tfds": "tests/examples/imagenet_test.py",
    r"gs://": "tests/train/main_test.py",
    r"--workdir=/shared/digits$": "tests/processes/cluster_test.py",
  },
  "python": {
    r"fs\.ray\.fit\(": "tests/ray_test.py",
    r"^import tensorflow as tf\n": "none: needs TensorFlow; it ran with 2.21",
  },
}
# Where the examples write. A run of the tests writes in its own folder.
_FOLDERS = re.compile(r"(?<![\w.])/(?=(tmp|shared)/)")
# Pages whose blocks without a kind are figures that were measured, with their
# conditions.
MEASURED = ("benchmarks/README.md", "docs/start.md")

# FSDP splits parameters of at least 16,384 elements: the embeddings of the 256
# bytes.
_WIDTHS = {"num_heads": 2, "embed_dim": 64, "mlp_dim": 64}
_SMALL_MODELS: dict[str, dict[str, Any]] = {
  "cnn": {"features": (4,), "dense": 16},
  "transformer": {"num_layers": 1, "max_length": 16, **_WIDTHS},
}
_KINDS = ("python", "diff", "bash")


class PageError(AssertionError):
  """A block does not do what its page says; the message has page and line."""


def check_kinds(page: Page) -> None:
  """Raises a `PageError` for the first block that nothing checks."""
  before = None
  for block in page.blocks:
    if problem := _problem(page, block, before):
      raise PageError(f"{page.name}:{block.line}: {problem}")
    before = block


def _problem(page: Page, block: Block, before: Block | None) -> str:
  """Returns why nothing checks a block, or an empty string."""
  if block.kind == "bash":
    for command in commands(block.text):
      if not covered_by("bash", command) and _parse(command)[0] is None:
        return f"no rule for {command!r}: see ELSEWHERE in tests/page_runner.py"
    return ""
  is_figure = not block.kind and page.name in MEASURED
  if block.kind in ("python", "diff") or is_figure:
    return ""
  if block.kind != "text":
    return f"no test checks blocks of the kind {block.kind!r}"
  if not before or before.kind not in _KINDS:
    return "a text follows no code block"
  if not _is_run(before):
    return "a text follows code that is not run: see tests/page_runner.py"
  return ""


def _is_run(block: Block) -> bool:
  texts = commands(block.text) if block.kind == "bash" else [block.text]
  return not any(covered_by(block.kind, text) for text in texts)


def covered_by(kind: str, text: str) -> str:
  """Returns the test or the reason of the table above, or an empty string.

  Args:
    kind: The kind of a block.
    text: The text of the block; of a "bash" block, one of its commands.
  """
  for pattern, test in ELSEWHERE.get(kind, {}).items():
    if re.search(pattern, text.strip()):
      return test
  return ""


def commands(text: str) -> list[str]:
  """Returns the commands of a block, without comments and line breaks."""
  lines = text.replace("\\\n", " ").splitlines()
  return [x.strip() for x in lines if x.strip() and not x.lstrip()[0] == "#"]


def _parse(command: str) -> tuple[str | None, list[str]]:
  """Returns a command's program and arguments."""
  words = shlex.split(command, comments=True)
  if words[:1] == ["flaxshard"]:
    return "flaxshard", words[1:]
  if words[:3] == ["python", "-m", "flaxshard.checkpoint"]:
    return "checkpoint", words[3:]
  return None, []


def run(
  page: Page, folder: pathlib.Path, kinds: Sequence[str] = _KINDS
) -> None:
  """Runs the blocks of a page and compares what they print.

  Args:
    page: The page.
    folder: A folder to work in, instead of the current folder, /tmp and others.
    kinds: The kinds of blocks to run.

  Raises:
    PageError: A block fails, or the text block behind it is not its output.
  """
  # A program is the module __main__, also for what looks it up by its name.
  module = types.ModuleType("__main__")
  for name in ("configs", "benchmarks"):
    (folder / name).symlink_to(ROOT / name)
  runs: collections.Counter[str] = collections.Counter()
  with _isolated(module, folder) as caught:
    for i, block in enumerate(page.blocks):
      is_python = block.kind == "python"
      if block.kind not in kinds or (is_python and not _is_run(block)):
        continue
      expected = [x for x in page.blocks[i + 1 : i + 2] if x.kind == "text"]
      place, shows = f"{page.name}:{block.line}", bool(expected)
      text = _FOLDERS.sub(f"{folder}/", block.text)
      in_page = functools.partial(_run_python, page, block.line)
      if block.kind == "bash":
        above = [x.text for x in page.blocks[:i]]
        calls = [functools.partial(_run_commands, text, above, runs, shows)]
      elif block.kind == "python":
        calls = [functools.partial(in_page, text, vars(module))]
      else:
        # Both sides are complete; the names that they define are theirs.
        calls = [
          functools.partial(in_page, _side(text, sign), dict(vars(module)))
          for sign in "-+"
        ]
      for call in calls:
        caught.clear()
        outputs = _outputs_of(call, place, caught, shows)
      if expected:
        outputs = [output.replace(str(folder), "") for output in outputs]
        _compare(page, expected[0], outputs)


def _side(text: str, sign: str) -> str:
  """Returns the program of a diff before ("-") or after ("+") the change."""
  return "\n".join(
    line[1:] if line[:1] in (" ", sign) else "" for line in text.split("\n")
  )


def _run_python(page: Page, line: int, text: str, names: dict) -> None:
  # Tracebacks point into the page, and show its lines.
  source = "\n" * (line - 1) + text
  exec(compile(source, str(page.path), "exec", dont_inherit=True), names)


def _outputs_of(call, place, caught, may_fail) -> list[str]:
  """Runs a block and returns what may be said of its output.

  Args:
    call: Runs the block.
    place: Page and line of the block.
    caught: The list to which the warnings of the block are added.
    may_fail: Whether an exception is part of the output.
  """
  with contextlib.redirect_stdout(io.StringIO()) as stdout:
    try:
      call()
    except (Exception, SystemExit) as error:
      printed = stdout.getvalue()
      if not may_fail:
        raise PageError(f"{place}: {error!r}\n{printed}") from error
      errors = _last_lines(error)
      return [*errors, *(printed + error for error in errors)]
  printed = stdout.getvalue()
  told = [f"{w.category.__name__}: {w.message}" for w in caught]
  return [printed, *told, printed + "\n".join(told)]


def _last_lines(error: BaseException) -> list[str]:
  """Returns what may stand for an error: whole, last line, without package."""
  text = "".join(traceback.format_exception_only(error)).strip()
  short = re.sub(r"^[\w.]+\.(?=\w+:)", "", text)
  # JAX adds notes about its own frames behind the message.
  message = f"{type(error).__name__}: {error}"
  return [short, text, message, message.splitlines()[-1]]


def _compare(page: Page, expected: Block, candidates: list[str]) -> None:
  """Raises a `PageError` if a text block is none of the candidates.

  Three dots stand for anything, and so do line breaks for spaces: long messages
  are wrapped.
  """
  parts = " ".join(expected.text.split()).split("...")
  pattern = ".*".join(re.escape(part) for part in parts)
  # Without the spaces that stand before three dots where nothing follows.
  texts = [" ".join(candidate.split()) for candidate in candidates]
  if not any(re.fullmatch(pattern, text, re.S) for text in texts):
    got = next((x for x in candidates if x.strip()), "(nothing)")
    place = f"{page.name}:{expected.line}"
    raise PageError(f"{place}: the block before gives something else:\n{got}")


@contextlib.contextmanager
def _isolated(module, folder) -> Iterator[list[warnings.WarningMessage]]:
  """Restores what a page may change; yields the warnings that it gives."""
  config, modules = dict(jax.config.values), set(sys.modules)
  update = jax.config.update

  def update_unless_done(name: str, value: Any) -> None:
    if name == "jax_num_cpu_devices":
      # The tests have begun with eight devices.
      assert value == jax.device_count() == 8, value
    else:
      update(name, value)

  with (
    mock.patch.dict(os.environ),
    pytest.MonkeyPatch.context() as patch,
    warnings.catch_warnings(record=True) as caught,
  ):
    warnings.simplefilter("always")
    warnings.filterwarnings(
      "error", category=DeprecationWarning, module="flaxshard"
    )
    patch.setitem(sys.modules, "__main__", module)
    patch.setattr(sys, "path", [str(folder), *sys.path])
    patch.setattr(jax.config, "update", update_unless_done)
    patch.chdir(folder)
    try:
      yield caught
    finally:
      for name, value in config.items():
        if jax.config.values[name] != value:
          update(name, value)
      # Modules that a page wrote, such as a config file.
      for name in set(sys.modules) - modules:
        file = getattr(sys.modules[name], "__file__", None)
        if file and pathlib.Path(file).is_relative_to(folder):
          del sys.modules[name]


def _run_commands(text, above, runs, may_fail) -> None:
  """Runs the commands of a block in process, in the current folder.

  Args:
    text: The text of the block.
    above: The texts of the blocks above, with config files.
    runs: Counts the runs of each workdir.
    may_fail: Whether a command may end with an error.
  """
  for command in commands(text):
    if covered_by("bash", command):
      continue
    program, arguments = _parse(command)
    file = re.search(r"--config=([\w/]+\.py)", command)
    if file and not pathlib.Path(file[1]).exists():
      *_, source = (x for x in above if "def get_config(" in x)
      pathlib.Path(file[1]).write_text(source)
    with contextlib.redirect_stderr(sys.stdout):
      try:
        if program == "checkpoint":
          sys.exit(inspection.main(arguments))
        _train(arguments, runs)
      except SystemExit as end:
        if end.code and not may_fail:
          raise PageError(command) from end


def _train(arguments: list[str], runs: collections.Counter[str]) -> None:
  values = flags.FlagValues()
  for name in ("config", "workdir", "plan"):
    flags.DEFINE_string(name, None, "", flag_values=values)
  for name in ("list", "synchronize", "version"):
    flags.DEFINE_boolean(name, False, "", flag_values=values)
  flags.DEFINE_integer("verbosity", 0, "", flag_values=values)
  command_line.parse_flags(["flaxshard", *arguments], values)
  workdir = values.workdir
  runs[workdir] += 1
  with (
    mock.patch.object(report, "draw"),
    command_line.report_mistakes(verbose=False),
    console.show_log(always=True),
  ):
    config = config_lib.check(values.config)
    _shorten(config)
    if config.resume == "extend":
      config.num_train_steps *= runs[workdir]
    train.train_and_evaluate(config, workdir)
  rows = tiny.rows(workdir)
  assert rows[-1]["step"] == config.num_train_steps, rows
  assert all(np.isfinite(row.get("train_loss", 0)) for row in rows), rows


def _shorten(config: ml_collections.ConfigDict) -> None:
  """Makes a run of two steps of a tiny model of a config."""
  small: dict[str, Any] = {
    "num_train_steps": 2,
    "log_every_steps": 1,
    "eval_every_steps": 1_000_000,
    "batch_size": min(config.batch_size, 16),
    "writer": "none",
    "model": _SMALL_MODELS.get(config.model.get("name"), {}),
  }
  if config.data.get("name") == "text":
    path = config.data.path or str(ROOT / "flaxshard" / "core")
    small["batch_size"] = 8
    small["data"] = {"eval_every": 10, "length": 16, "path": path}
  with config.unlocked(), config.ignore_type():
    config.update(small)
