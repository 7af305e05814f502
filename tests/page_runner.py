"""Runs the code blocks of a page, as a reader would from top to bottom.

Commands run in process, with tiny models; `ELSEWHERE` says which ones other
tests run.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import dataclasses
import io
import os
import pathlib
import re
import shlex
import sys
import traceback
import types
from typing import Any
import warnings

from absl import flags
import jax
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
# Where the examples write. A run of the tests writes in its own folder.
_FOLDERS = re.compile(r"(?<![\w.])/(?=(tmp|shared)/)")
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


class PageError(AssertionError):
  """A block does not do what its page says; the message has page and line."""


def check_kinds(page: page_blocks.Page) -> None:
  """Raises a `PageError` for the first block that nothing checks."""
  before = None
  for block in page.blocks:
    if problem := _problem(page, block, before):
      raise PageError(f"{page.name}:{block.line}: {problem}")
    before = block


def _problem(
  page: page_blocks.Page,
  block: page_blocks.Block,
  before: page_blocks.Block | None,
) -> str:
  """Returns why nothing checks a block, or an empty string."""
  if block.kind == "bash":
    for command in commands(block.text):
      if not covered_by("bash", command) and _parse(command)[0] is None:
        return f"no rule for {command!r}: see ELSEWHERE in tests/page_runner.py"
    return ""
  is_figure = not block.kind and page.name in MEASURED
  is_code = block.kind in ("python", "diff")
  if is_code or is_figure or covered_by(block.kind, block.text):
    return ""
  if block.kind != "text":
    return f"no test checks blocks of the kind {block.kind!r}"
  if not before or before.kind not in ("python", "bash", "diff"):
    return "a text follows no code block"
  if not _is_run(before):
    return "a text follows code that is not run: see tests/page_runner.py"
  return ""


def _is_run(block: page_blocks.Block) -> bool:
  texts = commands(block.text) if block.kind == "bash" else [block.text]
  return not any(covered_by(block.kind, text) for text in texts)


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


def _parse(command: str) -> tuple[str | None, list[str]]:
  """Returns a command's program and arguments."""
  words = shlex.split(command, comments=True)
  if words[:1] == ["flaxshard"]:
    return "flaxshard", words[1:]
  if words[:3] == ["python", "-m", "flaxshard.checkpoint"]:
    return "checkpoint", words[3:]
  return None, []


def run(
  page: page_blocks.Page,
  folder: pathlib.Path,
  kinds: tuple[str, ...] = ("python", "diff", "bash"),
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
    (folder / name).symlink_to(page_blocks.ROOT / name)
  program = _Commands(page, folder)
  with _isolated(module, folder) as caught:
    for i, block in enumerate(page.blocks):
      is_python = block.kind == "python"
      if block.kind not in kinds or (is_python and not _is_run(block)):
        continue
      expected = [x for x in page.blocks[i + 1 : i + 2] if x.kind == "text"]
      shows = bool(expected)
      text = _FOLDERS.sub(f"{folder}/", block.text)
      code = dataclasses.replace(block, text=text)
      if block.kind == "bash":
        outputs = [program.run(code, may_fail=shows)]
      elif block.kind == "diff":
        for sign in "-+":
          half = dataclasses.replace(code, text=_side(text, sign))
          # Both are complete; the names that they define are theirs.
          other = types.ModuleType("__main__")
          vars(other).update(vars(module))
          outputs = _run_python(page, half, other, caught, shows)
      else:
        outputs = _run_python(page, code, module, caught, shows)
      if expected:
        outputs = [output.replace(str(folder), "") for output in outputs]
        _compare(page, expected[0], outputs)


def _side(text: str, sign: str) -> str:
  """Returns the program of a diff before ("-") or after ("+") the change."""
  return "\n".join(
    line[1:] if line[:1] in (" ", sign) else "" for line in text.split("\n")
  )


def _run_python(
  page: page_blocks.Page,
  block: page_blocks.Block,
  module: types.ModuleType,
  caught: list[warnings.WarningMessage],
  may_fail: bool,
) -> list[str]:
  """Runs a block and returns what may be said of its output.

  Args:
    page: The page.
    block: The block.
    module: The module to run it in.
    caught: The list to which the warnings of the block are added.
    may_fail: Whether an exception is part of the output.
  """
  # Tracebacks point into the page, and show its lines.
  source = "\n" * (block.line - 1) + block.text
  errors = []
  caught.clear()
  with contextlib.redirect_stdout(io.StringIO()) as stdout:
    try:
      code = compile(source, str(page.path), "exec", dont_inherit=True)
      exec(code, vars(module))
    except (Exception, SystemExit) as error:
      errors = _last_lines(error)
      if not may_fail:
        place = _place(page, block, error)
        raise PageError(f"{place}: {errors[0]}") from error
  printed = stdout.getvalue()
  if errors:
    return [*errors, *(printed + error for error in errors)]
  told = [f"{w.category.__name__}: {w.message}" for w in caught]
  return [printed, *told, printed + "\n".join(told)]


def _place(
  page: page_blocks.Page, block: page_blocks.Block, error: BaseException
) -> str:
  """Returns page and line of the innermost frame of the page."""
  line = block.line
  for frame in traceback.extract_tb(error.__traceback__):
    if frame.filename == str(page.path):
      line = frame.lineno or line
  return f"{page.name}:{line}"


def _last_lines(error: BaseException) -> list[str]:
  """Returns what may stand for an error: whole, last line, without package."""
  text = "".join(traceback.format_exception_only(error)).strip()
  short = re.sub(r"^[\w.]+\.(?=\w+:)", "", text)
  # JAX adds notes about its own frames behind the message.
  message = f"{type(error).__name__}: {error}"
  return [short, text, message, message.splitlines()[-1]]


def _compare(
  page: page_blocks.Page, expected: page_blocks.Block, candidates: list[str]
) -> None:
  """Raises a `PageError` if a text block is none of the candidates.

  Three dots stand for anything, and so do line breaks for spaces: long messages
  are wrapped.
  """
  parts = re.split(r"\.\.\.", " ".join(expected.text.split()))
  pattern = ".*".join(re.escape(part) for part in parts)
  for candidate in candidates:
    # Without the spaces that stand before three dots where nothing follows.
    if re.fullmatch(pattern, " ".join(candidate.split()), re.S):
      return
  got = next((x for x in candidates if x.strip()), "(nothing)")
  place = f"{page.name}:{expected.line}"
  raise PageError(f"{place}: the block before gives something else:\n{got}")


@contextlib.contextmanager
def _isolated(
  module: types.ModuleType, folder: pathlib.Path
) -> Iterator[list[warnings.WarningMessage]]:
  """Restores what a page may change; yields the warnings that it gives."""
  config = dict(jax.config.values)
  modules, environment = set(sys.modules), dict(os.environ)
  update = jax.config.update

  def update_unless_done(name: str, value: Any) -> None:
    if name == "jax_num_cpu_devices":
      # The tests have begun with eight devices.
      assert value == jax.device_count() == 8, value
    else:
      update(name, value)

  with (
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
      for name in os.environ.keys() - environment.keys():
        del os.environ[name]
      os.environ.update(environment)
      # Modules that a page wrote, such as a config file.
      for name in set(sys.modules) - modules:
        file = getattr(sys.modules[name], "__file__", None)
        if file and pathlib.Path(file).is_relative_to(folder):
          del sys.modules[name]


class _Commands:
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
    place = f"{self._page.name}:{block.line}"
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
            raise PageError(f"{place}: {command}\n{output.getvalue()}") from end
        except Exception as error:
          raise PageError(f"{place}: {command}: {error!r}") from error
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
