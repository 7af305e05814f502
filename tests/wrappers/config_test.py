"""Wrappers from configs and back."""

import dataclasses
import json

import ml_collections
import pytest

import flaxshard as fs
from flaxshard.wrappers import config
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
  fs.LossScale("auto", policy="mixed_float16"),
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


@pytest.mark.parametrize(
  ("entries", "error", "facts"),
  [
    ([("los_scale", {})], ValueError, "wrappers[0] 'loss_scale'?"),
    (["ema", ("loss_scale", {"a": 8})], ValueError, "wrappers[1] 'a' policy"),
    ([("loss_scale", {"scale": -1})], ValueError, "wrappers[0] -1"),
    ([("loss_scale", {"scale": {"type": "a"}})], ValueError, "type 'a'"),
    ([("loss_scale", {"scale": {"a": 8.0}})], TypeError, "dynamic, fixed"),
    ("loss_scale", TypeError, "wrappers"),
    ([3], TypeError, "wrappers[0]"),
    ([("loss_scale", 8)], TypeError, "wrappers[0]"),
    (["some_users_module:not_a_dataclass"], TypeError, "dataclass"),
    (["flaxshard.core.policy:Policy"], TypeError, "wrappers[0] Policy"),
    (["loss_scale"] * 2, ValueError, "'loss_scale' twice"),
  ],
)
def test_mistakes(mine, entries, error, facts):
  with pytest.raises(error) as e:
    from_config(entries)
  assert all(fact in str(e.value) for fact in facts.split())


@pytest.mark.parametrize(
  ("wrappers", "names"),
  [
    ([fs.LossScale(4.0), fs.EMA()], ["accumulate", "loss_scale", "ema"]),
    ([fs.LossScale(), fs.EMA()], ["loss_scale", "accumulate", "ema"]),
    ([fs.CrossShard()], ["accumulate", "cross_shard"]),
  ],
)
def test_accumulation_is_added_as_far_outside_as_possible(wrappers, names):
  added = config.add_accumulation(wrappers, 4, per_replica=True)
  assert [w.name for w in added] == names
  assert added[names.index("accumulate")] == fs.Accumulate(4, per_replica=True)
