"""What `config.mesh` becomes: a strategy, and batches in pieces."""

import logging

import jax
import numpy as np
import pytest
import tiny

from flaxshard.train import config as config_lib
from flaxshard.train import setup

P = jax.sharding.PartitionSpec

EXAMPLE = {
  "inputs": np.zeros((8, 8, 1), np.float32),
  "labels": np.zeros((), np.int32),
}


def make(batch_size=16, **mesh):
  return config_lib.check(tiny.config(batch_size=batch_size, mesh=mesh))


def create(**mesh):
  config = make(**mesh)
  return config, setup.create_strategy(config)


@pytest.mark.parametrize(
  ("mesh", "wanted"),
  [
    ({}, {"replica": 8}),
    ({"replica": 2}, {"replica": 2}),
    ({"logical_devices": 4}, {"replica": 2, "m0": 2, "m1": 2}),
    ({"logical_devices": 3}, {"replica": 2, "m0": 3}),
    ({"replica": 1, "logical_devices": 6}, {"replica": 1, "m0": 2, "m1": 3}),
    ({"axes": (("model", 2),)}, {"replica": 4, "model": 2}),
    (
      {"replica": 1, "axes": [["x", 4], ["y", 1]]},
      {"replica": 1, "x": 4, "y": 1},
    ),
    ({"virtual_devices": 8}, {"replica": 8}),  # as JAX runs already
  ],
)
def test_the_mesh(mesh, wanted, caplog):
  with caplog.at_level(logging.INFO, "flaxshard"):
    _, strategy = create(**mesh)
  assert dict(strategy.mesh.shape) == wanted
  used = strategy.mesh.devices.ravel().tolist()
  assert used == jax.devices()[: len(used)]
  assert f"{len(used)} of 8 cpu devices, Strategy(replica=" in caplog.text


@pytest.mark.parametrize(
  ("mesh", "message"),
  [
    (
      {"replica": 9},
      "config.mesh.replica=9 with config.mesh.logical_devices=1 needs 9 "
      "devices; there are 8.",
    ),
    (
      {"replica": 3, "logical_devices": 4},
      "config.mesh.replica=3 with config.mesh.logical_devices=4 needs 12 "
      "devices; there are 8.",
    ),
    (
      {"logical_devices": 2**31 - 1},
      f"config.mesh.replica=-1 with config.mesh.logical_devices={2**31 - 1} "
      f"needs {2**31 - 1} devices; there are 8.",
    ),
    (
      {"axes": (("x", 3), ("y", 3))},
      "config.mesh.replica=-1 with config.mesh.axes=(('x', 3), ('y', 3)) needs "
      "9 devices; there are 8.",
    ),
    (
      {"batch_size": 12},
      "config.batch_size=12 must be a multiple of the 8 replicas of "
      "config.mesh.replica=-1.",
    ),
    (
      {"replica": 3},
      "config.batch_size=16 must be a multiple of the 3 replicas of "
      "config.mesh.replica=3.",
    ),
    (
      {"virtual_devices": 4},
      "config.mesh.virtual_devices=4: JAX has started with 8 cpu devices "
      "already.",
    ),
  ],
)
def test_what_the_devices_do_not_allow(mesh, message):
  config = make(**mesh)
  with pytest.raises(ValueError) as e:
    setup.create_strategy(config)
  assert str(e.value) == message
  assert jax.device_count() == 8


