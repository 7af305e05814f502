"""Set-up of a run: devices, workers, data and state; errors name fields."""

import logging
import re

import flax.linen as nn
import jax
import numpy as np
import pytest
import tiny

import flaxshard as fs
from flaxshard import data
from flaxshard.train import config as config_lib
from flaxshard.train import devices
from flaxshard.train import evaluation
from flaxshard.train import setup as setup_lib
from flaxshard.train.devices import Rank

P = jax.sharding.PartitionSpec

_THIS = __name__
GROUPS = ((2, 0), (3, 1))
STORE = (("agn", {"communication_period": 2, "transport": "store"}),)


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


def check(**fields):
  return config_lib.check(tiny.config(**fields))


def create_setup(**fields):
  """Returns a set-up without tracing its train step."""
  config = check(**fields)
  return setup_lib.Setup(config, devices.create_strategy(config))


# The devices.


@pytest.mark.parametrize(
  ("mesh", "shape"),
  [
    ({"logical_devices": 4}, {"replica": 2, "m0": 2, "m1": 2}),
    ({"logical_devices": 3}, {"replica": 2, "m0": 3}),
    (
      {"replica": 1, "axes": [["x", 4], ["y", 1]]},
      {"replica": 1, "x": 4, "y": 1},
    ),
    # JAX runs with as many already.
    ({"virtual_devices": 8}, {"replica": 8}),
  ],
)
def test_mesh_shape(mesh, shape, caplog):
  with caplog.at_level(logging.INFO, "flaxshard"):
    strategy = devices.create_strategy(check(mesh=mesh))
  assert dict(strategy.mesh.shape) == shape
  used = strategy.mesh.devices.ravel().tolist()
  assert used == jax.devices()[: len(used)]
  assert f"{len(used)} of 8 cpu devices, Strategy(replica=" in caplog.text


@pytest.mark.parametrize(
  ("mesh", "pieces", "spec"),
  [
    ({"logical_devices": 2}, None, P("replica")),
    (
      {"logical_devices": 8},
      (1, 2, 4, 1),
      P(("replica",), "m0", ("m1", "m2"), None),
    ),
    (
      {"logical_devices": 4},
      (2, 2, 1, 1),
      P(("replica", "m0"), "m1", None, None),
    ),
    (
      {"axes": (("x", 2), ("y", 4))},
      (1, 4, 2, 1),
      P(("replica",), "y", "x", None),
    ),
  ],
)
def test_batches_are_split_into_pieces(mesh, pieces, spec):
  split = {"inputs": pieces} if pieces else {}
  setup = create_setup(mesh={**mesh, "split": split})
  batch = setup.arguments[setup_lib.BATCH]
  specs = {key: x.sharding.spec for key, x in batch.items()}
  assert specs == {"inputs": spec, "labels": P("replica")}


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


# The workers.


def test_rank_is_found_in_the_environment():
  environ = {"RANK": "2", "WORLD_SIZE": "4"}
  config = check(wrappers=STORE)
  assert devices.find_rank(config, environ=environ) == Rank(2, 4)
  rank = devices.find_rank(config, 1, 3, start_timeout=5, environ=environ)
  assert rank == Rank(1, 3, 5.0)
  # Without AGN in a store, the variables are for JAX.
  compiled = check(wrappers=())
  assert devices.find_rank(compiled, environ=environ) == Rank()
  with pytest.raises(ValueError, match=r"worker_id=1 .*transport='store'"):
    devices.find_rank(compiled, 1, environ=environ)
  for given, words in (
    ({"worker_id": 4, "num_workers": 4}, "process_id=4 .* num_processes=4"),
    ({"worker_id": 1}, "num_processes"),
    ({"worker_id": 0, "num_workers": 0}, "num_processes"),
  ):
    with pytest.raises(ValueError, match=words):
      devices.find_rank(config, **given, environ={})


def test_workers_read_the_rows_of_their_replicas():
  fields = {"mesh": {"replica": 4, "per_replica": True}}
  setup = create_setup(**fields, wrappers=(("agn", {"commit": "mean"}),))
  with setup.open_train_batches() as batches:
    wanted = [next(batches)["labels"].tolist() for _ in range(2)]
  shared = check(**fields, wrappers=STORE)
  strategy = devices.create_strategy(devices.config_of_worker(shared, 2))
  assert strategy.num_replicas_in_sync == 2
  for worker_id in range(2):
    setup = setup_lib.Setup(shared, strategy, rank=Rank(worker_id, 2))
    assert setup.batch_size == 8
    rows = slice(8 * worker_id, 8 * (worker_id + 1))
    with setup.open_train_batches() as batches:
      for batch in wanted:
        assert next(batches)["labels"].tolist() == batch[rows]
    # All examples are evaluated by each worker.
    masks = [batch["mask"] for batch in setup.eval_batches()]
    assert sum(int(mask.sum()) for mask in masks) == 360


# The state.


