"""Wrappers from configs and back."""

import dataclasses
import json
import sys

import ml_collections
import pytest

import flaxshard as fs
from flaxshard.core import optimizer
from flaxshard.wrappers import from_config


@dataclasses.dataclass(frozen=True)
class Mine(fs.wrappers.Base):
  """A wrapper of the user's, with a tuple and an argument that is not one."""

  factors: tuple[float, ...] = (1.0,)
  rule: fs.DynamicLossScale | None = None


def not_a_wrapper():
  return 3


@pytest.fixture(autouse=True)
def importable(monkeypatch):
  """Lets configs name what this file defines."""
  monkeypatch.setitem(
    sys.modules, "some_users_module", sys.modules[Mine.__module__]
  )


SGD = {"name": "sgd", "learning_rate": 0.7}
CONFIG = (
  ("loss_scale", {"scale": "auto", "policy": "mixed_float16"}),
  (
    "some_users_module:Mine",
    {
      "factors": (1.0, 2.5),
      "rule": {"type": "dynamic", "initial_scale": 1 / 3, "min_scale": 0.3},
    },
  ),
  ("agn", {"commit": "mean", "outer_tx": {"type": "optimizer", **SGD}}),
)


@pytest.mark.parametrize(
  "form",
  [
    CONFIG,
    # JSON has no tuples, and a list cannot be hashed.
    json.loads(json.dumps(CONFIG)),
    ml_collections.ConfigDict({"wrappers": CONFIG}).wrappers,
  ],
)
def test_forms_of_a_config(form):
  made = from_config(form)
  rule = fs.DynamicLossScale(initial_scale=1 / 3, min_scale=0.3)
  wanted = (
    fs.LossScale("auto", policy="mixed_float16"),
    Mine((1.0, 2.5), rule),
    # Equal ones are one object.
    fs.AGN(commit="mean", outer_tx=optimizer.named(**SGD)),
  )
  assert made == wanted and hash(made) == hash(wanted)


def test_every_built_in_wrapper_has_a_name():
  exported = [getattr(fs.wrappers, name) for name in fs.wrappers.__all__]
  for cls in exported:
    if isinstance(cls, type) and issubclass(cls, fs.wrappers.Base):
      if cls is not fs.wrappers.Base:
        assert from_config([cls.name]) == (cls(),)


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
    (["some_users_module:not_a_wrapper"], TypeError, "wrappers[0]"),
    (["flaxshard.core.policy:Policy"], TypeError, "wrappers[0] Policy"),
    (["loss_scale"] * 2, ValueError, "'loss_scale' twice"),
  ],
)
def test_mistakes(entries, error, facts):
  with pytest.raises(error) as e:
    from_config(entries)
  assert all(fact in str(e.value) for fact in facts.split())
