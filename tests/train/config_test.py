"""Configs: defaults, files, and the command line."""

import pathlib
import re

from absl import flags
import ml_collections
import numpy as np
import pytest
import tiny

import flaxshard as fs
from flaxshard.train import command_line
from flaxshard.train import config as config_lib
from flaxshard.train.config import definition

_CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
REQUIRED = {
  "model": {"name": "cnn", "features": (4,)},
  "data": {"name": "digits"},
  "batch_size": 16,
  "num_train_steps": 8,
  "learning_rate": 1e-2,
}


def test_a_checked_config_is_a_locked_copy_with_the_defaults():
  config = fs.config.defaults()
  config.update(REQUIRED)
  checked = fs.config.check(REQUIRED)
  assert checked.to_dict() == fs.config.check(config).to_dict()
  assert list(checked) == list(config)
  assert (checked.seed, checked.wrappers, checked.mesh.replica) == (0, (), -1)
  config.mesh.rules = "fsdp"  # another type than that of the default
  config.optimizer.weight_decay = 0.1
  checked = fs.config.check(config)
  assert checked.mesh.rules == "fsdp"
  assert checked.optimizer.to_dict() == {"name": "adamw", "weight_decay": 0.1}
  # Each call returns dicts of its own.
  assert "weight_decay" not in fs.config.defaults().optimizer
  with pytest.raises(AttributeError, match="batch_sise"):
    checked.batch_sise = 3
  checked.model.name = "mlp"
  assert config.model.name == "cnn" and not config.is_locked


def test_lists_and_numpy_numbers_are_plain_values():
  fields = {"batch_size": np.int64(16), "learning_rate": np.float32(0.5)}
  fields["model"] = {"name": "cnn", "policy": fs.Policy("mixed_float16")}
  fields |= {"hooks": ["a:b"], "freeze": ["^head/"]}
  checked = fs.config.check({**REQUIRED, **fields})
  # Arguments of other types stay.
  assert checked.model.policy == fs.Policy("mixed_float16")
  kept = (checked.batch_size, checked.learning_rate)
  assert kept == (16, 0.5) and [type(x) for x in kept] == [int, float]
  assert (checked.hooks, checked.freeze) == (({"name": "a:b"},), ("^head/",))


def test_the_help_has_the_type_the_default_and_the_meaning_of_each_field():
  printed = definition.help_text()
  for path, field in definition.FIELDS.items():
    assert re.search(rf"\n##+ `{path}`\n\n[^#]+\n\nA", printed), path
    is_group = definition.is_group(field.annotation)
    assert is_group or field.is_required() or repr(field.default) in printed
  assert "\n\nAllowed: int, at least 1, required.\n\n### `num_" in printed
  assert "\n\nAllowed: 'auto' or 'extend', default `'auto'`.\n" in printed
  assert "\n#### `mesh.replica`\n\nNumber of replicas" in definition.markdown()


# Files.


def test_configs_of_flaxshard_are_valid():
  names = config_lib.names()
  assert list(names) == sorted(p.stem for p in _CONFIGS.glob("*.py"))
  for name, meaning in names.items():
    assert 0 < len(meaning) < 80 and meaning.endswith("."), name
    config = config_lib.read(name).to_dict()
    # What a file spells is what the run has, and a path gives the same.
    assert config_lib.check(config).to_dict() == config, name
    assert config_lib.read(str(_CONFIGS / f"{name}.py")).to_dict() == config


def test_own_files_take_arguments_and_get_the_defaults(tmp_path, monkeypatch):
  path = tmp_path / "mine_of_config_test.py"
  path.write_text(
    "def get_config(size='2'):\n"
    "  return {'batch_size': int(size), 'mesh': {'replica': 1}}\n"
  )
  config = config_lib.read(f"{path}:3")
  assert isinstance(config, ml_collections.ConfigDict)
  assert (config.batch_size, config.mesh.replica) == (3, 1)
  assert (config.seed, config.mesh.axes) == (0, ())
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("HOME", str(tmp_path))
  for name in (path.name, f"./{path.name}", f"~/{path.name}"):
    assert config_lib.read(name).batch_size == 2
  package = tmp_path / "package_of_config_test"
  package.mkdir()
  path.rename(package / "mine.py")
  monkeypatch.syspath_prepend(str(tmp_path))
  assert config_lib.read("package_of_config_test.mine:4").batch_size == 4


# The command line.

_MINE = """
import flaxshard as fs

def get_config(size=8):
  config = fs.config.read("digits")
  config.batch_size = int(size)
  config.log_every_steps = config.get_ref("num_train_steps") // 10
  config.model = {
    "name": "cnn", "features": [4, 8], "dense": 3, "flag": False, "kind": "a",
  }
  return config
"""


@pytest.fixture
def path(tmp_path):
  path = tmp_path / "my_config.py"
  path.write_text(_MINE)
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
    (["-config.batch_size", "1_000"], "batch_size", 1000),
    (["--config.learning_rate=1e-3"], "learning_rate", 1e-3),
    (["--config.mesh.replica", "-1"], "mesh.replica", -1),
    (["--config.mesh.per_replica"], "mesh.per_replica", True),
    (["--noconfig.mesh.per_replica"], "mesh.per_replica", False),
    (["--config.wrappers=()"], "wrappers", ()),
    (["--config.wrappers=ema"], "wrappers", ("ema",)),
    (["--config.wrappers="], "wrappers", ()),
    (["--config.mesh.rules={'name': 'fsdp'}"], "mesh.rules.name", "fsdp"),
    (["--config.mesh.split.inputs=(1, 2)"], "mesh.split.inputs", (1, 2)),
    (["--config.optimizer=sgd"], "optimizer", "sgd"),
    (["--config.optimizer=a", "--config.optimizer.b=1"], "optimizer.name", "a"),
    (["--config.task.name=a.b:C"], "task.name", "a.b:C"),
    (["--config.init_from.path=12"], "init_from.path", "12"),
    # The last one counts, as with other flags.
    (["--config.seed=1", "--config.seed=2"], "seed", 2),
    # What refers to another field follows it.
    (["--config.num_train_steps=50"], "log_every_steps", 5),
    # Arguments keep their type.
    (["--config.model.features=(16, 32)"], "model.features", [16, 32]),
    (["--config.model.dense=0.5"], "model.dense", 0.5),
    (["--config.model.dense=None"], "model.dense", None),
    (["--config.model.flag=true"], "model.flag", True),
    (["--config.model.kind=3"], "model.kind", "3"),
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
  "code",
  [
    "raise ValueError('mine')",
    "import flaxshard as f; f.LossScale(-1)",
    "import no_such_package",
  ],
)
def test_an_error_of_a_config_file_keeps_its_traceback(path, code):
  path.write_text(f"def get_config():\n  {code}")
  with pytest.raises((ValueError, ModuleNotFoundError)) as e:
    parse(f"--config={path}", "--workdir=w")
  lines = [(str(entry.path), entry.lineno) for entry in e.traceback]
  assert (str(path), 1) in lines
  assert e.value.__notes__ == [f"in the config {path}"]


def test_errors_of_others_and_verbose_ones_keep_their_traceback():
  with pytest.raises(ValueError, match="int"), command_line.report_mistakes():
    int("a")
  with (
    pytest.raises(ValueError, match=r"config\.batch "),
    command_line.report_mistakes(verbose=True),
  ):
    fs.config.check(tiny.config(batch=3))
  with pytest.raises(SystemExit, match="130"), command_line.report_mistakes():
    raise KeyboardInterrupt
