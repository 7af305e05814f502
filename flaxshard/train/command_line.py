"""The command line of `flaxshard`: its start, its flags and its mistakes.

A mistake of the user ends the program with one message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import contextlib
import os
import runpy
import signal
import sys
import traceback

from absl import flags

from flaxshard.core.version import VERSION
from flaxshard.processes import failures
from flaxshard.train import config as config_lib
from flaxshard.train.config import definition
from flaxshard.train.config import files

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# What `train_and_evaluate` raises at a mistake of the user; a RuntimeError if a
# worker was started twice.
_MISTAKES = (
  ValueError,
  TypeError,
  ImportError,
  FloatingPointError,
  RuntimeError,  # and SaveError
  OSError,  # and StoreError, TimeoutError
)


def main() -> None:
  """Runs `python -m flaxshard`, for the console script `flaxshard`."""
  # As `python -m` does: a config names modules of the current folder.
  if not sys.flags.safe_path:
    sys.path.insert(0, os.getcwd())
  # As the main module: absl prints its docstring and its flags as the help, and
  # `multiprocessing` imports it again by its name.
  runpy.run_module("flaxshard", run_name="__main__", alter_sys=True)


@contextlib.contextmanager
def report_mistakes(verbose: bool = False, hint: str = "") -> Iterator[None]:
  """Exits with the message of a mistake that flaxshard found.

  An error that other code raised keeps its traceback. After a failure among
  several processes this one ends at once: the regular exit would wait for the
  others. An exception that is raised again is left to `sys.excepthook`; see
  `failures.watch`.

  Args:
    verbose: Whether all errors keep their traceback.
    hint: Follows the message of a mistake.
  """
  try:
    yield
  except _MISTAKES as error:
    # JAX adds notes too, to what is raised in a trace.
    notes = getattr(error, "__notes__", ())
    is_of_config = any(note.startswith(files.NOTE) for note in notes)
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    if verbose or is_of_config or not raised_in.startswith(_PACKAGE):
      raise
    code = 1
    message = f"flaxshard: {error}{hint}"
  except KeyboardInterrupt:
    if verbose:
      raise
    # The exit code that a shell reports for a process ended by Ctrl-C.
    code = 130
    message = "\nstopped; the checkpoints saved so far are kept"
  except SystemExit as error:
    # All is saved: another Ctrl-C should not change the exit code.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not failures.has_failed():
      raise
    # In a user's code. The run is not complete.
    code = error.code if isinstance(error.code, int) and error.code else 1
    message = f"flaxshard: SystemExit({error.code}) ends the run"
  else:
    return
  print(message, file=sys.stderr)
  if failures.has_failed():
    failures.end(code)
  raise SystemExit(code)


@report_mistakes()
def parse_flags(
  argv: Sequence[str], flag_values: flags.FlagValues = flags.FLAGS
) -> list[str]:
  """Parses flags, for `absl.app.run(flags_parser=...)`.

  The flag `config` gets the config that it names, as a `ConfigDict` with every
  field, and with the fields of the command line set.

  Args:
    argv: The command line, with the program's name.
    flag_values: The flags, among them `config`, `workdir`, `plan`, `list`,
      `synchronize` and `version`.

  Returns:
    The program's name.

  Raises:
    SystemExit: A flag or a field is wrong, or there is no such config; the
      message names it. Or what --list, --version and --help=config ask for is
      printed.
    Exception: The code of the config raised it.
  """
  if any(argument.lstrip("-") == "help=config" for argument in argv):
    print(definition.help_text())
    raise SystemExit(0)
  try:
    given = flag_values.read_flags_from_files(argv[1:], force_gnu=False)
    others, fields = files.split_flags(given)
    rest = flag_values([argv[0], *others])
  except flags.Error as e:
    name = getattr(e, "flagname", None)
    is_field = name in definition.FIELDS
    hint = f" Did you mean --config.{name}?" if is_field else ""
    raise ValueError(f"{e}{hint} --help lists the flags.") from e
  if flag_values.version:
    print(f"flaxshard {VERSION}")
    raise SystemExit(0)
  if flag_values.list:
    names = config_lib.names()
    width = max(map(len, names))
    for name, meaning in names.items():
      print(f"{name:{width}}  {meaning}")
    raise SystemExit(0)
  if rest[1:]:
    raise ValueError(
      f"unexpected argument {rest[1]!r}: the flags are --config=NAME, "
      "--workdir=FOLDER, --config.FIELD=VALUE and --plan=TOPOLOGY."
    )
  if not flag_values.workdir and flag_values.plan is None:
    raise ValueError(
      "--workdir is missing: the folder of the run. Only --plan needs none."
    )
  if flag_values.synchronize:
    return rest
  if not flag_values.config:
    raise ValueError(
      "--config is missing: a name that --list prints, or a file. For example: "
      "flaxshard --config=digits --workdir=/tmp/digits. --help lists the flags."
    )
  config = config_lib.read(flag_values.config)
  files.set_fields(config, fields)
  # From here on the flag is the config, as with `config_flags`.
  flag_values["config"].value = config
  return rest
