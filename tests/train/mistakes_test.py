"""Mistakes: fields of a config, arguments, names of configs, and calls."""

import os
import sys

import flax.linen as nn
import numpy as np
import pytest
import tiny

import flaxshard as fs
from flaxshard import data
from flaxshard import train
from flaxshard.train import command_line
from flaxshard.train import devices
from flaxshard.train import hooks
from flaxshard.train import same_run

_THIS = __name__
STORE = (("agn", {"communication_period": 2, "transport": "store"}),)


class WrongLogits(nn.Module):
  """A model whose logits have no dimension for the classes."""

  num_classes: int
  policy: object

  @nn.compact
  def __call__(self, x, train: bool = False):
    return nn.Dense(1)(x.reshape(x.shape[0], -1))[:, 0]


class TwoOutputs(WrongLogits):
  """A model that returns a pair."""

  @nn.compact
  def __call__(self, x, train: bool = False):
    return nn.Dense(self.num_classes)(x.reshape(x.shape[0], -1)), x


def empty(num_classes, policy):
  """Returns a model whose parameters have no elements, but for a bias."""
  zeros = nn.initializers.zeros
  hidden = nn.Dense(0, kernel_init=zeros)
  head = nn.Dense(num_classes, kernel_init=zeros)
  return nn.Sequential([lambda x: x.reshape(len(x), -1), hidden, head])


def unlabelled() -> data.Splits:
  """Returns examples without labels."""
  examples = [{"inputs": np.zeros((8, 8, 1), np.float32)}]
  return data.Splits(examples, examples, 10)


class Hook:
  """A hook that needs the workdir."""

  def __init__(self, workdir, name="steps.txt"):
    pass


def assert_names(error, facts):
  """Asserts that a message begins with the first fact and has the others."""
  assert_in_message(str(error.value), facts)


def assert_in_message(message, facts):
  start, *others = facts.split()
  assert message.startswith(start), message
  for fact in others:
    assert fact in message, message


# Few values: pydantic has its tests, and so have patterns, rules, wrappers,
# optimizers and tasks.
BEST = {"best_metric": "eval_loss", "eval_every_steps": 3}
TWICE = {"axes": (("x", 2),), "logical_devices": 2}
GROUPS = ("cross_shard", {"group_assignment": ((2, 0), (3, 1))})
EIGHT = {"logical_devices": 8}
NINE = {"axes": (("x", 3), ("y", 3))}
AXIS = {"axes": (("x", 8),)}
COSINE = {"name": "cosine", "warmup_steps": -1}
RULES = (("kernell", ("replica",)),)
INPUTS = "config.mesh.split.inputs="


def split(mesh, **pieces):
  return {"mesh": {**mesh, "split": pieces}}


@pytest.mark.parametrize(
  ("fields", "facts"),
  [
    # Missing and unknown fields and names.
    ({"model": None}, "config.model.name None cnn"),
    ({"batch_size": None}, "config.batch_size None integer"),
    ({"bach_size": 16}, "config.bach_size 'batch_size' num_train"),
    ({"replica": 2, "batch_size": None}, "config.replica config.mesh.replica"),
    ({"mesh": {"replicas": 8}}, "config.mesh.replicas 'replica'"),
    ({"optimizer": {"name": "adam", "b3": 0}}, "config.optimizer 'b3'"),
    ({"optimizer": "adamm"}, "config.optimizer 'adamm' 'adam'"),
    ({"task": "classificatio"}, "config.task 'classification'"),
    # Numbers, choices, dicts, patterns and ranges.
    ({"batch_size": 0}, "config.batch_size 0 1"),
    ({"learning_rate": float("nan")}, "config.learning_rate nan"),
    ({"precision": "float16"}, "config.precision 'mixed_float16'"),
    ({"best_metric": "accuracy"}, "config.best_mode 'accuracy' 'max'"),
    ({"hooks": ("log",)}, "config.hooks[0] 'log' package.module:"),
    ({"freeze": "head"}, "config.freeze 'head' tuple"),
    ({"learning_rates": (("head", 0.0),)}, "config.learning_rates[0] 0"),
    ({"profile_steps": (3, 2)}, "config.profile_steps (3, 2) last"),
    # The mesh.
    ({"mesh": {"replica": 0}}, "config.mesh.replica 0 -1"),
    ({"mesh": {"axes": (("a", 2), ("a", 2))}}, "config.mesh.axes 'a'"),
    ({"mesh": {"axes": (("replica", 2),)}}, "config.mesh.axes 'replica'"),
    ({"mesh": {"rules": {"name": "fsdb"}}}, "config.mesh.rules 'fsdb'"),
    ({"mesh": TWICE}, "config.mesh.logical_devices=2 config.mesh.axes=(('x',"),
    # Wrappers: a comma forgotten, and those that reduce gradients.
    ({"wrappers": ("loss_scale", {"scale": 1})}, "config.wrappers [1]"),
    ({"wrappers": ("accumulate",)}, "config.wrappers: config.accumulate_steps"),
    ({"wrappers": ("ema", "agn")}, "config.wrappers: agn per_replica=True"),
    # Fields that need others or contradict them.
    ({"init_from": {"keep": ("b",)}}, "config.init_from.keep init_from.path"),
    ({"lora": {"alpha": 8}}, "config.lora.alpha lora.rank"),
    ({"keep_every_steps": 6}, "config.keep_every_steps=6 checkpoint_every"),
    ({"keep_best": 2}, "config.keep_best=2 config.best_metric"),
    (BEST, "config.checkpoint_every_steps=4 config.eval_every_steps=3"),
    ({"schedule": COSINE}, "config.schedule warmup_steps -1"),
  ],
)
def test_check_names_a_field_its_value_and_what_is_allowed(fields, facts):
  with pytest.raises(ValueError) as e:
    fs.config.check(tiny.config(**fields))
  assert_names(e, facts)


