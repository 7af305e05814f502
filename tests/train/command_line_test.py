"""The command line: fields of the config, and mistakes in one line."""

from absl import flags
import pytest

import flaxshard as fs
from flaxshard.train import command_line

_CONFIG = """
import flaxshard as fs

def get_config(size=8):
  config = fs.config.read("digits")
  config.batch_size = int(size)
  config.model = {
    "name": "cnn", "features": [4, 8], "dense": 3, "flag": False, "kind": "a",
    "inner": {"a": 1},
  }
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
  for name in ("config", "workdir", "plan"):
    flags.DEFINE_string(name, None, "", flag_values=values)
  for name in ("list", "version", "synchronize"):
    flags.DEFINE_boolean(name, False, "", flag_values=values)
  argv = ["flaxshard", *arguments]
  assert command_line.parse_flags(argv, values) == ["flaxshard"]
  return values


def test_flags_may_stand_in_any_order_and_in_a_file(path, tmp_path):
  values = parse("--config.seed", "3", f"--config={path}:4", "--workdir", "w")
  assert (values.config.batch_size, values.config.seed) == (4, 3)
  assert values.workdir == "w"
  flagfile = tmp_path / "flags"
  flagfile.write_text("--config.batch_size=3\n--config.model.features=5\n")
  argv = [f"--flagfile={flagfile}", "--config", str(path), "--workdir=w"]
  config = parse(*argv).config
  assert (config.batch_size, config.model.features) == (3, [5])


@pytest.mark.parametrize(
  ("argv", "path_of_field", "value"),
  [
    (["--config.batch_size=8"], "batch_size", 8),
    (["-config.batch_size", "1_000"], "batch_size", 1000),
    (["--config.learning_rate=1e-3"], "learning_rate", 1e-3),
    (["--config.mesh.replica", "-1"], "mesh.replica", -1),
    (["--config.mesh.per_replica"], "mesh.per_replica", True),
    (["--noconfig.mesh.per_replica"], "mesh.per_replica", False),
    (["--config.wrappers=()"], "wrappers", ()),
    (["--config.wrappers=ema"], "wrappers", ("ema",)),
    (["--config.profile_steps=(2, 3)"], "profile_steps", (2, 3)),
    (["--config.mesh.rules={'name': 'fsdp'}"], "mesh.rules.name", "fsdp"),
    (["--config.mesh.split.inputs=(1, 2)"], "mesh.split.inputs", (1, 2)),
    (["--config.optimizer=sgd"], "optimizer", "sgd"),
    (["--config.optimizer={'name': 'sgd'}"], "optimizer.name", "sgd"),
    (["--config.optimizer=a", "--config.optimizer.b=1"], "optimizer.name", "a"),
    (["--config.optimizer.b1=0.5"], "optimizer.b1", 0.5),
    (["--config.task.name=a.b:C"], "task.name", "a.b:C"),
    (["--config.init_from.path=12"], "init_from.path", "12"),
    # The last one counts, as with other flags.
    (["--config.seed=1", "--config.seed=2"], "seed", 2),
    # Arguments keep their type.
    (["--config.model.features=(16, 32)"], "model.features", [16, 32]),
    (["--config.model.dense=0.5"], "model.dense", 0.5),
    (["--config.model.dense=None"], "model.dense", None),
    (["--config.model.flag=true"], "model.flag", True),
    (["--config.model.kind=3"], "model.kind", "3"),
    (["--config.model.inner.a=3"], "model.inner.a", 3),
    (["--config.model.new=3"], "model.new", 3),
  ],
)
def test_every_field_is_set(path, argv, path_of_field, value):
  found = parse(f"--config={path}", "--workdir=w", *argv).config
  for name in path_of_field.split("."):
    found = found[name]
  assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
  ("argument", "facts"),
  [
    ("--config.batch_sise=3", "config.batch_sise 'batch_size'"),
    ("--config.mash.replica=3", "config.mash 'mesh'"),
    ("--config.model.dense.x=3", "config.model.dense.x 3"),
    ("--config.batch_size=many", "config.batch_size integer 'many'"),
    ("--config.model=3", "config.model 3 dict"),
    ("--config.wrappers[0]=ema", "config.wrappers[0] 'wrappers'"),
    ("--worksdir=w", "'worksdir' workdir"),
    ("--batch_size=3", "'batch_size' --config.batch_size"),
    ("w", "'w' --workdir=FOLDER"),
    ("--config=digitz", "digitz mean 'digits' --list"),
    ("--config=", "--config is missing --list --config=digits"),
    ("--workdir=", "--workdir is missing plan"),
  ],
)
def test_a_mistake_is_named_in_one_line(path, argument, facts, capsys):
  with (
    pytest.raises(SystemExit) as stopped,
    command_line.report_mistakes(),
  ):
    config = parse(f"--config={path}", "--workdir=w", argument).config
    fs.config.check(config)
  assert stopped.value.code == 1
  message = capsys.readouterr().err
  assert message.startswith("flaxshard: ")
  assert len(message.splitlines()) == 1, message
  for fact in facts.split():
    assert fact in message, message


@pytest.mark.parametrize(
  ("code", "error", "message"),
  [
    ("raise ValueError('mine')", ValueError, "mine"),
    ("import flaxshard as f; f.LossScale(-1)", ValueError, "scale .*-1"),
    ("import no_such_package", ModuleNotFoundError, "no_such_package"),
  ],
)
def test_an_error_of_a_config_file_keeps_its_traceback(
  path, code, error, message
):
  path.write_text(f"def get_config():\n  {code}")
  with pytest.raises(error, match=message) as e:
    parse(f"--config={path}", "--workdir=w")
  lines = [(str(entry.path), entry.lineno) for entry in e.traceback]
  assert (str(path), 1) in lines
  assert e.value.__notes__ == [f"in the config {path}"]


def interrupt():
  raise KeyboardInterrupt


@pytest.mark.parametrize(
  ("call", "verbose", "raised"),
  [
    (lambda: fs.config.check({"batch": 3}), False, "config.batch is not a"),
    (lambda: fs.config.check({"batch": 3}), True, ValueError),
    # Raised by others than flaxshard: they keep their traceback.
    (lambda: int("a"), False, ValueError),
    (interrupt, False, 130),
  ],
)
def test_errors_of_flaxshard_are_messages(call, verbose, raised, capsys):
  is_error = isinstance(raised, type)
  with (
    pytest.raises(raised if is_error else SystemExit) as e,
    command_line.report_mistakes(verbose),
  ):
    call()
  if isinstance(raised, str):
    assert capsys.readouterr().err.startswith(f"flaxshard: {raised}")
  if not is_error:
    assert e.value.code == (raised if isinstance(raised, int) else 1)
