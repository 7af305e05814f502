"""The fields of a config: defaults, required fields, and invalid values."""

import itertools

import ml_collections
import pytest

from flaxshard.train import config as config_lib


def mesh(**fields):
  """Returns `config.mesh` with all its fields."""
  defaults = dict(
    replica=-1,
    logical_devices=1,
    axes=(),
    rules=(),
    split={},
    per_replica=False,
    virtual_devices=0,
  )
  return {**defaults, **fields}


def make(**fields):
  """Returns a config with only the required fields, and `fields`."""
  config = dict(
    model={"name": "cnn", "features": (4,)},
    data={"name": "digits"},
    batch_size=16,
    num_train_steps=8,
    learning_rate=1e-2,
    seed=0,
    wrappers=(("loss_scale", {"scale": "dynamic"}),),
    mesh=mesh(),
    precision="float32",
    log_every_steps=2,
    eval_every_steps=4,
    checkpoint_every_steps=4,
  )
  config.update(fields)
  return config


REQUIRED = ("model", "data", "batch_size", "num_train_steps", "learning_rate")
FIELDS = list(config_lib.defaults())


def test_defaults_are_filled_in():
  given = make()
  checked = config_lib.check({name: given[name] for name in REQUIRED})
  assert isinstance(checked, ml_collections.ConfigDict)
  assert checked.to_dict() == make(
    wrappers=(),
    log_every_steps=100,
    eval_every_steps=1000,
    checkpoint_every_steps=1000,
    task="classification",
    optimizer={"name": "adamw"},
    schedule={"name": "constant"},
    accumulate_steps=1,
    freeze=(),
    learning_rates=(),
    sparse=(),
    sparse_semantics="lazy",
    on_nonfinite="stop",
    profile_steps=(),
    writer="tensorboard",
    max_to_keep=3,
    checkpoint_every_minutes=0,
    keep_every_steps=0,
    best_metric="none",
    best_mode="auto",
    keep_best=1,
    resume="auto",
    init_from=dict(
      path="",
      step=-1,
      item="",
      subtree="",
      rename=(),
      keep=(),
      ignore=(),
      transpose=(),
      reshape=(),
      cast=False,
    ),
    lora=dict(
      rank=0, alpha=16.0, patterns=("kernel$",), train=(), batch_dims=()
    ),
    early_stopping=dict(metric="none", mode="auto", patience=3, min_delta=0.0),
    hooks=(),
  )
  assert config_lib.check(checked).to_dict() == checked.to_dict()


def test_a_config_starts_from_the_defaults():
  config = config_lib.defaults()
  checked = config_lib.check(make())
  assert list(config) == list(checked)
  for name in REQUIRED:
    with pytest.raises(ValueError, match=rf"^config\.{name} is missing"):
      config_lib.check(config)
    config[name] = make()[name]
  config.mesh.rules = "fsdp"  # another type than that of the default
  config.optimizer.weight_decay = 0.1
  checked = config_lib.check(config)
  assert checked.mesh.to_dict() == mesh(rules="fsdp")
  assert checked.optimizer.to_dict() == {"name": "adamw", "weight_decay": 0.1}
  # Each call returns dicts of its own.
  assert "weight_decay" not in config_lib.defaults().optimizer
  assert config_lib.check(make()).optimizer.to_dict() == {"name": "adamw"}


def test_given_values_are_kept():
  fields = dict(
    learning_rate=1,
    optimizer={"name": "sgd", "momentum": 0.9},
    schedule={"name": "cosine", "warmup_steps": 2},
    on_nonfinite="continue",
    profile_steps=(3, 3),
    writer="none",
    max_to_keep=1,
    checkpoint_every_minutes=0.5,
    keep_every_steps=8,
    best_metric="eval_loss",
    best_mode="max",
    keep_best=2,
    task={"name": "language_modeling"},
    resume="extend",
    precision="mixed_bfloat16",
    wrappers=(),
  )
  checked = config_lib.check(make(**fields))
  kept = {name: checked.to_dict()[name] for name in make(**fields)}
  assert kept == make(**fields)
  assert checked.optimizer.momentum == 0.9


