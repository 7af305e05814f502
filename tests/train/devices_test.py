"""The strategy of `config.mesh`, and how batches are split over it."""

import logging

import jax
import numpy as np
import pytest
import tiny

from flaxshard.train import config as config_lib
from flaxshard.train import devices

P = jax.sharding.PartitionSpec

EXAMPLE = {
  "inputs": np.zeros((8, 8, 1), np.float32),
  "labels": np.zeros((), np.int32),
}


def create_strategy(batch_size=16, **mesh):
  config = tiny.config(batch_size=batch_size, mesh=mesh)
  return devices.create_strategy(config_lib.check(config))


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
    strategy = create_strategy(**mesh)
  assert dict(strategy.mesh.shape) == shape
  used = strategy.mesh.devices.ravel().tolist()
  assert used == jax.devices()[: len(used)]
  assert f"{len(used)} of 8 cpu devices, Strategy(replica=" in caplog.text


@pytest.mark.parametrize(
  ("mesh", "facts"),
  [
    (
      {"replica": 3, "logical_devices": 4},
      ("config.mesh.replica=3", "config.mesh.logical_devices=4", "12", "8"),
    ),
    (
      # No replica fits: the message says what one would need.
      {"logical_devices": 2**31 - 1},
      ("config.mesh.replica=-1", f"{2**31 - 1}", "8"),
    ),
    (
      {"axes": (("x", 3), ("y", 3))},
      ("config.mesh.axes=(('x', 3), ('y', 3))", "9", "8"),
    ),
    ({"batch_size": 12}, ("config.batch_size=12", "8", "config.mesh.replica=")),
    ({"virtual_devices": 4}, ("config.mesh.virtual_devices=4", "8 cpu")),
  ],
)
def test_invalid_meshes_raise(mesh, facts):
  with pytest.raises(ValueError) as e:
    create_strategy(**mesh)
  for fact in facts:
    assert fact in str(e.value)
  assert jax.device_count() == 8


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
  strategy = create_strategy(**mesh)
  split = {"inputs": pieces} if pieces else {}
  specs = devices.batch_specs(split, 16, strategy, EXAMPLE)
  assert specs == {"inputs": spec, "labels": P("replica")}


@pytest.mark.parametrize(
  ("mesh", "key", "pieces", "fact"),
  [
    ({}, "input", (8, 1, 1, 1), "Did you mean 'inputs'"),
    ({"logical_devices": 8}, "mask", (8,), "inputs, labels"),
    ({}, "inputs", (1, 2, 4, 1), "(2, 8, 8, 1)"),
    ({"logical_devices": 8}, "inputs", (2, 4), "dimension"),
    # 16 examples on two replicas: each splits 8.
    ({"logical_devices": 3}, "inputs", (3, 1, 1, 1), "evenly divide"),
    ({"axes": (("x", 8),)}, "inputs", (1, 2, 4, 1), "{'x': 8}"),
  ],
)
def test_invalid_splits_raise_with_field_and_value(mesh, key, pieces, fact):
  strategy = create_strategy(**mesh)
  with pytest.raises(ValueError) as e:
    devices.batch_specs({key: pieces}, 16, strategy, EXAMPLE)
  assert str(e.value).startswith(f"config.mesh.split.{key}={pieces!r}: ")
  assert fact in str(e.value)
