"""What a config may hold."""

import importlib.util
import pathlib

import ml_collections
import pytest

from flaxshard.train import config as config_lib

_CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


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
  """Returns a config with only the fields that have no default."""
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


REQUIRED = list(make())


@pytest.mark.parametrize("of", [dict, ml_collections.ConfigDict])
def test_defaults_are_filled_in(of):
  checked = config_lib.check(of(make()))
  assert isinstance(checked, ml_collections.ConfigDict)
  assert checked.to_dict() == make(
    optimizer={"name": "adamw"},
    schedule={"name": "constant"},
    on_nonfinite="stop",
    profile_steps=(),
    writer="tensorboard",
    max_to_keep=3,
    checkpoint_every_minutes=0,
    keep_every_steps=0,
    best_metric="none",
    keep_best=1,
  )


def test_what_is_given_is_kept():
  fields = dict(
    optimizer={"name": "sgd", "momentum": 0.9},
    schedule={"name": "cosine", "warmup_steps": 2},
    on_nonfinite="continue",
    profile_steps=(3, 3),
    writer="none",
    max_to_keep=1,
    checkpoint_every_minutes=0.5,
    keep_every_steps=8,
    best_metric="eval_loss",
    keep_best=2,
  )
  checked = config_lib.check(make(**fields))
  assert checked.to_dict() == make(**fields)
  assert checked.optimizer.momentum == 0.9


def test_a_config_with_all_fields_passes_again():
  checked = config_lib.check(make())
  assert config_lib.check(checked).to_dict() == checked.to_dict()


def test_the_result_is_a_locked_copy():
  config = ml_collections.ConfigDict(make())
  checked = config_lib.check(config)
  with pytest.raises(AttributeError, match="batch_sise"):
    checked.batch_sise = 3
  checked.model.name = "mlp"
  checked.batch_size = 3
  assert config.to_dict() == make()
  assert not config.is_locked


@pytest.mark.parametrize("field", REQUIRED)
def test_a_missing_field(field):
  config = make()
  del config[field]
  with pytest.raises(ValueError, match=rf"^config\.{field} is missing"):
    config_lib.check(config)


def test_an_unknown_field():
  with pytest.raises(ValueError) as e:
    config_lib.check(make(bach_size=16))
  message = str(e.value)
  assert message.startswith("config.bach_size is not a field")
  for field in (*REQUIRED, "optimizer", "profile_steps", "max_to_keep"):
    assert field in message
  assert message.endswith("Did you mean 'batch_size'?")
  with pytest.raises(ValueError) as e:
    config_lib.check(make(zzzz=1))
  assert "Did you mean" not in str(e.value)


_INTEGERS = {
  "batch_size": 1,
  "num_train_steps": 1,
  "seed": 0,
  "log_every_steps": 1,
  "eval_every_steps": 1,
  "checkpoint_every_steps": 1,
  "max_to_keep": 1,
}


@pytest.mark.parametrize(
  "fields, message",
  [
    (
      dict(keep_every_steps=6),
      "config.keep_every_steps=6 must be a multiple of "
      "config.checkpoint_every_steps=4, or 0: others are not saved.",
    ),
    (
      dict(keep_best=2),
      "config.keep_best=2 needs config.best_metric, one of 'eval_accuracy', "
      "'eval_loss'.",
    ),
    (
      dict(best_metric="eval_loss", eval_every_steps=3),
      "config.checkpoint_every_steps=4 must be a multiple of "
      "config.eval_every_steps=3 with config.best_metric='eval_loss': a "
      "checkpoint is as good as its evaluation.",
    ),
    (
      dict(best_metric="accuracy"),
      "config.best_metric must be one of 'none', 'eval_accuracy', 'eval_loss'; "
      "got 'accuracy'.",
    ),
    (
      dict(checkpoint_every_minutes=-1),
      "config.checkpoint_every_minutes must be a positive number, or 0; got "
      "-1.",
    ),
  ],
)
def test_what_to_keep(fields, message):
  with pytest.raises(ValueError) as e:
    config_lib.check(make(**fields))
  assert str(e.value) == message


