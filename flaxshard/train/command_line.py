"""Ends `python -m flaxshard` with one message at a mistake of the user."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import contextlib
import importlib.util
import os
import re
import signal
import sys
import traceback
from typing import Any, NoReturn

from absl import flags
import ml_collections

from flaxshard.checkpoint.save_manager import SaveError
from flaxshard.core import checks
from flaxshard.processes import failures

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OVERRIDE = re.compile(r"--?(?:no)?config\.([^=]+)")

# What `train_and_evaluate` raises at a mistake of the user.
_MISTAKES = (
  ValueError,
  TypeError,
  ImportError,
  FloatingPointError,
  SaveError,
  TimeoutError,
)


def parse_flags(
  argv: Sequence[str], flag_values: flags.FlagValues = flags.FLAGS
) -> list[str]:
  """Parses flags, for `absl.app.run(flags_parser=...)`.

  Args:
    argv: The command line, with the program's name.
    flag_values: The flags, `config` and `workdir` among them.

  Returns:
    The program's name.

  Raises:
    SystemExit: A flag, a field or the config file is wrong. The message names
      it; an error in the file comes with the traceback of the file alone.
  """
  argv = list(argv)
  path, arguments = _config_file(argv)
  if path and not os.path.isfile(path):
    _exit(f"--config={path}: there is no such file in {os.getcwd()}.")
  error: Exception | None = None
  rest: list[str] = []
  try:
    rest = flag_values(argv)
  except Exception as e:
    error = e
  # Outside of the `except` block: it would be printed as a context of errors.
  if error is not None:
    if path:
      _check_file(path, arguments, argv)
    if not isinstance(error, flags.Error):
      raise error
    _exit(f"{error}\n--help lists the flags.")
  if rest[1:]:
    _exit(
      f"unexpected argument {rest[1]!r}: the flags are --config=FILE, "
      "--workdir=FOLDER, --config.FIELD=VALUE and --plan=TOPOLOGY."
    )
  return rest


def connection_flags(argv: Sequence[str]) -> dict[str, Any]:
  """Returns the flags that say how this process reaches the others.

  Args:
    argv: The command line, whose other flags may be wrong.
  """
  values = flags.FlagValues()
  flags.DEFINE_string("coordinator_address", None, "", flag_values=values)
  flags.DEFINE_integer("num_processes", None, "", flag_values=values)
  flags.DEFINE_integer("process_id", None, "", flag_values=values)
  with contextlib.suppress(flags.Error):
    values(argv, known_only=True)
  return {name: values[name].value for name in values}


@contextlib.contextmanager
def report_mistakes(verbose: bool) -> Iterator[None]:
  """Exits with the message of a mistake that flaxshard found.

  An error that other code raised keeps its traceback.

  Args:
    verbose: Whether all errors keep their traceback.
  """
  try:
    yield
  except _MISTAKES as error:
    if verbose or not _is_raised_by_flaxshard(error):
      raise
    _exit(f"{error}\n(--verbosity=1 shows the traceback.)")
  except SystemExit:
    # All is saved: another Ctrl-C should not change the exit code.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise
  except KeyboardInterrupt:
    if verbose:
      raise
    # The exit code that a shell reports for a process ended by Ctrl-C.
    print("\nstopped; the checkpoints saved so far are kept", file=sys.stderr)
    raise SystemExit(130) from None


@contextlib.contextmanager
def end_after_failure() -> Iterator[None]:
  """Ends this process at once at a SystemExit after a failure.

  The regular exit would wait for the other processes. An exception of another
  type is left to `sys.excepthook`; see `failures.watch`.
  """
  try:
    yield
  except SystemExit as e:
    if failures.has_failed():
      if isinstance(e.code, str):
        print(e.code, file=sys.stderr)
      if not e.code:
        # In a user's code. The run is not complete.
        print(f"flaxshard: SystemExit({e.code}) ends the run", file=sys.stderr)
      failures.end_process(e.code if isinstance(e.code, int) and e.code else 1)
    raise


def _exit(message: str) -> NoReturn:
  print(f"flaxshard: {message}", file=sys.stderr)
  error = SystemExit(1)
  # For the other processes.
  error.add_note(message)
  raise error


def _is_raised_by_flaxshard(error: BaseException) -> bool:
  tb = error.__traceback__
  while tb is not None and tb.tb_next is not None:
    tb = tb.tb_next
  return tb is not None and tb.tb_frame.f_code.co_filename.startswith(_PACKAGE)


def _config_file(argv: Sequence[str]) -> tuple[str, list[str]]:
  """Returns the file of `--config`, and the arguments of its get_config."""
  values = flags.FlagValues()
  flags.DEFINE_string("config", "", "", flag_values=values)
  with contextlib.suppress(flags.Error):
    values(argv, known_only=True)
  path, *arguments = str(values["config"].value).split(":", 1)
  return path, arguments


def _check_file(
  path: str, arguments: Sequence[str], argv: Sequence[str]
) -> None:
  """Exits if the config file fails, or lacks a field of the command line."""
  try:
    config = _load(path, arguments)
  except Exception as error:
    _print_from_file(error, path)
    _exit(f"the config file {path} fails; see above.")
  if config is None:
    _exit(f"{path}: get_config() returns None; it must return the config.")
  for match in filter(None, map(_OVERRIDE.match, argv)):
    _check_field(path, config, match[1])


def _load(path: str, arguments: Sequence[str]) -> Any:
  spec = importlib.util.spec_from_file_location("config_config", path)
  if spec is None or spec.loader is None:
    _exit(f"--config={path} must be a Python file with get_config().")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  if not callable(vars(module).get("get_config")):
    _exit(
      f"{path} has no function get_config(), which returns the config."
      f"{checks.did_you_mean('get_config', vars(module))}"
    )
  return module.get_config(*arguments)


def _print_from_file(error: BaseException, path: str) -> None:
  """Prints a traceback that begins in the file."""
  tb = error.__traceback__
  while tb is not None and tb.tb_frame.f_code.co_filename != path:
    tb = tb.tb_next
  traceback.print_exception(type(error), error, tb)


def _check_field(path: str, config: Any, field: str) -> None:
  """Exits if a config lacks a field, given as `"mesh.replica"`."""
  where = "config"
  for part in field.split("."):
    name, index, _ = part.partition("[")
    if not isinstance(config, ml_collections.ConfigDict):
      _exit(f"--config.{field}: {where} is {config!r}, which has no fields.")
    if name not in config:
      _exit(
        f"--config.{field}: {path} has no {where}.{name}."
        f"{checks.did_you_mean(name, config)}\nA flag only changes what the "
        f"file has; {where} has {', '.join(config)}."
      )
    if index:  # as in features[0]
      return
    config, where = config[name], f"{where}.{name}"
