"""Mistakes on the command line end with one line."""

from absl import flags
import pytest

from flaxshard.train import command_line
from flaxshard.train import config as config_lib

_CONFIG = """
import flaxshard as fs

def get_config(size=8):
  config = fs.config.defaults()
  config.batch_size = int(size)
  config.model = {"name": "cnn", "features": [4, 8]}
  return config
"""


@pytest.fixture
def path(tmp_path):
  path = tmp_path / "my_config.py"
  path.write_text(_CONFIG)
  return path


def parse(*arguments):
  """Returns the flags of a command line."""
  values = flags.FlagValues()
  flags.DEFINE_string("config", None, "", flag_values=values)
  flags.DEFINE_string("workdir", None, "", flag_values=values)
  flags.DEFINE_string("plan", None, "", flag_values=values)
  flags.DEFINE_boolean("list", False, "", flag_values=values)
  flags.DEFINE_boolean("version", False, "", flag_values=values)
  flags.DEFINE_boolean("synchronize", False, "", flag_values=values)
  flags.DEFINE_integer("verbosity", 0, "", flag_values=values)
  argv = ["flaxshard", *arguments]
  assert command_line.parse_flags(argv, values) == ["flaxshard"]
  return values


def message_of(capsys, *arguments) -> str:
  """Returns the line that a command line with a mistake prints."""
  with pytest.raises(SystemExit) as stopped:
    parse(*arguments)
  assert stopped.value.code == 1
  message = capsys.readouterr().err
  assert message.startswith("flaxshard: ")
  assert len(message.splitlines()) == 1, message
  return message


def test_valid_flags_change_the_config(path, tmp_path):
  values = parse(f"--config={path}:4", "--workdir=w", "--config.seed", "3")
  assert (values.config.batch_size, values.config.seed) == (4, 3)
  assert values.workdir == "w"
  flagfile = tmp_path / "flags"
  flagfile.write_text("--config.batch_size=3\n--config.model.features=5\n")
  # Fields may stand before the config that has them.
  argv = [f"--flagfile={flagfile}", "--config", str(path), "--workdir=w"]
  config = parse(*argv).config
  assert (config.batch_size, config.model.features) == (3, [5])


@pytest.mark.parametrize(
  ("argument", "facts"),
  [
    (
      "--config.batch_sise=3",
      ("--config.batch_sise", "Did you mean 'batch_size'", "--help=config"),
    ),
    ("--worksdir=w", ("'worksdir'", "workdir")),
    ("--batch_size=3", ("'batch_size'", "config.batch_size")),
    ("w", ("'w'", "--workdir=FOLDER")),
    ("--config=digitz", ("digitz", "Did you mean 'digits'", "--list")),
    ("--config=", ("--config is missing", "--list", "--config=digits")),
    ("--workdir=", ("--workdir is missing", "plan")),
  ],
)
def test_a_mistake_in_a_flag_is_named_in_one_line(
  path, argument, facts, capsys
):
  message = message_of(capsys, f"--config={path}", "--workdir=w", argument)
  for fact in facts:
    assert fact in message, message


def test_a_broken_config_file_is_a_traceback_and_one_line(path, capsys):
  path.write_text("def get_config():\n  return 1 / 0")
  with pytest.raises(SystemExit):
    parse(f"--config={path}", "--workdir=w")
  printed = capsys.readouterr().err
  assert f'"{path}", line 2' in printed
  error = "ZeroDivisionError: division by zero"
  assert printed.endswith(f"\nflaxshard: --config={path}: {error}\n")


def test_errors_of_flaxshard_are_messages_and_others_keep_their_traceback(
  capsys,
):
  with (
    pytest.raises(SystemExit) as stopped,
    command_line.report_mistakes(False),
  ):
    config_lib.check({"batch": 3})
  assert stopped.value.code == 1
  message = capsys.readouterr().err
  assert message.startswith("flaxshard: config.batch is not a field")
  with pytest.raises(ValueError), command_line.report_mistakes(verbose=True):
    config_lib.check({"batch": 3})
  with pytest.raises(ValueError), command_line.report_mistakes(False):
    int("a")
  with (
    pytest.raises(SystemExit) as stopped,
    command_line.report_mistakes(False),
  ):
    raise KeyboardInterrupt
  assert stopped.value.code == 130
