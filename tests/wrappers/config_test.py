"""Wrappers from configs."""

import dataclasses
import json

import ml_collections
import pytest

import flaxshard as fs
from flaxshard.wrappers import from_config


@dataclasses.dataclass(frozen=True)
class Mine(fs.wrappers.Base):
  """A wrapper of the user's, with a tuple and an argument that is not one."""

  factors: tuple[float, ...] = (1.0,)
  rule: fs.DynamicLossScale | None = None


SGD = {"name": "sgd", "learning_rate": 0.7}
RULE = {"initial_scale": 1 / 3, "min_scale": 0.3}
CONFIG = (
  ("loss_scale", {"scale": "auto", "policy": "mixed_float16"}),
  (
    f"{Mine.__module__}:Mine",
    {"factors": (1.0, 2.5), "rule": {"type": "dynamic", **RULE}},
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
  # Equal optimizers are one object.
  outer_tx = from_config(CONFIG)[2].outer_tx
  wanted = (
    fs.LossScale("auto", policy="mixed_float16"),
    Mine((1.0, 2.5), fs.DynamicLossScale(**RULE)),
    fs.AGN(commit="mean", outer_tx=outer_tx),
  )
  assert made == wanted and hash(made) == hash(wanted)
