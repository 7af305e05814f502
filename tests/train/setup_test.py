"""Set-up of a run: its devices, its workers' shares, its wrappers."""

import flax.linen as nn
import jax
import pytest
import tiny

import flaxshard as fs
from flaxshard.tasks import steps
from flaxshard.train import config as config_lib
from flaxshard.train import devices
from flaxshard.train import setup as setup_lib
from flaxshard.train.devices import Rank

STORE = (("agn", {"communication_period": 2, "transport": "store"}),)


def check(**fields):
  return config_lib.check(tiny.config(**fields))


def create_setup(**fields):
  """Returns a set-up without tracing its train step."""
  config = check(**fields)
  return setup_lib.Setup(config, devices.create_strategy(config))


@pytest.mark.parametrize(
  ("mesh", "pieces", "shape", "spec"),
  [
    # JAX runs with as many already.
    ({"virtual_devices": 8}, None, {"replica": 8}, jax.P("replica")),
    ({"logical_devices": 3}, None, {"replica": 2, "m0": 3}, jax.P("replica")),
    (
      {"logical_devices": 8},
      (1, 2, 4, 1),
      {"replica": 1, "m0": 2, "m1": 2, "m2": 2},
      jax.P(("replica",), "m0", ("m1", "m2"), None),
    ),
    (
      {"logical_devices": 4},
      (2, 2, 1, 1),
      {"replica": 2, "m0": 2, "m1": 2},
      jax.P(("replica", "m0"), "m1", None, None),
    ),
    (
      {"replica": 1, "axes": [["x", 2], ["y", 2]]},
      (1, 2, 2, 1),
      {"replica": 1, "x": 2, "y": 2},
      jax.P(("replica",), "x", "y", None),
    ),
  ],
)
def test_batches_are_split_over_the_mesh(mesh, pieces, shape, spec):
  split = {"inputs": pieces} if pieces else {}
  setup = create_setup(mesh={**mesh, "split": split})
  assert dict(setup.strategy.mesh.shape) == shape
  used = setup.strategy.mesh.devices.ravel().tolist()
  assert used == jax.devices()[: len(used)]
  batch = setup.arguments[setup_lib.BATCH]
  specs = {key: x.sharding.spec for key, x in batch.items()}
  assert specs == {"inputs": spec, "labels": jax.P("replica")}


def test_rank_is_found_in_the_environment(monkeypatch):
  monkeypatch.setattr("os.environ", {"WORLD_SIZE": "4", "RANK": "2"})
  config = check(wrappers=STORE)
  assert devices.find_rank(config) == Rank(2, 4)
  rank = devices.find_rank(config, 1, 3, start_timeout=5)
  assert rank == Rank(1, 3, 5.0)
  # Without AGN in a store, the variables are for JAX.
  assert devices.find_rank(check(wrappers=())) == Rank()


def test_workers_read_the_rows_of_their_replicas():
  fields = {"mesh": {"replica": 4, "per_replica": True}}
  setup = create_setup(**fields, wrappers=(("agn", {"commit": "mean"}),))
  with setup.open_train_batches(None) as batches:
    wanted = [next(batches)["labels"].tolist() for _ in range(2)]
  shared = check(**fields, wrappers=STORE)
  strategy = devices.create_strategy(devices.config_of_worker(shared, 2))
  assert strategy.num_replicas_in_sync == 2
  for worker_id in range(2):
    setup = setup_lib.Setup(shared, strategy, rank=Rank(worker_id, 2))
    assert setup.batch_size == 8
    rows = slice(8 * worker_id, 8 * (worker_id + 1))
    with setup.open_train_batches(None) as batches:
      for batch in wanted:
        assert next(batches)["labels"].tolist() == batch[rows]
    # All examples are evaluated by each worker.
    masks = [batch["mask"] for batch in setup.eval_batches()]
    assert sum(int(mask.sum()) for mask in masks) == 360


@pytest.mark.parametrize(
  ("wrappers", "names"),
  [
    ((("loss_scale", {"scale": 4.0}), "ema"), "accumulate loss_scale ema"),
    (("loss_scale", "ema"), "loss_scale accumulate ema"),
    (("cross_shard",), "accumulate cross_shard"),
  ],
)
def test_accumulation_is_added_as_far_outside_as_possible(wrappers, names):
  mesh = {"per_replica": True}
  setup = create_setup(wrappers=wrappers, accumulate_steps=4, mesh=mesh)
  added = {w.name: w for w in setup.abstract_state.wrappers}
  assert list(added) == names.split()
  assert added["accumulate"] == fs.Accumulate(4, per_replica=True)


class Probabilities(nn.Module):
  """A model with a softmax, which the loss takes once more."""

  num_classes: int
  policy: object

  @nn.compact
  def __call__(self, x, train: bool = False):
    x = nn.Dense(self.num_classes)(x.reshape(x.shape[0], -1))
    return nn.softmax(x.astype(self.policy.compute_dtype))


def test_model_that_returns_probabilities_warns():
  setup = create_setup(model={"name": f"{__name__}:Probabilities"})
  with pytest.warns(UserWarning, match=r"config\.model .*logits"):
    row = steps.evaluate(setup, setup.create_state())
  assert row.keys() == {"eval_loss", "eval_accuracy"}
  setup.num_eval_examples = 0
  assert steps.evaluate(setup, setup.create_state()) == {}