def test_the_result_is_a_locked_copy():
  config = ml_collections.ConfigDict(make())
  checked = config_lib.check(config)
  with pytest.raises(AttributeError, match="batch_sise"):
    checked.batch_sise = 3
  checked.model.name = "mlp"
  checked.batch_size = 3
  assert config.to_dict() == make()
  assert not config.is_locked


def test_missing_fields_raise():
  for field in REQUIRED:
    config = make()
    del config[field]
    with pytest.raises(ValueError, match=rf"^config\.{field} is missing"):
      config_lib.check(config)


@pytest.mark.parametrize(
  ("where", "config", "fields", "hint"),
  [
    ("config.bach_size", make(bach_size=16), FIELDS, "'batch_size'"),
    ("config.mesh.replicas", make(mesh={"replicas": 8}), mesh(), "'replica'"),
    ("config.rules", make(rules="fsdp"), FIELDS, "mean config.mesh.rules?"),
  ],
)
def test_unknown_fields_raise_with_the_known_and_similar_ones(
  where, config, fields, hint
):
  with pytest.raises(ValueError) as e:
    config_lib.check(config)
  message = str(e.value)
  assert message.startswith(f"{where} is not a field")
  for field in fields:
    assert field in message
  assert hint in message


# Few values: the checkers of `core.checks` have their own tests.
NUMBERS = [
  (
    (
      "batch_size",
      "num_train_steps",
      "log_every_steps",
      "eval_every_steps",
      "checkpoint_every_steps",
      "max_to_keep",
      "keep_best",
      "mesh.logical_devices",
    ),
    (0, 2.0),
    "",
  ),
  (("seed", "keep_every_steps", "mesh.virtual_devices"), (-1, "2"), ""),
  (("learning_rate",), (0, "0.1", 1e39), "above 0"),
  (("checkpoint_every_minutes",), (-1, "1"), "0"),
]
CHOICES = [
  (("on_nonfinite",), ("stopp", 3), "'stop', 'continue'"),
  (("resume",), ("extended", None), "'auto', 'extend'"),
  (("writer",), ("stdout", None), "'tensorboard', 'clu', 'none'"),
  (
    ("best_metric",),
    ("accuracy",),
    "'eval_accuracy' or 'eval_loss', or 'none'",
  ),
  (("best_mode",), ("largest", None), "'auto', 'max', 'min'"),
  (("precision",), ("float7", 3, ["float32"]), "'float32', 'mixed_float16'"),
]
PARTS = [
  (
    ("data", "optimizer", "schedule"),
    (3, {"size": 1}, {"name": 3}, ("cnn",)),
    "'name'",
  ),
  # Without a name it is for a task that creates its own model.
  (("model",), (3, {"name": 3}, ("cnn",)), "'name'"),
  (
    ("profile_steps",),
    ((3,), (0, 2), (3, 2), (1, 2, 3), (1.0, 2), ("1", "2"), 3, None),
    "(first step, last step)",
  ),
]
MESHES = [
  (("mesh",), (8, None, (), "replica"), "virtual_devices"),
  (("mesh.replica",), (0, -2, 2.0, "8", True, None), "-1"),
  (("mesh.per_replica",), (1, "yes"), "True or False"),
  (
    ("mesh.axes",),
    (
      "model",
      {"model": 2},
      ("model", 2),
      (("model", 2, 2),),
      (("model", 0),),
      (("model", 2.0),),
      (("", 2),),
      ((2, 2),),
      (("replica", 2),),
      (("model", 2), ("model", 2)),
      None,
    ),
    "(('model', 2),)",
  ),
  (
    ("mesh.split",),
    (
      None,
      8,
      (("inputs", (1, 2)),),
      {"inputs": 8},
      {"inputs": (1, 2.0)},
      {"inputs": (1, True)},
      {"inputs": "12"},
    ),
    "{'inputs': (1, 2, 4, 1)}",
  ),
]


