"""Shardings of batches: partition specs, dtypes, pipelines."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from flaxshard.data import distribute
from flaxshard.data import sharding

P = jax.sharding.PartitionSpec
MESH = jax.sharding.Mesh(
  np.array(jax.devices()).reshape(2, 2, 2), ("replica", "m0", "m1")
)


def images(rows=4):
  return np.arange(rows * 4 * 2, dtype=np.float32).reshape(rows, 4, 2)


def test_a_batch_is_split_over_replicas_and_replicated_within_them():
  batch = {
    "image": images(),
    "label": {"class": np.arange(4), "weight": (np.ones(4, np.float16),)},
    "nothing": None,
  }
  out = distribute.shard_batch(MESH, batch)
  leaves, structure = jax.tree.flatten(batch)
  assert jax.tree.structure(out) == structure  # no mask, no padding
  for got, x in zip(jax.tree.leaves(out), leaves, strict=True):
    assert got.sharding == jax.sharding.NamedSharding(MESH, P("replica"))
    for shard in got.addressable_shards:
      replica = int(np.argwhere(MESH.devices == shard.device)[0][0])
      np.testing.assert_array_equal(shard.data, np.split(x, 2)[replica])


def test_specs_apply_by_path_and_the_mask_is_split_as_the_rows():
  # The longest path of a leaf counts.
  spec = {"in": P("replica"), "in/image": P(("replica", "m1"), "m0"), "y": P()}
  batch = {
    "in": {"image": images(3)},
    "out": (np.arange(3),),
    "y": np.arange(3),
  }
  (batch,) = distribute.DistributedDataset(MESH, [batch], spec=spec)
  assert batch["in"]["image"].sharding.spec == P(("replica", "m1"), "m0")
  assert batch["out"][0].sharding.spec == P("replica")
  assert batch["y"].sharding.spec == P()
  assert batch["mask"].sharding.spec == P(("replica", "m1"))
  assert batch["mask"].tolist() == [True] * 3 + [False]
  assert batch["y"].tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize(
  ("dtype", "values"),
  [
    *((dtype, [0, 1, 3]) for dtype in ("bool", ">i8", "complex128")),
    ("float16", [1 / 3, 0, 1]),
    ("float64", [-np.inf, np.nan, 1 / 3]),
    (ml_dtypes.bfloat16, [0, 1, 3]),
  ],
)
@pytest.mark.parametrize("rows", [2, 3])  # without and with padding
def test_values_and_dtypes_are_those_of_jax_in_new_memory(dtype, values, rows):
  x = np.array(values)[:rows].astype(dtype)
  (batch,) = distribute.DistributedDataset(MESH, [{"x": x}])
  wanted = jnp.asarray(x.astype(x.dtype.newbyteorder("=")))
  assert batch["x"].dtype == wanted.dtype
  x[:] = 0
  np.testing.assert_array_equal(batch["x"][:rows], wanted)


# Pipelines.


@dataclasses.dataclass(frozen=True)
class Device:
  process_index: int


def mesh_of(processes, *names):
  """A fake mesh of devices that belong to these processes."""
  devices = np.vectorize(Device, otypes=[object])(np.array(processes))
  shape = dict(zip(names, devices.shape, strict=True))

  class Mesh(types.SimpleNamespace):
    __hash__ = object.__hash__

  return Mesh(devices=devices, axis_names=names, shape=shape)


@pytest.mark.parametrize(
  ("processes", "names", "pipelines", "pipeline_id", "rows"),
  [
    ([1, 0, 1, 0], ["replica"], ((0, 2), (1, 3)), 1, [2, 3, 6, 7]),
    # Two processes share a pipeline.
    ([[0, 1], [0, 1]], ["replica", "m0"], ((0, 1),), 0, [*range(8)]),
    ([[0, 1], [0, 1]], ["m0", "replica"], ((0,), (1,)), 0, [0, 1, 2, 3]),
  ],
)
def test_pipelines_group_replicas_by_process(
  processes, names, pipelines, pipeline_id, rows
):
  mesh = mesh_of(processes, *names)
  assert sharding.pipeline_rows(mesh, 8) == rows
  assert sharding.pipelines(mesh) == pipelines
  assert sharding.pipeline_id(mesh) == pipeline_id


@pytest.mark.parametrize(
  ("processes", "words"),
  [
    ([[0], [0], [1]], r"replicas.*\{0: "),
    ([[0, 1], [1, 2], [2, 0]], r"replicas.*\{0: "),
    ([[1], [2]], "mesh has no device of this process"),
  ],
)
def test_processes_with_none_unequal_or_overlapping_replicas_raise(
  processes, words
):
  with pytest.raises(ValueError, match=words):
    sharding.pipeline_id(mesh_of(processes, "replica", "m0"))
