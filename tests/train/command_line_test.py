"""Mistakes on the command line end with one message."""

from absl import flags
from ml_collections import config_flags
import pytest

from flaxshard.train import command_line
from flaxshard.train import config as config_lib

_CONFIG = """
import ml_collections

def get_config(argument=None):
  config = ml_collections.ConfigDict()
  config.batch_size = 8
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
  argv = ["flaxshard", *arguments]
  values = flags.FlagValues()
  config_flags.DEFINE_config_file(
    "config", None, "", flag_values=values, lock_config=True, sys_argv=argv
  )
  flags.DEFINE_string("workdir", None, "", flag_values=values)
  flags.mark_flags_as_required(["config", "workdir"], flag_values=values)
  assert command_line.parse_flags(argv, values) == ["flaxshard"]
  return values


def message_of(capsys, *arguments) -> str:
  """Returns what a command line with a mistake prints."""
  with pytest.raises(SystemExit) as stopped:
    parse(*arguments)
  assert stopped.value.code == 1
  return capsys.readouterr().err


def test_valid_flags_change_the_config(path):
  values = parse(f"--config={path}:x", "--config.batch_size=3", "--workdir=w")
  assert (values.config.batch_size, values.workdir) == (3, "w")
  features = ("--config.model.features[0]=5", "--workdir=w")
  assert parse("--config", f"{path}", *features).config.model.features[0] == 5


@pytest.mark.parametrize(
  ("argument", "facts"),
  [
    (
      "--config.batch_sise=3",
      ("--config.batch_sise", "Did you mean 'batch_size'", "my_config.py"),
    ),
    (
      "--config.optimizer.name=sgd",
      ("--config.optimizer.name", "no config.optimizer.", "batch_size, model"),
    ),
    ("--config.model.nam=cnn", ("no config.model.nam.", "'name'")),
    ("--config.batch_size.x=3", ("config.batch_size is 8", "no fields")),
    ("--config.batch_size=many", ("--config.batch_size=many",)),
    ("--worksdir=w", ("'worksdir'", "workdir")),
    ("w", ("'w'", "--workdir=FOLDER")),
  ],
)
def test_a_misspelt_flag_is_named_in_two_lines(path, argument, facts, capsys):
  message = message_of(capsys, f"--config={path}", "--workdir=w", argument)
  for fact in facts:
    assert fact in message, message
  assert message.startswith("flaxshard: ")
  assert len(message.splitlines()) <= 2


@pytest.mark.parametrize("separator", ["=", " "])
def test_a_misspelt_field_is_named_where_get_config_has_an_argument(
  path, separator, capsys
):
  path.write_text(_CONFIG.replace("argument=None", "argument"))
  config = f"--config{separator}{path}:x".split()
  message = message_of(capsys, *config, "--workdir=w", "--config.batch_sise=3")
  assert "Did you mean 'batch_size'" in message


@pytest.mark.parametrize(
  ("text", "facts"),
  [
    (None, ("there is no such file",)),
    ("x = (", ("line 1", "SyntaxError")),
    ("import no_such_package", ("line 1", "no_such_package")),
    ("def get_config():\n  return 1 / 0", ("line 2", "ZeroDivisionError")),
    ("def get_config():\n  return int('a')", ("line 2", "ValueError")),
    ("def get_confg(): pass", ("no function get_config", "'get_confg'")),
    ("def get_config(): pass", ("returns None",)),
  ],
)
def test_a_broken_config_file_shows_its_own_traceback_only(
  path, text, facts, capsys
):
  path.unlink() if text is None else path.write_text(text)
  message = message_of(capsys, f"--config={path}", "--workdir=w")
  for fact in (str(path), *facts):
    assert fact in message, message
  assert "ml_collections" not in message.replace("import ml_collections", "")
  assert len(message.splitlines()) <= 7


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
