"""Configs: defaults, files, and mistakes."""

import pathlib
import re

import ml_collections
import numpy as np
import pytest

import flaxshard as fs
from flaxshard.train import config as config_lib
from flaxshard.train.config import definition
from flaxshard.train.config import text

_CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


def make(**fields):
  """Returns a config with only the required fields, and `fields`."""
  config = dict(
    model={"name": "cnn", "features": (4,)},
    data={"name": "digits"},
    batch_size=16,
    num_train_steps=8,
    learning_rate=1e-2,
  )
  return {**config, **fields}


def test_a_config_starts_from_the_defaults():
  config = fs.config.defaults()
  config.update(make())
  checked = fs.config.check(make())
  assert checked.to_dict() == fs.config.check(config).to_dict()
  assert list(checked) == list(config)
  assert (checked.seed, checked.wrappers, checked.mesh.replica) == (0, (), -1)
  assert (checked.optimizer.name, checked.precision) == ("adamw", "float32")
  config.mesh.rules = "fsdp"  # another type than that of the default
  config.optimizer.weight_decay = 0.1
  checked = fs.config.check(config)
  assert checked.mesh.rules == "fsdp"
  assert checked.optimizer.to_dict() == {"name": "adamw", "weight_decay": 0.1}
  # Each call returns dicts of its own.
  assert "weight_decay" not in fs.config.defaults().optimizer


@pytest.mark.parametrize(
  "fields",
  [
    dict(
      learning_rate=1,
      optimizer={"name": "sgd", "momentum": 0.9},
      schedule={"name": "cosine", "warmup_steps": 2},
      profile_steps=(3, 3),
      checkpoint_every_minutes=0.5,
      keep_every_steps=1000,
      best_metric="eval_loss",
      keep_best=2,
      task="language_modeling",
      # A name of a package is not imported.
      hooks=({"name": "no_such_package:hook"},),
    ),
    dict(task="no_such_package:Task", model={"size": 3}, data={}),
    dict(wrappers=("agn",), mesh={"replica": 1}),
    dict(wrappers=("ema", "agn"), mesh={"per_replica": True}),
    dict(wrappers=(("agn", {"transport": "store"}),)),
    dict(mesh={"axes": (("x", 2), ("y", 1)), "rules": "fsdp"}),
    dict(mesh={"rules": (("kernel$", (None, "replica")), ("bias", None))}),
    dict(mesh={"rules": {"name": "fsdp", "min_size": 64}}),
    dict(mesh={"logical_devices": 4, "split": {"inputs": (1, 2, 2, 1)}}),
  ],
)
def test_given_values_are_kept(fields):
  checked = fs.config.check(ml_collections.ConfigDict(make(**fields)))
  for name, value in fields.items():
    kept = checked.to_dict()[name]
    if name == "mesh":
      kept = {key: kept[key] for key in value}
    assert kept == ({"name": value} if name == "task" else value)
  assert fs.config.check(checked).to_dict() == checked.to_dict()


def test_lists_and_numpy_numbers_are_plain_values():
  fields = dict(batch_size=np.int64(16), learning_rate=np.float32(0.5))
  fields["model"] = {"name": "cnn", "policy": fs.Policy("mixed_float16")}
  checked = fs.config.check(make(**fields, hooks=["a:b"], freeze=["^head/"]))
  # Arguments of other types stay.
  assert checked.model.policy == fs.Policy("mixed_float16")
  kept = (checked.batch_size, checked.learning_rate)
  assert kept == (16, 0.5) and [type(x) for x in kept] == [int, float]
  assert (checked.hooks, checked.freeze) == (({"name": "a:b"},), ("^head/",))


def test_the_result_is_a_locked_copy():
  config = ml_collections.ConfigDict(make())
  checked = fs.config.check(config)
  with pytest.raises(AttributeError, match="batch_sise"):
    checked.batch_sise = 3
  checked.model.name = "mlp"
  checked.batch_size = 3
  assert config.to_dict() == make()
  assert not config.is_locked


def test_the_help_has_the_type_the_default_and_the_meaning_of_each_field():
  printed = text.help_text()
  for path, field in definition.FIELDS.items():
    assert re.search(rf"\n##+ `{path}`\n\n[^#]+\n\nA", printed), path
    is_group = definition.is_group(field.annotation)
    assert is_group or field.is_required() or repr(field.default) in printed
  assert "\n\nAllowed: int, at least 1, required.\n\n### `num_" in printed
  assert "\n\nAllowed: 'auto' or 'extend', default `'auto'`.\n" in printed
  assert "\n#### `mesh.replica`\n\nNumber of replicas" in text.markdown()