@pytest.mark.parametrize(
  "rows",
  [NUMBERS, CHOICES, PARTS, MESHES],
  ids=["numbers", "choices", "parts", "meshes"],
)
def test_invalid_values_raise_with_field_value_and_what_is_allowed(rows):
  for fields, invalid, allowed in rows:
    for field, value in itertools.product(fields, invalid):
      given = {field.removeprefix("mesh."): value}
      config = make(**({"mesh": given} if field[:5] == "mesh." else given))
      with pytest.raises(ValueError) as e:
        config_lib.check(ml_collections.ConfigDict(config))
      message = str(e.value)
      assert message.startswith(f"config.{field} "), message
      assert allowed in message, message
      assert repr(value) in message, message


@pytest.mark.parametrize(
  ("fields", "facts"),
  [
    (
      dict(keep_every_steps=6),
      ("config.keep_every_steps=6", "config.checkpoint_every_steps=4"),
    ),
    (dict(keep_best=2), ("config.keep_best=2", "config.best_metric")),
    (dict(best_mode="min"), ("config.best_mode='min'", "config.best_metric")),
    (
      dict(best_metric="eval_distance"),
      ("config.best_metric='eval_distance'", "config.best_mode"),
    ),
    (
      dict(best_metric="eval_loss", eval_every_steps=3),
      (
        "config.checkpoint_every_steps=4",
        "config.eval_every_steps=3",
        "config.best_metric='eval_loss'",
      ),
    ),
    (
      dict(mesh={"axes": (("x", 2),), "logical_devices": 2}),
      ("config.mesh.logical_devices=2", "config.mesh.axes=(('x', 2),)"),
    ),
  ],
)
def test_contradicting_fields_raise_with_both(fields, facts):
  with pytest.raises(ValueError) as e:
    config_lib.check(make(**fields))
  for fact in facts:
    assert fact in str(e.value)


def test_valid_meshes_are_kept():
  for fields in (
    {"replica": 1},
    {"replica": 8, "logical_devices": 4, "split": {"inputs": (1, 2, 2, 1)}},
    {"axes": (("x", 2), ("y", 1)), "rules": "fsdp"},
    {"rules": (("kernel$", (None, "replica")), ("bias", None), "fsdp")},
    {"rules": {"name": "fsdp", "min_size": 64}},
    {"per_replica": True, "virtual_devices": 8},
  ):
    checked = config_lib.check(ml_collections.ConfigDict(make(mesh=fields)))
    assert checked.mesh.to_dict() == mesh(**fields)
    assert config_lib.check(checked).to_dict() == checked.to_dict()


@pytest.mark.parametrize(
  ("value", "facts"),
  [
    (0, ("'fsdp'", "0")),
    ({"name": "fsdb"}, ("'fsdb'", "fsdp")),
    (({"name": "fsdp", "min_size": -1},), ("min_size", "0", "-1")),
  ],
)
def test_invalid_rules_raise_with_the_field(value, facts):
  with pytest.raises(ValueError) as e:
    config_lib.check(make(mesh={"rules": value}))
  message = str(e.value)
  assert message.startswith("config.mesh.rules")
  for fact in facts:
    assert fact in message


@pytest.mark.parametrize(
  ("value", "kind", "facts"),
  [
    ((("loss_scal", {}),), ValueError, ("'loss_scal'", "'loss_scale'")),
    ((("loss_scale", {"scale": -1}),), ValueError, ("scale", "-1")),
    (None, TypeError, ("wrappers",)),
  ],
)
def test_invalid_wrappers_raise(value, kind, facts):
  with pytest.raises(kind) as e:
    config_lib.check(make(wrappers=value))
  for fact in facts:
    assert fact in str(e.value)


def test_other_objects_than_configs_raise():
  with pytest.raises(TypeError, match="config"):
    config_lib.check([("batch_size", 3)])
  with pytest.raises(TypeError, match=r"config\.read\('digits'\) reads"):
    config_lib.check("digits")