@pytest.mark.parametrize(
  ("fields", "facts"),
  [
    # The devices.
    ({"mesh": {"replica": 9}}, "config.mesh.replica=9 8"),
    # No replica fits: the message says what one would need.
    ({"mesh": NINE}, "config.mesh.replica=-1 .axes 9"),
    ({"batch_size": 12}, "config.batch_size=12 8 config.mesh.replica="),
    ({"mesh": {"virtual_devices": 4}}, "config.mesh.virtual_devices=4 8 cpu"),
    # How batches are split. Of 16 examples, each of two replicas splits 8.
    (split({}, input=(8, 1, 1, 1)), "config.mesh.split.input=(8, 'inputs'"),
    (split(EIGHT, mask=(8,)), "config.mesh.split.mask inputs"),
    (split({}, inputs=(1, 2, 4, 1)), f"{INPUTS}(1, 4, (2, 8, 8, 1)"),
    (split(EIGHT, inputs=(2, 4)), f"{INPUTS}(2, dimension"),
    (split({"logical_devices": 3}, inputs=(3, 1, 1, 1)), f"{INPUTS}(3, divide"),
    (split(AXIS, inputs=(1, 2, 4, 1)), f"{INPUTS}(1, {{'x': 8}}"),
    # Model, data and optimizer.
    ({"model": {"name": "cnn", "depth": 3}}, "config.model 'depth'"),
    ({"model": {"name": "cnn", "dropout": 1.5}}, "config.model dropout 1.5"),
    ({"model": {"name": f"{_THIS}:WrongLogits"}}, "config.model (16,)"),
    ({"model": {"name": f"{_THIS}:TwoOutputs"}}, "config.model [16,10] (16,)"),
    ({"data": {"name": f"{_THIS}:unlabelled"}}, "config.data 'labels'"),
    ({"batch_size": 5000}, "config.batch_size=5000 1437"),
    ({"freeze": ("^desne/",)}, "config.freeze[0]='^desne/' 'dense'"),
    ({"learning_rates": (("haed", 2.0),)}, "config.learning_rates[0]='haed'"),
    # An error of a rule names config.mesh.rules, not config.model.
    ({"mesh": {"rules": RULES}}, "config.mesh.rules[0] dense/kernel"),
    (
      {"mesh": {"per_replica": True}, "wrappers": (GROUPS,)},
      "config.wrappers: CrossShard group_assignment 8 replicas",
    ),
  ],
)
@pytest.mark.filterwarnings("ignore:CrossShard")
def test_a_mistake_in_a_set_up_is_named_in_one_line(fields, facts, capsys):
  with pytest.raises(SystemExit), command_line.report_mistakes():
    tiny.setup(tiny.config(**fields))
  message = capsys.readouterr().err.removeprefix("flaxshard: ").rstrip()
  assert "\n" not in message
  assert_in_message(message, facts)


