"""Which worker a process is, and its share of a run."""

import pytest
import tiny

from flaxshard.tasks import load
from flaxshard.train import config as config_lib
from flaxshard.train import devices
from flaxshard.train import ranks
from flaxshard.train import setup as setup_lib
from flaxshard.train.ranks import Rank

HOST = (("agn", {"communication_period": 2, "transport": "store"}),)


def config(**fields):
  return config_lib.check(tiny.config(**{"wrappers": HOST, **fields}))


def test_rank_is_found_in_the_environment():
  environ = {"RANK": "2", "WORLD_SIZE": "4"}
  assert ranks.find(config(), environ=environ) == Rank(2, 4)
  rank = ranks.find(config(), 1, 3, start_timeout=5, environ=environ)
  assert rank == Rank(1, 3, 5.0)
  # Without AGN in a store, the variables are for JAX.
  assert ranks.find(config(wrappers=()), environ=environ) == Rank()


@pytest.mark.parametrize(
  ("given", "words"),
  [
    ({"worker_id": 4, "num_workers": 4}, "process_id=4 .* num_processes=4"),
    ({"worker_id": 1}, "num_processes"),
    ({"worker_id": 0, "num_workers": 0}, "num_processes"),
  ],
)
def test_invalid_rank_raises(given, words):
  with pytest.raises(ValueError, match=words):
    ranks.find(config(), **given, environ={})


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
def test_indivisible_share_raises(fields, words):
  with pytest.raises(ValueError, match=words):
    devices.create_strategy(ranks.config_of_worker(config(**fields), 4))


def test_workers_read_the_rows_of_their_replicas():
  fields = {"mesh": {"replica": 4, "per_replica": True}}
  whole = config(**fields, wrappers=(("agn", {"commit": "mean"}),))
  loaded = load.load(whole)
  setup = setup_lib.Setup(whole, devices.create_strategy(whole), loaded)
  with setup.open_train_batches() as batches:
    wanted = [next(batches)["labels"].tolist() for _ in range(2)]
  shared = config(**fields)
  worker_config = ranks.config_of_worker(shared, 2)
  for worker_id in range(2):
    rank = Rank(worker_id, 2)
    strategy = devices.create_strategy(worker_config)
    assert strategy.num_replicas_in_sync == 2
    setup = setup_lib.Setup(shared, strategy, loaded, rank)
    assert setup.batch_size == 8
    rows = slice(8 * worker_id, 8 * (worker_id + 1))
    with setup.open_train_batches() as batches:
      for batch in wanted:
        assert next(batches)["labels"].tolist() == batch[rows]
    # All examples are evaluated by each worker.
    masks = [batch["mask"] for batch in setup.eval_batches()]
    assert sum(int(mask.sum()) for mask in masks) == 360
