"""Padding: batches of few shapes, with a mask of the real examples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxshard.data import distribute

P = jax.sharding.PartitionSpec
MESH = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("replica",))
BUCKET = {"bucket": "power_of_two"}


def distributed(batches, **options):
  # No thread: the errors are the same, and the tests faster.
  return list(
    distribute.DistributedDataset(MESH, batches, prefetch=0, **options)
  )


def rows(count):
  return {"x": np.arange(1, count + 1, dtype=np.float32)}


def shapes(batches, key="x"):
  return [b[key].shape for b in batches]


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
  batches = distributed([rows(n) for n in sizes], **options)
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


@pytest.mark.parametrize("kind", ["no mask", "tuple", "array"])
def test_without_a_mask_a_batch_that_needs_padding_raises(kind):
  def batch(count):
    x = np.arange(count)
    return {"no mask": {"x": x}, "tuple": (x, x), "array": x}[kind]

  options = {"mask": None} if kind == "no mask" else {}
  whole = distributed([batch(8), batch(8)], **options)
  assert len(whole) == 2
  for x in jax.tree.leaves(whole):
    assert x.tolist() == list(range(8))
  assert jax.tree.structure(whole[0]) == jax.tree.structure(batch(8))
  for count in (3, 6):
    batches = [batch(8), batch(count)]
    with pytest.raises(ValueError, match=f"{count} examples.*8.*mask"):
      distributed(batches, **options)
    assert len(distributed(batches, drop_remainder=True, **options)) == 1


# Masks.

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


def tokens(count, length):
  x = np.arange(1, 1 + count * length, dtype=np.int32)
  return {
    "inputs": x.reshape(count, length),
    "labels": -x.reshape(count, length),
  }


def test_buckets_pad_lengths_to_powers_of_two():
  batches = [tokens(8 if n != 3 else 5, n) for n in (5, 8, 1, 9, 3)]
  out = distributed(batches, **BUCKET)
  for given, batch, length in zip(batches, out, (8, 8, 1, 16, 4), strict=True):
    count, real = given["inputs"].shape
    mask = np.zeros((8, length), bool)
    mask[:count, :real] = True
    np.testing.assert_array_equal(batch["mask"], mask)
    for key in ("inputs", "labels"):
      assert batch[key].shape == (8, length)
      np.testing.assert_array_equal(batch[key][:count, :real], given[key])
      assert not batch[key][:, real:].any()


def text(length, dense=13):
  return {
    "text": {"ids": np.ones((4, length)), "kind": np.ones(4)},
    "dense": np.ones((4, dense)),
  }


@pytest.mark.parametrize("dims", [{"text/ids": (1,)}, {"text": (1,)}])
def test_bucket_dims_by_path_name_the_leaves_that_vary(dims):
  out = distributed([text(3), text(6)], bucket_dims=dims, **BUCKET)
  assert [b["text"]["ids"].shape for b in out] == [(4, 4), (4, 8)]
  assert [b["dense"].shape for b in out] == [(4, 13)] * 2
  assert [b["mask"].sum() for b in out] == [12, 24]


def test_any_number_of_dimensions_may_vary():
  images = [
    {"label": np.ones(4), "x": np.ones((4, h, w, 3))}
    for h, w in ((5, 9), (8, 3))
  ]
  out = distributed(images, bucket_dims=(2, 1), **BUCKET)
  assert shapes(out) == [(4, 8, 16, 3), (4, 8, 4, 3)]
  assert shapes(out, "mask") == [(4, 8, 16), (4, 8, 4)]
  assert [b["mask"].sum() for b in out] == [4 * 45, 4 * 24]
  assert [b["x"].sum() for b in out] == [3 * 4 * 45, 3 * 4 * 24]
  out = distributed(images[:1], bucket_dims=(), **BUCKET)
  assert shapes(out) == [(4, 5, 9, 3)] and shapes(out, "mask") == [(4,)]


def test_joined_batches_have_one_length():
  def join(*batches):
    return distribute.distribute_datasets_from_function(
      MESH, lambda _: batches, **BUCKET
    )

  with pytest.raises(ValueError, match="concatenation axis"):
    list(join(*(tokens(2, n) for n in (3, 5, 4, 2))))
  # Rows that agree over all batches, but not within each.
  unequal = [{"x": np.ones((n, 1)), "y": np.ones((5 - n, 1))} for n in (2, 3)]
  with pytest.raises(ValueError, match=r"batch\[y\] has 3.*\[x\] has 2"):
    list(join(*unequal))
  (out,) = join(*[tokens(2, 3)] * 3)
  wanted = np.concatenate([tokens(2, 3)["inputs"]] * 3)
  np.testing.assert_array_equal(out["inputs"][:6, :3], wanted)
  np.testing.assert_array_equal(
    out["mask"], np.pad(np.ones((6, 3), bool), ((0, 2), (0, 1)))
  )


# Mistakes.

FLOATS = {"x": np.ones((4, 2), np.float32)}


@pytest.mark.parametrize(
  ("batches", "options", "facts"),
  [
    # Options alone.
    ([], {"bucket": "linear"}, "bucket.*'power_of_two'.*'linear'"),
    ([], {**BUCKET, "mask": None}, "bucket.*mask=None"),
    ([], {"bucket_dims": (1,)}, r"bucket_dims=\(1,\).*bucket='power_of_two'"),
    ([], {**BUCKET, "bucket_dims": {"x": (-1,)}}, r"bucket_dims.*\(-1,\).*x"),
    # Batches that are too large, or empty.
    ([rows(8), rows(9)], {}, "9 examples.*8.*batch_size"),
    ([rows(9)], {"batch_size": 4}, "9 examples.*4.*batch_size"),
    ([rows(0)], {}, "no examples.*batch_size"),
    ([rows(8), rows(0)], {}, r"batch\[x\] has no examples"),
    # Others than the first one.
    ([FLOATS, {"x": np.ones((4, 3), np.float32)}], {}, r"x:.*3\).* 2\)"),
    ([FLOATS, {"x": np.ones((4, 2), np.int32)}], {}, "x:.*int32.*float32"),
    ([FLOATS, [np.ones((4, 2))]], {}, "x:"),
    # Masks and buckets.
    (
      [{"x": np.ones(4), "mask": np.ones(4)}],
      {},
      r"batch\[mask\].*bool.*float",
    ),
    ([rows(4)], {**BUCKET, "bucket_dims": {"y": (1,)}}, "bucket_dims.*'y'.*x"),
    ([(np.ones(4),)], BUCKET, "bucket.*dict"),
    ([text(3)], BUCKET, r"\[text/ids\] has 3 .*1.* 13"),
    (
      [text(3), text(3, 14)],
      {**BUCKET, "bucket_dims": {"text": (1,)}},
      "dense:.*14.*13",
    ),
  ],
)
def test_mistakes(batches, options, facts):
  with pytest.raises(ValueError, match=facts):
    distributed(batches, **options)
