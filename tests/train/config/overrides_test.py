"""Fields of a config on the command line."""

import pytest

from flaxshard.train import config as config_lib
from flaxshard.train.config import definition
from flaxshard.train.config import overrides


def override(*argv, **fields):
  """Returns a config with fields, after the flags of a command line."""
  config = config_lib.defaults()
  config.update(fields)
  rest, found = overrides.split(argv)
  assert not rest
  overrides.apply(config, found)
  return config


@pytest.mark.parametrize(
  ("argv", "path", "value"),
  [
    (["--config.batch_size=8"], "batch_size", 8),
    (["-config.batch_size", "1_000"], "batch_size", 1000),
    (["--config.learning_rate=1e-3"], "learning_rate", 1e-3),
    (["--config.mesh.replica", "-1"], "mesh.replica", -1),
    (["--config.mesh.per_replica"], "mesh.per_replica", True),
    (["--noconfig.mesh.per_replica"], "mesh.per_replica", False),
    (["--config.wrappers=()"], "wrappers", ()),
    (["--config.profile_steps=(2, 3)"], "profile_steps", (2, 3)),
    (["--config.mesh.rules=fsdp"], "mesh.rules", "fsdp"),
    (["--config.mesh.split.inputs=(1, 2)"], "mesh.split.inputs", (1, 2)),
    (["--config.optimizer=sgd"], "optimizer.name", "sgd"),
    (["--config.optimizer={'name': 'sgd'}"], "optimizer.name", "sgd"),
    (["--config.optimizer.b1=0.5"], "optimizer.b1", 0.5),
    (["--config.optimizer.nesterov=true"], "optimizer.nesterov", True),
    (["--config.task=language_modeling"], "task", "language_modeling"),
    # The last one counts, as with other flags.
    (["--config.seed=1", "--config.seed=2"], "seed", 2),
  ],
)
def test_every_field_is_set(argv, path, value):
  found = override(*argv)
  for name in path.split("."):
    found = found[name]
  assert found == value and type(found) is type(value)


def test_every_field_that_is_defined_can_be_set():
  given = config_lib.read("digits").to_dict()
  argv = []
  for field in definition.FIELDS:
    if field.fields:
      argv += [
        f"--config.{field.name}.{k}={v}" for k, v in given[field.name].items()
      ]
    argv.append(f"--config.{field.name}={given[field.name]}")
  assert override(*argv).to_dict() == given


@pytest.mark.parametrize(
  ("text", "value"),
  [
    ("features=(16, 32)", (16, 32)),
    ("features=[16, 32]", (16, 32)),
    ("features=16", (16,)),
    ("dense=0.5", 0.5),
    ("dense=None", None),
    ("flag=1", True),
    ("kind=3", "3"),
    ("inner.a=3", {"a": 3}),
  ],
)
def test_keys_of_free_dicts_keep_their_type(text, value):
  model = {
    "features": (4, 8),
    "dense": 3,
    "flag": False,
    "kind": "a",
    "inner": {"a": 1},
  }
  config = override(f"--config.model.{text}", model=model).model.to_dict()
  key = text.split("=")[0].split(".")[0]
  assert config[key] == value and type(config[key]) is type(value)


@pytest.mark.parametrize(
  ("argument", "facts"),
  [
    ("batch_sise=3", ("'batch_size'",)),
    ("replica=3", ("'mesh.replica'",)),
    ("batch_size.x=3", ("config.batch_size has no fields",)),
    ("model.dense.x=3", ("config.model.dense has no fields", "3")),
    ("batch_size=many", ("config.batch_size", "integer", "'many'")),
    ("learning_rate=nan", ("config.learning_rate", "'nan'")),
    ("mesh.per_replica=maybe", ("config.mesh.per_replica", "'maybe'")),
    ("model=3", ("config.model", "'name'")),
    ("wrappers[0]=ema", ("config.wrappers[0]", "'wrappers'")),
    ("wrappers=3", ("config.wrappers", "got 3")),
  ],
)
def test_mistakes_name_the_field(argument, facts):
  model = {"name": "cnn", "features": (4, 8), "dense": 3}
  with pytest.raises(ValueError) as e:
    override(f"--config.{argument}", model=model)
  message = str(e.value)
  for fact in facts:
    assert fact in message, message
  assert len(message.splitlines()) == 1


def test_other_flags_are_left():
  argv = ["--config=digits", "--workdir", "w", "--config.seed", "1", "x"]
  rest, found = overrides.split(argv)
  assert rest == ["--config=digits", "--workdir", "w", "x"]
  assert found == [overrides.Override("--config.seed", "seed", "1")]
