"""Shardings of batches: partition specs, pipelines, single batches."""

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


def make_mesh(*shape):
  names = ("replica", "m0", "m1")[: len(shape)]
  devices = np.array(jax.devices()[: np.prod(shape)])
  return jax.sharding.Mesh(devices.reshape(shape), names)


MESH = make_mesh(2, 2, 2)


def images(rows=4):
  return np.arange(rows * 4 * 2, dtype=np.float32).reshape(rows, 4, 2)


def shards(x):
  return {s.device: np.asarray(s.data) for s in x.addressable_shards}


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
    np.testing.assert_array_equal(got, x)
    parts = shards(got)
    for (replica, *_), device in np.ndenumerate(MESH.devices):
      part = x[2 * replica : 2 * replica + 2]
      np.testing.assert_array_equal(parts[device], part)


@pytest.mark.parametrize(
  "spec",
  [
    {"in": {"image": P("replica", "m0")}},
    {"in": P("replica"), "in/image": P("replica", "m0")},  # the nearest one
  ],
)
def test_a_dict_of_specs_applies_by_path(spec):
  batch = {"in": {"image": images()}, "out": (np.arange(4),)}
  out = distribute.shard_batch(MESH, batch, spec)
  assert out["in"]["image"].sharding.spec == P("replica", "m0")
  assert out["out"][0].sharding.spec == P("replica")


def test_the_mask_of_a_dataset_is_split_as_the_rows():
  spec = {"image": P(("replica", "m1"), "m0"), "label": P()}
  batches = [{"image": images(3), "label": np.arange(3)}]
  (batch,) = distribute.DistributedDataset(MESH, batches, spec=spec)
  assert batch["image"].sharding.spec == spec["image"]
  assert batch["label"].sharding.spec == P()
  assert batch["mask"].sharding.spec == P(("replica", "m1"))
  assert batch["mask"].tolist() == [True] * 3 + [False]
  assert batch["label"].tolist() == [0, 1, 2, 0]


X = np.ones(2)
OBJECTS = np.array([[1, 2], None], object)
KEYS = jax.random.split(jax.random.key(0))


def nested(leaf):
  return {"a": {"b": leaf}, "x": X}


@pytest.mark.parametrize(
  ("batch", "error", "facts"),
  [
    (nested(OBJECTS), ValueError, r"\[a/b\].*object.*\(2,\)"),
    (nested(np.array(["x", "y"])), TypeError, r"\[a/b\].*<U1"),
    (nested(np.ma.masked_array(X, [0, 1])), TypeError, r"\[a/b\].*masked"),
    (nested(KEYS), TypeError, r"\[a/b\].*key"),
    (nested(np.float32(3)), ValueError, r"\[a/b\].*scalar"),
    (nested([X, np.ones(3)]), ValueError, r"\[a/b/1\] has 3.*b/0\] has 2"),
    (nested(np.array([1, 2**31])), ValueError, rf"\[a/b\].*int64.*{2**31}"),
    (nested(np.array([1.0, 1e300])), ValueError, r"\[a/b\].*float32"),
    ({}, ValueError, "arrays.*{}"),
    ({"a": None}, ValueError, "arrays"),
    ({"x": np.ones(3)}, ValueError, r"batch\[x\].*3.*2"),
    ({"x": np.ones((0, 4))}, ValueError, r"batch\[x\] has no examples"),
  ],
)
def test_an_invalid_batch_raises(batch, error, facts):
  with pytest.raises(error, match=facts):
    distribute.shard_batch(MESH, batch)


TWICE = P("replica", ("m0", "m0"))
UNEVEN = {"image": P("replica", None, ("m0", "m1"))}


@pytest.mark.parametrize(
  ("spec", "error", "facts"),
  [
    ("replica", TypeError, "PartitionSpec.*'replica'"),
    (P("model"), ValueError, "axis: model"),
    (TWICE, ValueError, "duplicate.*m0"),
    ({"label": P("replica", "m0")}, ValueError, r"batch\[label\].*rank 1"),
    ({"imgae": P("replica")}, ValueError, "'imgae'.*image, label"),
    (UNEVEN, ValueError, r"batch\[image\].*axis 2.*4 times.*size is 2"),
  ],
)
def test_an_invalid_spec_raises(spec, error, facts):
  batch = {"image": images(), "label": np.arange(4)}
  with pytest.raises(error, match=facts):
    distribute.shard_batch(MESH, batch, spec)


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
    ([[2, 3], [0, 1]], ["replica", "m0"], ((0,), (1,)), 1, [4, 5, 6, 7]),
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
  "processes", [[[0], [0], [1]], [[0, 1], [1, 2], [2, 0]]]
)
def test_processes_with_unequal_or_overlapping_replicas_raise(processes):
  with pytest.raises(ValueError, match=r"replicas.*\{0: "):
    sharding.pipelines(mesh_of(processes, "replica", "m0"))


def test_an_invalid_mesh_raises():
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
  with pytest.raises(ValueError, match=r"'replica'.*'data'"):
    distribute.DistributedDataset(mesh, [])
  with pytest.raises(ValueError, match="mesh has no device of this process"):
    sharding.pipeline_id(mesh_of([1, 2], "replica"))