# The fields, and what the message names. Few values: pydantic has its tests,
# and so have patterns, rules, wrappers and optimizers.
BEST = dict(best_metric="eval_loss", eval_every_steps=3)
TWICE = {"axes": (("x", 2),), "logical_devices": 2}
MISTAKES = [
  # Missing and unknown fields and names.
  (dict(model=None), "config.model.name None cnn"),
  (dict(data={"path": "a"}), "config.data.name None digits"),
  (dict(batch_size=None), "config.batch_size None integer"),
  (dict(bach_size=16), "config.bach_size 'batch_size' num_train"),
  (dict(replica=2, batch_size=None), "config.replica config.mesh.replica"),
  (dict(mesh={"replicas": 8}), "config.mesh.replicas 'replica'"),
  (dict(mesh=8), "config.mesh 8"),
  (dict(optimizer={"name": "adam", "b3": 0}), "config.optimizer 'b3'"),
  (dict(optimizer="adamm"), "config.optimizer 'adamm' 'adam'"),
  (dict(model={"name": "cn"}), "config.model 'cn' 'cnn'"),
  (dict(task="classificatio"), "config.task 'classification'"),
  # Numbers, choices and names.
  (dict(batch_size=0), "config.batch_size 0 1"),
  (dict(batch_size=True), "config.batch_size True integer"),
  (dict(batch_size="16"), "config.batch_size '16' integer"),
  (dict(learning_rate=1e39), "config.learning_rate 1e+39 less"),
  (dict(learning_rate=float("nan")), "config.learning_rate nan"),
  (dict(on_nonfinite="stopp"), "config.on_nonfinite 'stop' 'stopp'"),
  (dict(best_metric="accuracy"), "config.best_metric='accuracy' mode"),
  (dict(data=3), "config.data 3 dict"),
  (dict(hooks=(3,)), "config.hooks.0 3"),
  (dict(hooks=("log",)), "config.hooks[0] 'log' package.module:"),
  # Patterns and ranges.
  (dict(freeze="head"), "config.freeze 'head' tuple"),
  (dict(learning_rates=(("head", 0.0),)), "config.learning_rates[0] 0"),
  (dict(profile_steps=(3, 2)), "config.profile_steps (3, 2) last"),
  # The mesh.
  (dict(mesh={"replica": 0}), "config.mesh.replica 0 -1"),
  (dict(mesh={"axes": ("model", 2)}), "config.mesh.axes.0 'model'"),
  (dict(mesh={"axes": (("a", 2), ("a", 2))}), "config.mesh.axes 'a'"),
  (dict(mesh={"axes": (("replica", 2),)}), "config.mesh.axes 'replica'"),
  (dict(mesh={"split": {"inputs": 8}}), "config.mesh.split.inputs 8"),
  (dict(mesh={"rules": {"name": "fsdb"}}), "config.mesh.rules 'fsdb'"),
  # Wrappers: a comma forgotten, and those that reduce gradients.
  (dict(wrappers=("loss_scale", {"scale": 1})), "config.wrappers [1]"),
  (dict(wrappers=("ema", "ema")), "config.wrappers 'ema' twice"),
  (dict(wrappers=("ema", "agn")), "config.wrappers: agn mesh.per_replica=True"),
  # Fields that need others or contradict them.
  (dict(init_from={"pth": "a"}), "init_from.pth 'path'"),
  (dict(init_from={"keep": ("b",)}), "init_from.keep init_from.path"),
  (dict(init_from={"path": "a", "rename": ("b",)}), "from.rename 'b'"),
  (dict(lora={"alpha": 8}), "lora.alpha lora.rank"),
  (dict(early_stopping={"metric": "bleu"}), "stopping.mode 'bleu' 'max'"),
  (dict(keep_every_steps=6), "keep_every_steps=6 checkpoint_every_steps=1000"),
  (dict(keep_best=2), "config.keep_best=2 config.best_metric"),
  (BEST, "checkpoint_every_steps=1000 config.eval_every_steps=3"),
  (dict(mesh=TWICE), "config.mesh.logical_devices=2 config.mesh.axes=(('x',"),
]


@pytest.mark.parametrize(("fields", "facts"), MISTAKES)
def test_mistakes_name_the_field_the_value_and_what_is_allowed(fields, facts):
  with pytest.raises(ValueError) as e:
    fs.config.check(make(**fields))
  for fact in facts.split():
    assert fact in str(e.value)


def test_other_objects_than_configs_raise():
  with pytest.raises(TypeError, match="config"):
    fs.config.check([("batch_size", 3)])
  with pytest.raises(TypeError, match=r"'digits'.*config\.read"):
    fs.config.check("digits")


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


def test_references_between_fields_are_kept(tmp_path):
  path = tmp_path / "my_config.py"
  path.write_text(
    "import flaxshard as fs\n"
    "def get_config():\n"
    "  config = fs.config.defaults()\n"
    "  config.num_train_steps = 100\n"
    "  config.log_every_steps = config.get_ref('num_train_steps') // 10\n"
    "  return config\n"
  )
  config = config_lib.read(str(path))
  config.num_train_steps = 50
  assert config.log_every_steps == 5


@pytest.mark.parametrize(
  ("name", "facts"),
  [
    ("digitz", ("digitz: there is no config", "'digits'")),
    ("mine", ("Did you mean 'mine.py'",)),
    ("digits.py", ("no such file in", "'digits'")),
    ("config/digit.py", ("no such file in", "'digits'")),
    (".", ("is a folder",)),
    ("no_such_package.configs", ("No module named 'no_such_package'",)),
    ("mine.py", ("no function get_config", "'get_confg'")),
    ("none.py", ("get_config() returns None",)),
  ],
)
def test_what_gives_no_config_is_named(tmp_path, monkeypatch, name, facts):
  (tmp_path / "mine.py").write_text("def get_confg(): pass")
  (tmp_path / "none.py").write_text("def get_config(): pass")
  # As README's workdir, seen from the folder that it is in.
  (tmp_path / "digits").mkdir()
  monkeypatch.chdir(tmp_path)
  with pytest.raises(ValueError) as e:
    config_lib.read(name)
  for fact in (name, *facts):
    assert fact in str(e.value)
  # A name comes before a folder.
  assert config_lib.read("digits").model.name == "cnn"
