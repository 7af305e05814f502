"""Padding: batches of few shapes, with a mask of the real examples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxshard.data import distribute

P = jax.sharding.PartitionSpec
MESH = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("replica",))


def distributed(batches, mesh=MESH, **options):
  # No thread: the errors are the same, and the tests faster.
  return distribute.DistributedDataset(mesh, batches, prefetch=0, **options)


def rows(count):
  return {"x": np.arange(1, count + 1, dtype=np.float32)}


def shapes(batches, key="x"):
  return [b[key].shape for b in batches]


def check_raises(facts, batches, **options):
  with pytest.raises(ValueError) as e:
    list(distributed(batches, **options))
  for fact in facts:
    assert fact in str(e.value)


# Rows.


@pytest.mark.parametrize(
  ("sizes", "options", "wanted"),
  [
    ([8, 8, 3], {}, [8, 8, 8]),
    ([6, 5], {}, [8, 8]),  # the next multiple of the replicas
    ([3, 5], {"batch_size": np.int64(6)}, [8, 8]),
    ([6, 6, 5], {"batch_size": 5, "drop_remainder": True}, [8, 8, 8]),
    ([8, 8, 3], {"drop_remainder": True, "mask": None}, [8, 8]),
  ],
)
def test_rows_are_padded_to_one_size(sizes, options, wanted):
  batches = list(distributed([rows(n) for n in sizes], **options))
  assert shapes(batches) == [(n,) for n in wanted]
  if options.get("drop_remainder"):
    least = options.get("batch_size", sizes[0])
    sizes = [n for n in sizes if n >= least]
  for n, batch in zip(sizes, batches, strict=True):
    padding = batch["x"].shape[0] - n
    x = list(range(1, n + 1))  # repeated in turn
    assert batch["x"].tolist() == [x[i % len(x)] for i in range(n + padding)]
    if options.get("mask", "mask"):
      assert batch["mask"].tolist() == [True] * n + [False] * padding
      assert batch["mask"].dtype == bool
    else:
      assert batch.keys() == {"x"}


def test_too_large_or_empty_batches_raise():
  check_raises(["9 examples", "8", "batch_size"], [rows(8), rows(9)])
  check_raises(["9 examples", "4", "batch_size"], [rows(9)], batch_size=4)
  check_raises(["no examples", "batch_size"], [rows(0)])
  check_raises(["batch[x]", "no examples"], [rows(8), rows(0)])


@pytest.mark.parametrize("kind", ["no mask", "tuple", "array"])
def test_without_a_mask_a_batch_that_needs_padding_raises(kind):
  def batch(count):
    x = np.arange(count)
    return {"no mask": {"x": x}, "tuple": (x, x), "array": x}[kind]

  options = {"mask": None} if kind == "no mask" else {}
  whole = list(distributed([batch(8), batch(8)], **options))
  assert len(whole) == 2
  for x in jax.tree.leaves(whole):
    assert x.tolist() == list(range(8))
  assert jax.tree.structure(whole[0]) == jax.tree.structure(batch(8))
  for count in (3, 6):
    batches = [batch(8), batch(count)]
    check_raises([f"{count} examples", "8", "mask"], batches, **options)
    dropped = distributed(batches, drop_remainder=True, **options)
    assert len(list(dropped)) == 1


# Masks.


def test_a_mask_of_the_batch_keeps_its_false_entries():
  mask = np.array([True, False, True])
  batches = [{"x": np.ones(4), "mask": np.ones(4, bool)}]
  batches.append({"x": np.ones(3), "mask": mask})
  out = list(distributed(batches))
  assert out[0]["mask"].tolist() == [True] * 4
  assert out[1]["mask"].tolist() == [True, False, True, False]
  tokens = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1]], bool)
  (out,) = distributed([{"x": np.ones((3, 3)), "mask": tokens}])
  np.testing.assert_array_equal(out["mask"], [*tokens, [False] * 3])
  assert mask.tolist() == [True, False, True]  # not written to


def test_a_mask_that_is_not_boolean_raises_unless_renamed():
  batch = {"x": np.ones(4), "mask": np.ones(4, np.float32)}
  check_raises(["batch[mask]", "bool", "float32"], [batch])
  (out,) = distributed([batch], mask="real")
  assert out["mask"].dtype == jnp.float32
  assert out["real"].tolist() == [True] * 4
  (out,) = distributed([batch], mask=None)
  assert out.keys() == batch.keys()


# Batches that differ from the first one.


@pytest.mark.parametrize(
  ("second", "facts"),
  [
    ({"x": np.ones((4, 3), np.float32)}, ["x:", "3)", "2)"]),
    ({"x": np.ones((4, 2), np.int32)}, ["x:", "int32", "float32"]),
    ([np.ones((4, 2))], ["x:"]),
  ],
)
def test_a_batch_that_differs_from_the_first_one_raises(second, facts):
  iterator = iter(distributed([{"x": np.ones((4, 2), np.float32)}, second]))
  next(iterator)
  with pytest.raises(ValueError) as e:
    next(iterator)
  for fact in facts:
    assert fact in str(e.value)


# Buckets.


def tokens(count, length):
  x = np.arange(1, 1 + count * length, dtype=np.int32)
  return {
    "inputs": x.reshape(count, length),
    "labels": -x.reshape(count, length),
  }


def test_buckets_pad_lengths_to_powers_of_two():
  batches = [tokens(8 if n != 3 else 5, n) for n in (5, 8, 1, 9, 3)]
  out = list(distributed(batches, bucket="power_of_two"))
  for given, batch, length in zip(batches, out, (8, 8, 1, 16, 4), strict=True):
    count, real = given["inputs"].shape
    mask = np.zeros((8, length), bool)
    mask[:count, :real] = True
    np.testing.assert_array_equal(batch["mask"], mask)
    for key in ("inputs", "labels"):
      assert batch[key].shape == (8, length)
      np.testing.assert_array_equal(batch[key][:count, :real], given[key])
      assert not batch[key][:, real:].any()


def test_bucket_dims_by_path_name_the_leaves_that_vary():
  def batch(length, dense=13):
    return {
      "text": {"ids": np.ones((4, length)), "kind": np.ones(4)},
      "dense": np.ones((4, dense)),
    }

  batches = [batch(3), batch(6)]
  options = {"bucket": "power_of_two"}
  check_raises(["[text/ids]", "3", "[dense]", "13"], batches, **options)
  for dims in ({"text/ids": (1,)}, {"text": (1,)}):
    out = list(distributed(batches, bucket_dims=dims, **options))
    assert [b["text"]["ids"].shape for b in out] == [(4, 4), (4, 8)]
    assert [b["dense"].shape for b in out] == [(4, 13)] * 2
    assert [b["mask"].sum() for b in out] == [12, 24]
  check_raises(
    ["dense", "14", "13"],
    [batch(3), batch(3, dense=14)],
    bucket_dims=dims,
    **options,
  )


def test_any_number_of_dimensions_may_vary():
  images = [
    {"x": np.ones((4, h, w, 3)), "label": np.ones(4)}
    for h, w in ((5, 9), (8, 3))
  ]
  options = {"bucket": "power_of_two"}
  out = list(distributed(images, bucket_dims=(2, 1), **options))
  assert shapes(out) == [(4, 8, 16, 3), (4, 8, 4, 3)]
  assert shapes(out, "mask") == [(4, 8, 16), (4, 8, 4)]
  assert [b["mask"].sum() for b in out] == [4 * 45, 4 * 24]
  assert [b["x"].sum() for b in out] == [3 * 4 * 45, 3 * 4 * 24]
  out = list(distributed(images[:1], bucket_dims=(), **options))
  assert shapes(out) == [(4, 5, 9, 3)] and shapes(out, "mask") == [(4,)]


def test_a_mask_of_the_batch_is_padded_in_buckets():
  mask = np.array([[1, 0, 1]] * 3, bool)
  (out,) = distributed(
    [{"x": np.ones((3, 3)), "mask": mask}], bucket="power_of_two"
  )
  wanted = np.zeros((4, 4), bool)
  wanted[:3, :3] = mask
  np.testing.assert_array_equal(out["mask"], wanted)
  (out,) = distributed(
    [{"x": np.ones((3, 3)), "mask": mask[0]}], bucket="power_of_two"
  )
  wanted[:3, :3] = mask[0][:, None]
  np.testing.assert_array_equal(out["mask"], wanted)


def test_joined_batches_have_one_length():
  def join(*lengths):
    return distribute.distribute_datasets_from_function(
      MESH, lambda _: [tokens(2, n) for n in lengths], bucket="power_of_two"
    )

  with pytest.raises(ValueError, match="concatenation axis"):
    list(join(3, 5, 4, 2))
  (out,) = join(3, 3, 3)
  wanted = np.concatenate([tokens(2, 3)["inputs"]] * 3)
  np.testing.assert_array_equal(out["inputs"][:6, :3], wanted)
  mask = np.zeros((8, 4), bool)
  mask[:6, :3] = True
  np.testing.assert_array_equal(out["mask"], mask)


# Arguments.


BUCKET = {"bucket": "power_of_two"}


@pytest.mark.parametrize(
  ("options", "facts"),
  [
    ({"bucket": "linear"}, "bucket.*'power_of_two'.*'linear'"),
    ({**BUCKET, "mask": None}, "bucket.*mask=None"),
    ({"bucket_dims": (1,)}, r"bucket_dims=\(1,\).*bucket='power_of_two'"),
    ({**BUCKET, "bucket_dims": {"x": (-1,)}}, r"bucket_dims.*\(-1,\).*x"),
  ],
)
def test_invalid_options_raise_before_a_batch_is_read(options, facts):
  with pytest.raises(ValueError, match=facts):
    distributed([], **options)


def test_options_that_do_not_fit_the_batches_raise():
  dims = {"y": (1,)}
  check_raises(
    ["bucket_dims", "'y'", "x"], [rows(4)], bucket_dims=dims, **BUCKET
  )
  check_raises(["bucket", "dict"], [(np.ones(4),)], **BUCKET)