@pytest.mark.parametrize(
  ("wrappers", "names"),
  [
    (
      (("loss_scale", {"scale": 4.0}), "ema"),
      ["accumulate", "loss_scale", "ema"],
    ),
    (("loss_scale", "ema"), ["loss_scale", "accumulate", "ema"]),
    (("cross_shard",), ["accumulate", "cross_shard"]),
  ],
)
def test_accumulation_is_added_as_far_outside_as_possible(wrappers, names):
  mesh = {"per_replica": True}
  setup = create_setup(wrappers=wrappers, accumulate_steps=4, mesh=mesh)
  added = setup.abstract_state.wrappers
  assert [w.name for w in added] == names
  assert added[names.index("accumulate")] == fs.Accumulate(4, per_replica=True)


def test_model_that_returns_probabilities_warns():
  setup = create_setup(model={"name": f"{_THIS}:Probabilities"})
  with pytest.warns(UserWarning, match=r"config\.model .*logits"):
    row = evaluation.evaluate(setup, setup.create_state())
  assert row.keys() == {"eval_loss", "eval_accuracy"}


def split(mesh, **pieces):
  return {"mesh": {**mesh, "split": pieces}}


INPUTS = "config.mesh.split.inputs="
# The fields, how the message begins, and what else it names.
MISTAKES = [
  # The devices.
  (
    {"mesh": {"replica": 3, "logical_devices": 4}},
    "config.mesh.replica=3 config.mesh.logical_devices=4 12 8",
  ),
  # No replica fits: the message says what one would need.
  ({"mesh": {"logical_devices": 10**6}}, "config.mesh.replica=-1 1000000 8"),
  ({"mesh": {"axes": (("x", 3), ("y", 3))}}, "config.mesh.replica=-1 .axes 9"),
  ({"batch_size": 12}, "config.batch_size=12 8 config.mesh.replica="),
  ({"mesh": {"virtual_devices": 4}}, "config.mesh.virtual_devices=4 8 cpu"),
  # How batches are split. Of 16 examples, each of two replicas splits 8.
  (split({}, input=(8, 1, 1, 1)), "config.mesh.split.input=(8, mean 'inputs'"),
  (split({"logical_devices": 8}, mask=(8,)), "config.mesh.split.mask inputs"),
  (split({}, inputs=(1, 2, 4, 1)), f"{INPUTS}(1, 4, (2, 8, 8, 1)"),
  (split({"logical_devices": 8}, inputs=(2, 4)), f"{INPUTS}(2, dimension"),
  (split({"logical_devices": 3}, inputs=(3, 1, 1, 1)), f"{INPUTS}(3, divide"),
  (
    split({"axes": (("x", 8),)}, inputs=(1, 2, 4, 1)),
    f"{INPUTS}(1, {{'x': 8}}",
  ),
  # Model, data and optimizer.
  ({"model": {"name": "cnn", "depth": 3}}, "config.model 'depth'"),
  ({"data": {"name": f"{_THIS}:unlabelled"}}, "config.data 'labels'"),
  ({"model": {"name": f"{_THIS}:WrongLogits"}}, "config.model (16,)"),
  (
    {"schedule": {"name": "cosine", "warmup_steps": -1}},
    "config.schedule warmup_steps -1",
  ),
  ({"freeze": ("^desne/",)}, "config.freeze[0]='^desne/' 'dense'"),
  ({"learning_rates": (("haed", 2.0),)}, "config.learning_rates[0]='haed'"),
  # An error of a rule names config.mesh.rules, not config.model.
  (
    {"mesh": {"rules": (("kernell", ("replica",)),)}},
    "config.mesh.rules[0] dense/kernel",
  ),
  (
    {
      "mesh": {"replica": 8, "per_replica": True},
      "wrappers": (("cross_shard", {"group_assignment": GROUPS}),),
    },
    "config.wrappers: CrossShard group_assignment 8 replicas",
  ),
  ({"wrappers": ("accumulate",)}, "config.wrappers: config.accumulate_steps"),
]


@pytest.mark.parametrize(("fields", "facts"), MISTAKES)
@pytest.mark.filterwarnings("ignore:CrossShard")
def test_invalid_configs_raise_with_the_field(fields, facts):
  with pytest.raises(ValueError) as e:
    tiny.setup(tiny.config(**fields))
  start, *others = facts.split()
  assert str(e.value).startswith(start)
  for fact in others:
    assert fact in str(e.value)


def test_a_batch_of_more_than_all_examples_raises():
  with pytest.raises(ValueError, match=r"batch_size=5000 .*1437"):
    create_setup(batch_size=5000)


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({"batch_size": 6}, "config.batch_size=6 .* the 4 workers"),
    (
      {"batch_size": 4, "mesh": {"replica": 8}},
      "config.batch_size=1 .* the 2 replicas",
    ),
    ({"mesh": {"replica": 6}}, "config.mesh.replica=6 .* the 4 workers"),
  ],
)
def test_a_share_of_a_worker_that_is_no_integer_raises(fields, words):
  config = check(wrappers=STORE, **fields)
  with pytest.raises(ValueError, match=words):
    devices.create_strategy(devices.config_of_worker(config, 4))
