"""Wrappers from configs and back."""

import dataclasses
import json

import ml_collections
import pytest

import flaxshard as fs
from flaxshard.wrappers import from_config
from flaxshard.wrappers import to_config


@dataclasses.dataclass(frozen=True)
class Mine(fs.wrappers.Base):
  """A wrapper of the user's, with a tuple and an argument that is not one."""

  factors: tuple[float, ...] = (1.0,)
  rule: fs.DynamicLossScale | None = None
  made: int = dataclasses.field(default=3, init=False)


@pytest.fixture
def mine(monkeypatch):
  """The name that configs have for `Mine`, importable under it."""
  import sys
  import types

  module = types.ModuleType("some_users_module")
  module.Mine = Mine
  module.not_a_dataclass = dict
  monkeypatch.setitem(sys.modules, "some_users_module", module)
  monkeypatch.setattr(Mine, "__module__", "some_users_module")
  return "some_users_module:Mine"


WRAPPERS = [
  fs.LossScale(),
  fs.LossScale("auto", policy="mixed_float16"),
  fs.LossScale(0.1),
  fs.LossScale(fs.FixedLossScale(3)),
  fs.LossScale(
    fs.DynamicLossScale(
      initial_scale=1 / 3,
      growth_interval=7,
      growth_factor=1.1,
      backoff_factor=0.7,
      min_scale=0.3,
      max_scale=1e30,
      hysteresis=4,
    ),
    warn_at_floor=True,
  ),
]


@pytest.mark.parametrize("wrapper", WRAPPERS, ids=repr)
def test_round_trip_is_exact(wrapper):
  config = to_config([wrapper])
  for form in (
    config,
    json.loads(json.dumps(config)),
    ml_collections.ConfigDict({"wrappers": config}).wrappers,
  ):
    assert from_config(form) == (wrapper,)


def test_every_built_in_wrapper_has_a_name():
  exported = [getattr(fs.wrappers, name) for name in fs.wrappers.__all__]
  for cls in exported:
    if isinstance(cls, type) and issubclass(cls, fs.wrappers.Base):
      if cls is not fs.wrappers.Base:
        # Others have "package.module:Class".
        assert ":" not in to_config([cls()])[0][0], cls


def test_to_config_writes_plain_values():
  assert to_config([fs.LossScale(128)]) == (("loss_scale", {"scale": 128.0}),)
  assert to_config(
    [fs.LossScale(fs.DynamicLossScale(8, hysteresis=2), warn_at_floor=True)]
  ) == (
    (
      "loss_scale",
      {
        "scale": {"type": "dynamic", "initial_scale": 8.0, "hysteresis": 2},
        "warn_at_floor": True,
      },
    ),
  )
  assert to_config([fs.LossScale("auto", policy="mixed_float16")]) == (
    (
      "loss_scale",
      {"scale": "auto", "policy": {"type": "policy", "name": "mixed_float16"}},
    ),
  )
  assert to_config([]) == ()


@pytest.mark.parametrize(
  "config",
  [
    ("loss_scale",),
    [["loss_scale", {}]],
    [["loss_scale", ml_collections.ConfigDict()]],
    [["loss_scale", ml_collections.FrozenConfigDict({"scale": "dynamic"})]],
    ml_collections.ConfigDict({"w": [["loss_scale", {}]]}).w,
  ],
  ids=repr,
)
def test_from_config_takes_every_form(config):
  assert from_config(config) == (fs.LossScale(),)


def test_from_config_takes_nested_config_dicts():
  config = ml_collections.ConfigDict(
    {
      "wrappers": [
        ["loss_scale", {"scale": {"type": "dynamic", "initial_scale": 8.0}}]
      ]
    }
  )
  wanted = (fs.LossScale(fs.DynamicLossScale(8.0)),)
  assert from_config(config.wrappers) == wanted