@pytest.mark.parametrize(
  ("mesh", "pieces", "wanted"),
  [
    ({}, None, P("replica")),
    ({"logical_devices": 2}, None, P("replica")),
    (
      {"logical_devices": 8},
      (1, 2, 4, 1),
      P(("replica",), "m0", ("m1", "m2"), None),
    ),
    (
      {"logical_devices": 4},
      (1, 2, 2, 1),
      P(("replica",), "m0", "m1", None),
    ),
    (
      {"logical_devices": 4},
      (2, 2, 1, 1),
      P(("replica", "m0"), "m1", None, None),
    ),
    (
      {"logical_devices": 8},
      (8, 1, 1, 1),
      P(("replica", "m0", "m1", "m2"), None, None, None),
    ),
    (
      {"axes": (("x", 2), ("y", 4))},
      (1, 4, 2, 1),
      P(("replica",), "y", "x", None),
    ),
  ],
)
def test_batches_lie_in_pieces(mesh, pieces, wanted):
  split = {"inputs": pieces} if pieces else {}
  config, strategy = create(**mesh, split=split)
  specs = setup.batch_specs(config, strategy, EXAMPLE)
  assert specs == {"inputs": wanted, "labels": P("replica")}

  images = np.arange(16 * 64, dtype=np.float32).reshape(16, 8, 8, 1)
  placed = strategy.shard_batch({"inputs": images}, {"inputs": wanted})
  replicas, pieces = strategy.num_replicas_in_sync, pieces or (1, 1, 1, 1)
  shape = (16 // replicas // pieces[0], *np.floor_divide((8, 8, 1), pieces[1:]))
  shards = placed["inputs"].addressable_shards
  assert {shard.data.shape for shard in shards} == {shape}
  copies = strategy.num_logical_devices // np.prod(pieces)
  # Together they are the batch, so often as it lies there.
  assert sum(float(shard.data.sum()) for shard in shards) == pytest.approx(
    copies * images.sum()
  )
  devices = strategy.mesh.devices.reshape(replicas, -1)
  for shard in shards:
    replica, logical = np.argwhere(devices == shard.device)[0]
    starts = [
      s.indices(n)[0] for s, n in zip(shard.index, images.shape, strict=True)
    ]
    if "axes" not in mesh and split:  # pieces go to devices in row-major order
      piece = np.unravel_index(logical, pieces)
      first = replica * (16 // replicas), 0, 0, 0
      assert starts == list(first + np.multiply(piece, shape))
    assert starts[0] // (16 // replicas) == replica
    np.testing.assert_array_equal(shard.data, images[shard.index])


def test_any_array_of_a_batch_can_be_split():
  config, strategy = create(logical_devices=2, split={"labels": (2,)})
  specs = setup.batch_specs(config, strategy, EXAMPLE)
  assert specs == {"inputs": P("replica"), "labels": P(("replica", "m0"))}


@pytest.mark.parametrize(
  ("mesh", "key", "pieces", "message"),
  [
    ({}, "input", (8, 1, 1, 1), "a batch has inputs, labels. Did you mean 'in"),
    ({"logical_devices": 8}, "mask", (8,), "a batch has inputs, labels."),
    ({}, "inputs", (1, 2, 4, 1), "the number of logical devices, 1, got 8"),
    (
      {"logical_devices": 8},
      "inputs",
      (1, 2, 2, 1),
      "the number of logical devices, 8, got 4",
    ),
    ({"logical_devices": 8}, "inputs", (2, 4), "for each dimension"),
    ({"logical_devices": 8}, "inputs", (), "for each dimension"),
    ({"logical_devices": 8}, "inputs", (1, -2, -4, 1), "at least 1"),
    ({"logical_devices": 8}, "inputs", (0, 2, 4, 1), "at least 1"),
    (
      {"logical_devices": 3},
      "inputs",
      (1, 3, 1, 1),
      r"dimension 1 .* \(8, 8, 8, 1\), cannot be divided into 3 pieces",
    ),
    (
      # 16 examples on two replicas: each has 8.
      {"logical_devices": 3},
      "inputs",
      (3, 1, 1, 1),
      "dimension 0 .* cannot be divided into 3 pieces",
    ),
    (
      {"axes": (("x", 8),)},
      "inputs",
      (1, 2, 4, 1),
      r"cannot be made of the mesh axes \{'x': 8\}",
    ),
  ],
)
def test_bad_splits(mesh, key, pieces, message):
  config, strategy = create(**mesh, split={key: pieces})
  with pytest.raises(ValueError, match=message) as e:
    setup.batch_specs(config, strategy, EXAMPLE)
  assert str(e.value).startswith(f"config.mesh.split.{key}={pieces!r}: ")


def test_mirrored_arrays_are_whole_on_every_device():
  _, strategy = create(logical_devices=2)
  tree = {"step": np.int32(3), "key": jax.random.key(0)}
  placed = setup.replicate(strategy, tree)
  assert int(placed["step"]) == 3
  for x in placed.values():
    assert x.sharding.is_fully_replicated
    assert len(x.sharding.device_set) == 8


@pytest.mark.parametrize("replicas, waits", [(1, False), (2, True)])
def test_calls_are_waited_for_on_virtual_devices(monkeypatch, replicas, waits):
  waited = []
  wait = jax.block_until_ready
  monkeypatch.setattr(
    jax, "block_until_ready", lambda x: waited.append(x) or wait(x)
  )
  _, strategy = create(replica=replicas)
  doubled = setup.block_if_virtual_cpu(strategy, jax.jit(lambda x: 2 * x))
  assert float(doubled(np.float32(2))) == 4
  assert bool(waited) == waits
  assert "stablehlo" in doubled.lower(np.float32(2)).as_text()


def test_every_process_of_one_reads_all_of_a_batch():
  _, strategy = create(logical_devices=2)
  assert setup.input_pipeline(strategy) == {
    "process_index": 0,
    "process_count": 1,
  }
