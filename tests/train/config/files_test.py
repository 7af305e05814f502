"""Config files: by name, by path, as modules, and broken ones."""

import pathlib

import ml_collections
import pytest

from flaxshard.train import config as config_lib

_CONFIGS = pathlib.Path(__file__).parents[3] / "configs"


def test_names_are_those_of_the_configs_folder():
  names = config_lib.names()
  assert list(names) == sorted(p.stem for p in _CONFIGS.glob("*.py"))
  for name, meaning in names.items():
    assert 0 < len(meaning) < 80 and meaning.endswith("."), name


@pytest.mark.parametrize("name", config_lib.names())
def test_configs_of_flaxshard_are_valid(name):
  config = config_lib.read(name)
  checked = config_lib.check(config)
  # What a file spells is what the run has, and a path gives the same.
  assert checked.to_dict() == config.to_dict()
  assert config_lib.read(str(_CONFIGS / f"{name}.py")).to_dict() == (
    config.to_dict()
  )


def test_own_files_take_arguments_and_get_the_defaults(tmp_path, monkeypatch):
  path = tmp_path / "mine_of_files_test.py"
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
  package = tmp_path / "package_of_files_test"
  package.mkdir()
  path.rename(package / "mine.py")
  monkeypatch.syspath_prepend(str(tmp_path))
  assert config_lib.read("package_of_files_test.mine:4").batch_size == 4


@pytest.mark.parametrize(
  ("text", "facts"),
  [
    ("x = (", ("SyntaxError", "line 1")),
    ("\nimport no_such_package", ("'no_such_package'",)),
    ("def get_config():\n  return 1 / 0", ("ZeroDivisionError",)),
    ("def get_config(x):\n  return {}", ("get_config()", "'x'")),
    ("def get_confg(): pass", ("no function get_config", "'get_confg'")),
    ("def get_config(): pass", ("returns None",)),
    (
      "def get_config():\n  return {'bach_size': 3}",
      ("config.bach_size is not a field. Did you mean 'batch_size'",),
    ),
  ],
)
def test_a_broken_file_is_named(tmp_path, text, facts):
  path = tmp_path / "my_config.py"
  path.write_text(text)
  with pytest.raises(config_lib.ConfigFileError) as e:
    config_lib.read(str(path))
  message = str(e.value)
  assert message.startswith(str(path))
  for fact in facts:
    assert fact in message, message


def test_a_name_comes_before_a_folder(tmp_path, monkeypatch):
  # As README's workdir, seen from the folder that it is in.
  (tmp_path / "digits").mkdir()
  monkeypatch.chdir(tmp_path)
  assert config_lib.read("digits").model.name == "cnn"
  with pytest.raises(config_lib.ConfigFileError, match="is a folder"):
    config_lib.read("./digits/")


@pytest.mark.parametrize(
  ("name", "facts"),
  [
    ("digitz", ("digitz: there is no config", "'digits'")),
    ("mine", ("Did you mean 'mine.py'",)),
    ("digits.py", ("no such file in", "'digits'")),
    ("mini.py", ("no such file in", "'mine.py'")),
    ("config/digit.py", ("no folder", "'digits'")),
    (".", ("is a folder",)),
    ("no_such_package.configs", ("No module named 'no_such_package'",)),
  ],
)
def test_a_config_that_does_not_exist_is_named(
  tmp_path, monkeypatch, name, facts
):
  (tmp_path / "mine.py").write_text("")
  monkeypatch.chdir(tmp_path)
  with pytest.raises(config_lib.ConfigFileError) as e:
    config_lib.read(name)
  for fact in facts:
    assert fact in str(e.value)