@pytest.mark.parametrize(
  ("name", "facts"),
  [
    ("digitz", "config digitz: there is no config 'digits'"),
    ("mine", "config mine: mean 'mine.py'"),
    ("config/digit.py", "config config/digit.py: no such file 'digits'"),
    (".", "config . is a folder"),
    ("no_such_package.configs", "config 'no_such_package'"),
    ("mine.py", "config mine.py get_config 'get_confg'"),
    ("none.py", "config none.py: None"),
    ("none.py:x", "config none.py:x: get_config too many"),
  ],
)
def test_a_name_that_gives_no_config(tmp_path, monkeypatch, name, facts):
  (tmp_path / "mine.py").write_text("def get_confg(): pass")
  (tmp_path / "none.py").write_text("def get_config(): pass")
  # As README's workdir, seen from the folder that it is in.
  (tmp_path / "digits").mkdir()
  monkeypatch.chdir(tmp_path)
  with pytest.raises(ValueError) as e:
    fs.config.read(name)
  assert_names(e, facts)
  # A name comes before a folder.
  assert fs.config.read("digits").model.name == "cnn"


def check(**fields):
  return fs.config.check(tiny.config(**fields))


def find_rank(wrappers, *args):
  return devices.find_rank(check(wrappers=wrappers), *args)


def share(**fields):
  """Returns the config of one of four workers."""
  return devices.config_of_worker(check(wrappers=STORE, **fields), 4)


MISSPELT = {"name": f"{_THIS}:Hook", "nam": 1}
PRINT = {"name": "builtins:print", "seb": "-"}
CLASS = check(model={"name": "cnn", "dtype": np.float16})


def create_hooks(*named, argument=()):
  return hooks.create(check(hooks=named), argument, ".")


@pytest.mark.parametrize(
  ("call", "facts"),
  [
    (lambda: fs.config.check([("a", 3)]), "config ConfigDict"),
    (lambda: fs.config.check("digits"), "config 'digits' config.read"),
    (
      lambda: same_run.config_to_json(CLASS),
      "config.model.dtype numpy.float16 name",
    ),
    (lambda: fs.load("nowhere"), "workdir='/ nowhere' config.json"),
    # Workers.
    (lambda: find_rank((), 1), "worker_id=1 transport='store'"),
    (lambda: find_rank(STORE, 4, 4), "process_id=4 num_processes=4"),
    (lambda: find_rank(STORE, 1), "process_id=1 num_processes"),
    (lambda: share(batch_size=6), "config.batch_size=6 4 workers"),
    (lambda: share(mesh={"replica": 6}), "config.mesh.replica=6 4 workers"),
    (
      lambda: devices.create_strategy(share(batch_size=4, mesh={"replica": 8})),
      "config.batch_size=1 2 replicas",
    ),
    # Hooks.
    (lambda: create_hooks(f"{_THIS}:Hok"), "config.hooks[0] mean 'Hook'"),
    (lambda: create_hooks(MISSPELT), "config.hooks[0] 'nam'"),
    (lambda: create_hooks(PRINT), "config.hooks[0] 'builtins:print' 'seb'"),
    (lambda: create_hooks("os:sep"), "config.hooks[0] 'os:sep' callable"),
    (lambda: create_hooks(argument=(Hook,)), "hooks[0] Hook"),
  ],
)
def test_a_call_names_its_argument(call, facts):
  with pytest.raises((TypeError, ValueError)) as e:
    call()
  assert_names(e, facts)


def test_mistakes_raise_before_anything_is_written(tmp_path, monkeypatch):
  config = tiny.config()
  file = tmp_path / "file"
  file.write_text("")
  for path in (file, file / "below"):
    with pytest.raises(ValueError, match=f"workdir='{path}.* cannot be writt"):
      train.train_and_evaluate(config, str(path))
  workdir = tmp_path / "run"
  deep, bare = {"name": "cnn", "depth": 3}, {"name": f"{_THIS}:empty"}
  for model, words in ((deep, r"config\.model"), (bare, "params/.* elements")):
    with pytest.raises(ValueError, match=words):
      train.train_and_evaluate(tiny.config(model=model), str(workdir))
  monkeypatch.setitem(sys.modules, "matplotlib", None)
  with pytest.raises(ImportError, match=r"matplotlib.*flaxshard\[train\]"):
    train.train_and_evaluate(config, str(workdir))
  assert not workdir.exists() or not os.listdir(workdir)