def test_from_config_does_not_change_its_argument():
  arguments = {"scale": {"type": "fixed", "loss_scale": 4.0}}
  config = (("loss_scale", arguments),)
  for _ in range(2):
    assert from_config(config) == (fs.LossScale(fs.FixedLossScale(4.0)),)
  assert arguments == {"scale": {"type": "fixed", "loss_scale": 4.0}}


def test_policy_by_name():
  config = (("loss_scale", {"scale": "auto", "policy": "mixed_float16"}),)
  assert from_config(config) == (
    fs.LossScale("auto", policy=fs.Policy("mixed_float16")),
  )


def test_custom_wrapper_round_trips(mine):
  wrapper = Mine(factors=(1.0, 2.5), rule=fs.DynamicLossScale(4.0))
  config = to_config([fs.LossScale(8), wrapper])
  assert config[1] == (
    mine,
    {
      "factors": (1.0, 2.5),
      "rule": {"type": "dynamic", "initial_scale": 4.0},
    },
  )
  assert from_config(config) == (fs.LossScale(8), wrapper)
  # JSON has no tuples, and a list cannot be hashed.
  again = from_config(json.loads(json.dumps(config)))
  assert again == (fs.LossScale(8), wrapper)
  assert hash(again[1]) == hash(wrapper)


def test_from_config_keeps_the_order(mine):
  assert from_config([mine, "loss_scale"]) == (Mine(), fs.LossScale())
  assert from_config(["loss_scale", mine]) == (fs.LossScale(), Mine())


def test_unknown_name_raises():
  with pytest.raises(ValueError, match=r"wrappers\[0\].*'los_scale'") as e:
    from_config((("los_scale", {}),))
  assert "Did you mean 'loss_scale'?" in str(e.value)


def test_unknown_argument_raises():
  with pytest.raises(ValueError, match=r"wrappers\[1\].*'scal'") as e:
    from_config(["loss_scale", ("loss_scale", {"scal": 8})])
  assert "scale, policy, warn_at_floor" in str(e.value)


def test_unknown_argument_of_nested_value_raises():
  arguments = {"scale": {"type": "dynamic", "growth": 8}}
  with pytest.raises(ValueError, match=r"wrappers\[0\].*scale.*'growth'") as e:
    from_config([("loss_scale", arguments)])
  assert "growth_interval" in str(e.value)


def test_unknown_type_of_nested_value_raises():
  with pytest.raises(ValueError, match=r"scale: type.*'dynamo'"):
    from_config([("loss_scale", {"scale": {"type": "dynamo"}})])
  with pytest.raises(ValueError, match=r"'type'.* dynamic, fixed"):
    from_config([("loss_scale", {"scale": {"initial_scale": 8.0}})])


def test_invalid_value_names_its_place():
  with pytest.raises(ValueError, match=r"wrappers\[0\].*scale.*-1"):
    from_config([("loss_scale", {"scale": -1})])
  with pytest.raises(TypeError, match=r"scale: .*growth_interval.*1\.5"):
    from_config(
      [("loss_scale", {"scale": {"type": "dynamic", "growth_interval": 1.5}})]
    )


@pytest.mark.parametrize("config", ["loss_scale", None])
def test_config_that_is_no_sequence_raises(config):
  with pytest.raises(TypeError, match="wrappers"):
    from_config(config)


@pytest.mark.parametrize("entry", [3, ("loss_scale",), ("loss_scale", 8)])
def test_entry_that_is_no_pair_raises(entry):
  with pytest.raises(TypeError, match=r"wrappers\[0\]"):
    from_config([entry])


def test_name_of_another_class_raises(mine):
  with pytest.raises(TypeError, match="must name a dataclass"):
    from_config([(f"{mine.split(':')[0]}:not_a_dataclass", {})])
  with pytest.raises(TypeError, match="must be an instance of a wrapper"):
    from_config(["flaxshard.core.policy:Policy"])


def test_repeated_wrapper_raises():
  with pytest.raises(ValueError, match="'loss_scale' is given twice"):
    from_config(["loss_scale", "loss_scale"])
