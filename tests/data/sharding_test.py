"""Batches on devices: shardings, pipelines, padding, masks."""

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
  assert sharding.pipelines(mesh) == (pipelines, pipeline_id)


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
    sharding.pipelines(mesh_of(processes, "replica", "m0"))


# Padding.

FOUR = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("replica",))
BUCKET = {"bucket": "power_of_two"}


def distributed(batches, **options):
  # No thread: the errors are the same, and the tests faster.
  return list(
    distribute.DistributedDataset(FOUR, batches, prefetch=0, **options)
  )


def rows(count):
  return {"x": np.arange(1, count + 1, dtype=np.float32)}


@pytest.mark.parametrize(
  ("sizes", "options", "wanted"),
  [
    ([6, 5], {}, [8, 8]),  # the next multiple of the replicas
    ([3, 5], {"batch_size": np.int64(6)}, [8, 8]),
    ([6, 5, 4], {"batch_size": 5, "drop_remainder": True}, [8, 8]),
    ([8, 8, 3], {"drop_remainder": True, "mask": None}, [8, 8]),
    ([3, 9, 17], BUCKET, [4, 16, 32]),
  ],
)
def test_rows_are_repeated_in_turn_to_reach_few_sizes(sizes, options, wanted):
  batches = distributed([rows(n) for n in sizes], **options)
  for batch, size, padded in zip(batches, sizes, wanted, strict=False):
    assert batch["x"].tolist() == [1 + i % size for i in range(padded)]
    if options.get("mask", "mask"):
      mask = batch["mask"].reshape(padded)
      assert mask.tolist() == [True] * size + [False] * (padded - size)
      assert mask.dtype == bool
    else:
      assert batch.keys() == {"x"}
  assert len(batches) == len(wanted)


def test_batches_that_are_no_dicts_have_no_mask():
  for x in ((np.arange(8), np.ones(8)), np.arange(8)):
    whole = distributed(
      [x, jax.tree.map(lambda x: x[:3], x)], drop_remainder=True
    )
    jax.tree.map(np.testing.assert_array_equal, whole, [x])


TOKENS = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1]], bool)


@pytest.mark.parametrize(
  ("mask", "options", "wanted"),
  [
    (TOKENS[0], {}, [True, True, False, False]),
    (TOKENS, {}, [*TOKENS, [False] * 3]),
    (TOKENS, BUCKET, np.pad(TOKENS, ((0, 1), (0, 1)))),
    # A mask of rows applies to all positions of a row.
    (TOKENS[0], BUCKET, [[1, 1, 1, 0], [1, 1, 1, 0], [0] * 4, [0] * 4]),
  ],
)
def test_a_mask_of_the_batch_keeps_its_false_entries(mask, options, wanted):
  given = mask.copy()
  (out,) = distributed([{"x": np.ones((3, 3)), "mask": given}], **options)
  np.testing.assert_array_equal(out["mask"], wanted)
  np.testing.assert_array_equal(given, mask)  # not written to


def test_another_key_may_have_the_mask():
  batch = {"x": np.ones(4), "mask": np.ones(4, np.float32)}
  (out,) = distributed([batch], mask="real")
  assert out["mask"].dtype == jnp.float32
  assert out["real"].tolist() == [True] * 4
  (out,) = distributed([batch], mask=None)
  assert out.keys() == batch.keys()


# Buckets.


def ones(**shapes):
  return {name: np.ones(shape) for name, shape in shapes.items()}


def text(length):
  return {"text": ones(ids=(4, length), kind=4), "dense": np.ones((4, 13))}


@pytest.mark.parametrize(
  ("batches", "dims", "wanted", "real"),
  [
    (
      [ones(x=(8, n), y=(8, n)) for n in (5, 1, 9)],
      None,
      [ones(x=(8, n), y=(8, n), mask=(8, n)) for n in (8, 1, 16)],
      [(8, n) for n in (5, 1, 9)],
    ),
    *(
      (
        [text(3), text(6)],
        dims,
        [text(n) | ones(mask=(4, n)) for n in (4, 8)],
        [(4, 3), (4, 6)],
      )
      for dims in ({"text/ids": (1,)}, {"text": (1,)})
    ),
    (
      [ones(label=4, x=(4, h, w, 3)) for h, w in ((5, 9), (8, 3))],
      (2, 1),
      [ones(label=4, x=(4, 8, w, 3), mask=(4, 8, w)) for w in (16, 4)],
      [(4, 5, 9), (4, 8, 3)],
    ),
    ([ones(x=(4, 5))], (), [ones(x=(4, 5), mask=4)], [(4,)]),
  ],
)
def test_buckets_pad_to_powers_of_two_with_zeros(batches, dims, wanted, real):
  out = distributed(batches, bucket_dims=dims, **BUCKET)
  shapes = lambda tree: jax.tree.map(np.shape, tree)
  assert shapes(out) == shapes(wanted)
  for given, padded, shape in zip(batches, out, real, strict=True):
    given = given | {"mask": np.ones(shape)}
    for x, y in zip(*map(jax.tree.leaves, (given, padded)), strict=True):
      pads = [(0, n - m) for n, m in zip(y.shape, x.shape, strict=True)]
      np.testing.assert_array_equal(y, np.pad(x, pads))


def test_joined_batches_have_one_length():
  def tokens(count, length):
    return {"x": np.arange(1, 1 + count * length).reshape(count, length)}

  def join(*batches):
    return distribute.distribute_datasets_from_function(
      FOUR, lambda _: batches, **BUCKET
    )

  with pytest.raises(ValueError, match="concatenation axis"):
    list(join(*(tokens(2, n) for n in (3, 5, 4, 2))))
  # Rows that agree over all batches, but not within each.
  unequal = [{"x": np.ones((n, 1)), "y": np.ones((5 - n, 1))} for n in (2, 3)]
  with pytest.raises(ValueError, match=r"batch\[y\] has 3.*\[x\] has 2"):
    list(join(*unequal))
  (out,) = join(*[tokens(2, 3)] * 3)
  wanted = np.concatenate([tokens(2, 3)["x"]] * 4)  # two rows are repeated
  np.testing.assert_array_equal(out["x"], np.pad(wanted, ((0, 0), (0, 1))))
  mask = np.pad(np.ones((6, 3), bool), ((0, 2), (0, 1)))
  np.testing.assert_array_equal(out["mask"], mask)
