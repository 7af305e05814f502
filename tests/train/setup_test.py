"""Set-up of a run: errors name fields, and nothing is compiled."""

import re

import flax.linen as nn
import numpy as np
import pytest
import tiny

from flaxshard import data
from flaxshard.train import config as config_lib
from flaxshard.train import devices
from flaxshard.train import evaluation
from flaxshard.train import setup as setup_lib

_THIS = __name__
GROUPS = ((2, 0), (3, 1))


class Probabilities(nn.Module):
  """A model with a softmax, which the loss takes once more."""

  num_classes: int
  policy: object

  @nn.compact
  def __call__(self, x, train: bool = False):
    x = nn.Dense(self.num_classes)(x.reshape(x.shape[0], -1))
    return nn.softmax(x.astype(self.policy.compute_dtype))


class WrongLogits(nn.Module):
  """A model whose logits have no dimension for the classes."""

  num_classes: int
  policy: object

  @nn.compact
  def __call__(self, x, train: bool = False):
    return nn.Dense(1)(x.reshape(x.shape[0], -1))[:, 0]


def unlabelled() -> data.Splits:
  """Returns examples without labels."""
  examples = [{"inputs": np.zeros((8, 8, 1), np.float32)}]
  return data.Splits(examples, examples, 10)


def create_setup(**fields):
  config = config_lib.check(tiny.config(**fields))
  return setup_lib.create_setup(config, devices.create_strategy(config))


def test_model_that_returns_probabilities_warns():
  setup = create_setup(model={"name": f"{_THIS}:Probabilities"})
  with pytest.warns(UserWarning, match=r"config\.model .*logits"):
    row = evaluation.evaluate(setup, setup.create_state())
  assert row.keys() == {"eval_loss", "eval_accuracy"}


def test_a_spatial_split_exchanges_borders_only():
  setup = create_setup(
    model={"name": "cnn", "features": (4,), "dense": 8},
    mesh={"logical_devices": 8, "split": {"inputs": (1, 2, 4, 1)}},
    precision="float32",
    wrappers=(),
  )
  text = setup.lowered_train_step.compile().as_text()
  # Neighbors exchange the borders of their pieces ...
  assert "collective-permute" in text
  # ... and nobody gets whole images, nor the first layer's.
  gathered = re.findall(r"= (\S+) all-gather", text)
  assert not [s for s in gathered if re.match(r"f32\[16,8,8,[14]\]", s)]


@pytest.mark.parametrize(
  ("fields", "facts"),
  [
    (dict(model={"name": "cnn", "depth": 3}), ("config.model", "'depth'")),
    (
      dict(data={"name": f"{_THIS}:unlabelled"}),
      ("config.data", "'labels'"),
    ),
    (
      dict(model={"name": f"{_THIS}:WrongLogits"}),
      ("config.model", "(16,)"),
    ),
    (
      dict(schedule={"name": "cosine", "warmup_steps": -1}),
      ("config.schedule", "warmup_steps", "-1"),
    ),
    (dict(freeze=("^desne/",)), ("config.freeze[0]='^desne/'", "'dense'")),
    (
      dict(learning_rates=(("haed", 2.0),)),
      ("config.learning_rates[0]='haed'",),
    ),
    # An error of a rule names config.mesh.rules, not config.model.
    (
      dict(mesh={"rules": (("kernell", ("replica",)),)}),
      ("config.mesh.rules[0]", "dense/kernel"),
    ),
    (dict(mesh={"split": {"input": (1,)}}), ("config.mesh.split.input",)),
    (dict(data="digits", batch_size=5000), ("config.batch_size=5000", "1437")),
    (
      dict(
        mesh={"replica": 8, "per_replica": True},
        wrappers=(("cross_shard", {"group_assignment": GROUPS}),),
      ),
      ("config.wrappers: CrossShard", "group_assignment", "8 replicas"),
    ),
  ],
)
@pytest.mark.filterwarnings("ignore:CrossShard")
def test_invalid_configs_raise_with_the_field(fields, facts):
  with pytest.raises(ValueError) as e:
    create_setup(**fields)
  assert str(e.value).startswith(facts[0])
  for fact in facts:
    assert fact in str(e.value)