@pytest.mark.parametrize("field", list(_INTEGERS))
def test_integers(field):
  least = _INTEGERS[field]
  assert config_lib.check(make(**{field: least}))[field] == least
  for bad in (least - 1, 2.0, "2", True, None, 2**31):
    with pytest.raises(ValueError) as e:
      config_lib.check(make(**{field: bad}))
    assert str(e.value) == (
      f"config.{field} must be an integer of at least {least}, below 2**31; "
      f"got {bad!r}."
    )


@pytest.mark.parametrize(
  "bad", [0, -0.1, float("inf"), float("nan"), "0.1", True, None]
)
def test_bad_learning_rates(bad):
  with pytest.raises(ValueError) as e:
    config_lib.check(make(learning_rate=bad))
  assert str(e.value) == (
    f"config.learning_rate must be a positive number; got {bad!r}."
  )


def test_a_learning_rate_may_be_an_integer():
  assert config_lib.check(make(learning_rate=1)).learning_rate == 1


@pytest.mark.parametrize("field", ["model", "data", "optimizer", "schedule"])
@pytest.mark.parametrize("bad", ["cnn", {}, {"size": 1}, {"name": 3}, None])
def test_what_is_named_needs_a_name(field, bad):
  with pytest.raises(ValueError) as e:
    config_lib.check(make(**{field: bad}))
  message = str(e.value)
  assert message.startswith(f"config.{field} must be a dict with a 'name'")
  assert message.endswith(f"; got {bad!r}.")


@pytest.mark.parametrize(
  ("field", "allowed"),
  [
    ("on_nonfinite", "'stop', 'continue'"),
    ("writer", "'tensorboard', 'clu', 'none'"),
  ],
)
@pytest.mark.parametrize("bad", ["stopp", 3, None])
def test_one_of_some_words(field, allowed, bad):
  with pytest.raises(ValueError) as e:
    config_lib.check(make(**{field: bad}))
  assert str(e.value) == (
    f"config.{field} must be one of {allowed}; got {bad!r}."
  )


@pytest.mark.parametrize("bad", ["float7", "", 3, None, ["float32"]])
def test_bad_precisions(bad):
  with pytest.raises(ValueError) as e:
    config_lib.check(make(precision=bad))
  message = str(e.value)
  assert message.startswith("config.precision must be ")
  for name in ("float32", "mixed_float16", "mixed_bfloat16"):
    assert name in message
  assert message.endswith(f"; got {bad!r}.")


@pytest.mark.parametrize("name", ["float32", "mixed_float16", "mixed_bfloat16"])
def test_precisions(name):
  assert config_lib.check(make(precision=name)).precision == name


@pytest.mark.parametrize("bad", [8, None, (), "replica"])
def test_a_mesh_is_a_dict(bad):
  with pytest.raises(ValueError) as e:
    config_lib.check(make(mesh=bad))
  assert str(e.value) == (
    f"config.mesh must be a dict with {', '.join(mesh())}; got {bad!r}."
  )


def test_the_fields_of_a_mesh_have_defaults():
  for of in (dict, ml_collections.ConfigDict):
    checked = config_lib.check(of(make(mesh={})))
    assert checked.mesh.to_dict() == mesh()


@pytest.mark.parametrize(
  "fields",
  [
    {"replica": 1},
    {"replica": 8, "logical_devices": 4, "split": {"inputs": (1, 2, 2, 1)}},
    {"axes": (("x", 2), ("y", 1)), "rules": "fsdp"},
    {"rules": (("kernel$", (None, "replica")), ("bias", None), "fsdp")},
    {"rules": {"name": "fsdp", "min_size": 64}},
    {"per_replica": True, "virtual_devices": 8},
  ],
)
def test_meshes(fields):
  for of in (dict, ml_collections.ConfigDict):
    checked = config_lib.check(of(make(mesh=fields)))
    assert checked.mesh.to_dict() == mesh(**fields)
    assert config_lib.check(checked).to_dict() == checked.to_dict()


