"""The fields of a config: defaults, required fields, and invalid values."""

import ml_collections
import pytest

import flaxshard as fs


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
  for name, value in make().items():
    with pytest.raises(ValueError, match=rf"^config\.{name} is missing"):
      fs.config.check(config)
    config[name] = value
  checked = fs.config.check(make())
  assert isinstance(checked, ml_collections.ConfigDict)
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
      task={"name": "language_modeling"},
      # A name of a package is not imported.
      hooks=("no_such_package:hook",),
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
    assert kept == value
  assert fs.config.check(checked).to_dict() == checked.to_dict()


def test_the_result_is_a_locked_copy():
  config = ml_collections.ConfigDict(make())
  checked = fs.config.check(config)
  with pytest.raises(AttributeError, match="batch_sise"):
    checked.batch_sise = 3
  checked.model.name = "mlp"
  checked.batch_size = 3
  assert config.to_dict() == make()
  assert not config.is_locked


# The fields, and what the message names. Few values: the checkers of
# `core.checks` have their tests.
MISTAKES = [
  # Unknown fields and names.
  (dict(bach_size=16), ("config.bach_size", "'batch_size'", "num_train")),
  (dict(mesh={"replicas": 8}), ("config.mesh.replicas", "'replica'")),
  (dict(rules="fsdp"), ("config.rules", "config.mesh.rules?")),
  (dict(optimizer={"name": "adam", "b3": 0}), ("config.optimizer", "'b3'")),
  (dict(schedule="cosin"), ("config.schedule", "'cosin'", "'cosine'")),
  (dict(model={"name": "cn"}), ("config.model", "'cn'", "'cnn'")),
  (dict(task="classificatio"), ("config.task", "'classification'")),
  # Numbers.
  (dict(batch_size=0), ("config.batch_size", "0", "at least 1")),
  (dict(seed=-1), ("config.seed", "-1", "at least 0")),
  (dict(learning_rate=1e39), ("config.learning_rate", "1e+39", "above 0")),
  (dict(checkpoint_every_minutes=-1), ("config.checkpoint_every_minutes",)),
  # Choices.
  (dict(on_nonfinite="stopp"), ("config.on_nonfinite", "'stop', 'continue'")),
  (dict(precision=["float32"]), ("config.precision", "'mixed_float16'")),
  (dict(best_metric="accuracy"), ("config.best_metric", "'eval_accuracy'")),
  # Names with arguments, and ranges.
  (dict(data=3), ("config.data", "3", "'name'")),
  (dict(profile_steps=(0, 2)), ("config.profile_steps", "(0, 2)", "last")),
  # The mesh.
  (dict(mesh={"replica": 0}), ("config.mesh.replica", "0", "-1")),
  (dict(mesh={"per_replica": 1}), ("config.mesh.per_replica", "1", "True")),
  (dict(mesh={"axes": ("model", 2)}), ("config.mesh.axes", "('model', 2)")),
  (dict(mesh={"axes": (("replica", 2),)}), ("config.mesh.axes", "'replica'")),
  (dict(mesh={"axes": (("a", 2), ("a", 2))}), ("config.mesh.axes", "'a'")),
  (dict(mesh={"split": {"inputs": 8}}), ("config.mesh.split", "(1, 2, 4, 1)")),
  (dict(mesh={"rules": {"name": "fsdb"}}), ("config.mesh.rules", "'fsdb'")),
  # Wrappers.
  (dict(wrappers=("los_scale",)), ("config.wrappers", "'loss_scale'")),
  (
    dict(wrappers=(("loss_scale", {"scale": -1}),)),
    ("config.wrappers", "scale", "-1"),
  ),
  (dict(wrappers=("agn",)), ("agn", "config.mesh.per_replica=True")),
  (
    dict(wrappers=("cross_shard",), mesh={"replica": 8}),
    ("cross_shard", "config.mesh.per_replica=True"),
  ),
  # Initialization and LoRA.
  (dict(init_from={"pth": "a"}), ("init_from.pth", "'path'")),
  (dict(init_from={"keep": ("b",)}), ("init_from.keep", "init_from.path")),
  (dict(init_from={"path": "a", "keep": ("(",)}), ("keep[0]", "'('")),
  (dict(init_from={"path": "a", "rename": ("b",)}), ("rename", "pairs")),
  (dict(lora={"alpha": 8}), ("lora.alpha", "lora.rank")),
  (dict(lora={"rank": 2, "train": ("(",)}), ("config.lora: train", "'('")),
  # Early stopping.
  (dict(early_stopping={"metrics": "a"}), ("metrics", "'metric'?")),
  (
    dict(early_stopping={"patience": 1}),
    ("early_stopping.patience=1", "early_stopping.metric"),
  ),
  (dict(early_stopping={"metric": "train_loss"}), ("'train_loss'", "eval")),
  (
    dict(early_stopping={"metric": "eval_bleu"}),
    ("config.early_stopping.mode", "'max'"),
  ),
  # Fields that contradict each other.
  (
    dict(keep_every_steps=6),
    ("config.keep_every_steps=6", "config.checkpoint_every_steps=1000"),
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
      "config.checkpoint_every_steps=1000",
      "config.eval_every_steps=3",
      "config.best_metric='eval_loss'",
    ),
  ),
  (
    dict(mesh={"axes": (("x", 2),), "logical_devices": 2}),
    ("config.mesh.logical_devices=2", "config.mesh.axes=(('x', 2),)"),
  ),
]


@pytest.mark.parametrize(("fields", "facts"), MISTAKES)
def test_mistakes_name_the_field_the_value_and_what_is_allowed(fields, facts):
  with pytest.raises(ValueError) as e:
    fs.config.check(make(**fields))
  for fact in facts:
    assert fact in str(e.value)


def test_other_objects_than_configs_raise():
  with pytest.raises(TypeError, match="config"):
    fs.config.check([("batch_size", 3)])
  with pytest.raises(TypeError, match=r"config\.read\('digits'\) reads"):
    fs.config.check("digits")
