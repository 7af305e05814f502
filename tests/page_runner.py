"""Runs the code blocks of a page, as a reader would from top to bottom."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import dataclasses
import difflib
import io
import os
import pathlib
import re
import sys
import traceback
import types
from typing import Any
import warnings

import jax
import page_blocks
import page_commands
import pytest

# Where the examples write. A run of the tests writes in its own folder.
_FOLDERS = re.compile(r"(?<![\w.])/(?=(tmp|shared)/)")


class PageError(AssertionError):
  """A block does not do what its page says; the message has page and line."""


def check_kinds(page: page_blocks.Page) -> None:
  """Raises a `PageError` for blocks that nothing checks."""
  problems = [
    f"{page.name}:{block.line}: {problem}"
    for before, block in zip([None, *page.blocks], page.blocks, strict=False)
    if (problem := _problem(page, block, before))
  ]
  if problems:
    raise PageError("\n".join(problems))


def _problem(
  page: page_blocks.Page, block: page_blocks.Block, before: page_blocks.Block
) -> str:
  """Returns why nothing checks a block, or an empty string."""
  if block.kind == "bash":
    for command in page_commands.commands(block.text):
      if not (
        page_commands.covered_by("bash", command)
        or page_commands.can_run(command)
      ):
        return f"no rule for {command!r}: see tests/page_commands.py"
    return ""
  if block.kind in ("python", "diff"):
    return ""
  if page_commands.covered_by(block.kind, block.text):
    return ""
  if not block.kind and page.name in page_commands.MEASURED:
    return ""
  if block.kind != "text":
    return f"no test checks blocks of the kind {block.kind!r}"
  if not before or before.kind not in ("python", "bash", "diff"):
    return "a text follows no code block"
  if not _is_run(before):
    return "a text follows code that is not run: see tests/page_commands.py"
  return ""


def _is_run(block: page_blocks.Block) -> bool:
  if block.kind == "bash":
    commands = page_commands.commands(block.text)
    return not any(page_commands.covered_by("bash", x) for x in commands)
  return not page_commands.covered_by(block.kind, block.text)


def run(
  page: page_blocks.Page,
  folder: pathlib.Path,
  kinds: tuple[str, ...] = ("python", "diff", "bash"),
) -> dict[str, Any]:
  """Runs the blocks of a page and compares what they print.

  Args:
    page: The page.
    folder: A folder to work in, instead of the current folder, /tmp and others.
    kinds: The kinds of blocks to run.

  Returns:
    The names that the Python blocks define.

  Raises:
    PageError: A block fails, or the text block behind it is not its output.
  """
  # A program is the module __main__, also for what looks it up by its name.
  module = types.ModuleType("__main__")
  for name in ("configs", "benchmarks"):
    (folder / name).symlink_to(page_blocks.ROOT / name)
  commands = page_commands.Runner(page, folder)
  with _isolated(module, folder) as caught:
    for i, block in enumerate(page.blocks):
      following = page.blocks[i + 1 : i + 2]
      expected = [x for x in following if x.kind == "text"]
      text = _FOLDERS.sub(f"{folder}/", block.text)
      code = dataclasses.replace(block, text=text)
      if block.kind not in kinds:
        continue
      if block.kind == "bash":
        try:
          outputs = [commands.run(code, may_fail=bool(expected))]
        except (Exception, SystemExit) as error:
          place = f"{page.name}:{block.line}"
          raise PageError(
            f"{place}: {type(error).__name__}: {error}"
          ) from error
      elif block.kind == "diff":
        for text in _sides(code.text):
          half = dataclasses.replace(code, text=text)
          # Both are complete; the names that they define are theirs.
          other = types.ModuleType("__main__")
          vars(other).update(vars(module))
          outputs = _run_python(page, half, other, caught, bool(expected))
      elif _is_run(block):
        outputs = _run_python(page, code, module, caught, bool(expected))
      if expected:
        outputs = [output.replace(str(folder), "") for output in outputs]
        _compare(page, expected[0], outputs)
  return vars(module)


def _sides(text: str) -> list[str]:
  """Returns the programs of a diff, before and after the change."""
  return [
    "\n".join(
      line[1:] if line[:1] in (" ", sign) else "" for line in text.split("\n")
    )
    for sign in "-+"
  ]


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
  if isinstance(error, SyntaxError) and error.filename == str(page.path):
    line = error.lineno or line
  for frame in traceback.extract_tb(error.__traceback__):
    if frame.filename == str(page.path):
      line = frame.lineno or line
  return f"{page.name}:{line}"


def _last_lines(error: BaseException) -> list[str]:
  """Returns what may stand for an error: whole, last line, without package."""
  text = "".join(traceback.format_exception_only(error)).strip()
  if isinstance(error, SyntaxError):  # after the line of code
    text = text.splitlines()[-1]
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
  got = next((x for x in candidates if x.strip()), "")
  difference = "\n".join(
    difflib.unified_diff(
      expected.text.strip().splitlines(),
      got.strip().splitlines(),
      "the page",
      "the output",
      lineterm="",
    )
  )
  raise PageError(
    f"{page.name}:{expected.line}: the block before gives something else:\n"
    f"{difference or '(nothing)'}"
  )


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