@pytest.mark.parametrize(
  ("field", "bads"),
  {
    "replica": (0, -2, 2.0, "8", True, None),
    "logical_devices": (0, -1, 2.0, "8", True, None, 2**31),
    "axes": (
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
    "split": (
      None,
      8,
      (("inputs", (1, 2)),),
      {"inputs": 8},
      {"inputs": (1, 2.0)},
      {"inputs": (1, True)},
      {"inputs": "12"},
    ),
    "per_replica": (0, 1, "yes", None),
    "virtual_devices": (-1, 8.0, "8", True, None, 2**31),
  }.items(),
)
def test_bad_fields_of_a_mesh(field, bads):
  for bad in bads:
    for of in (dict, ml_collections.ConfigDict):
      with pytest.raises(ValueError) as e:
        config_lib.check(of(make(mesh={field: bad})))
      message = str(e.value)
      assert message.startswith(f"config.mesh.{field} must be "), message
      assert message.endswith(f"; got {bad!r}."), message


@pytest.mark.parametrize(
  ("bad", "message"),
  [
    (0, "must be None, 'fsdp', .*, got 0"),
    ({"name": "fsdb"}, "name: unknown name 'fsdb'; allowed: fsdp"),
    (({"name": "fsdp", "min_sise": 3},), "'min_sise'.*Did you mean 'min_size'"),
    (
      ({"name": "fsdp", "min_size": -1},),
      "min_size must be .* at least 0, got -1",
    ),
  ],
)
def test_bad_rules(bad, message):
  with pytest.raises(ValueError, match=rf"^config\.mesh\.rules.*{message}"):
    config_lib.check(make(mesh={"rules": bad}))


def test_axes_have_sizes_of_their_own():
  with pytest.raises(ValueError) as e:
    config_lib.check(make(mesh={"axes": (("x", 2),), "logical_devices": 2}))
  assert str(e.value) == (
    "config.mesh.logical_devices=2 must be 1 where config.mesh.axes="
    "(('x', 2),) give names and sizes."
  )


def test_an_unknown_field_of_a_mesh():
  with pytest.raises(ValueError) as e:
    config_lib.check(make(mesh={"replicas": 8}))
  assert str(e.value).startswith("config.mesh.replicas is not a field; ")
  for field in mesh():
    assert field in str(e.value)
  assert "Did you mean 'replica'" in str(e.value)


@pytest.mark.parametrize(
  "bad", [(3,), (0, 2), (3, 2), (1, 2, 3), (1.0, 2), ("1", "2"), 3, None]
)
def test_bad_profile_steps(bad):
  with pytest.raises(ValueError) as e:
    config_lib.check(make(profile_steps=bad))
  assert str(e.value) == (
    f"config.profile_steps must be (), or (first step, last step); got {bad!r}."
  )


def test_wrappers_are_checked():
  assert config_lib.check(make(wrappers=())).wrappers == ()
  with pytest.raises(
    ValueError, match=r"unknown name 'loss_scal'.*'loss_scale'"
  ):
    config_lib.check(make(wrappers=(("loss_scal", {}),)))
  with pytest.raises(ValueError, match=r"'scales'.*Did you mean 'scale'"):
    config_lib.check(make(wrappers=(("loss_scale", {"scales": 1.0}),)))
  with pytest.raises(ValueError, match=r"must be positive.*got -1"):
    config_lib.check(make(wrappers=(("loss_scale", {"scale": -1}),)))
  for bad in (None, "loss_scale", {"loss_scale": {}}, (3,)):
    with pytest.raises(TypeError, match="wrappers"):
      config_lib.check(make(wrappers=bad))


@pytest.mark.parametrize("bad", [None, "digits.py", [("batch_size", 3)]])
def test_no_config(bad):
  with pytest.raises(TypeError, match="config must be a ConfigDict, got"):
    config_lib.check(bad)


@pytest.mark.parametrize(
  "path", sorted(_CONFIGS.glob("*.py")), ids=lambda p: p.stem
)
def test_the_configs_that_come_with_flaxshard(path):
  spec = importlib.util.spec_from_file_location(f"_config_{path.stem}", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  config = module.get_config()
  checked = config_lib.check(config)
  given = config.to_dict()
  assert {k: v for k, v in checked.to_dict().items() if k in given} == given
