"""Batches of few shapes, with a mask of what is real."""

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxshard.data import distribute
from flaxshard.train import steps

P = jax.sharding.PartitionSpec
MESH = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("replica",))


def distributed(batches, mesh=MESH, **options):
  # Without a thread: errors are the same, and tests faster.
  return distribute.distribute_dataset(mesh, batches, prefetch=0, **options)


def rows(count):
  return {"x": np.arange(1, count + 1, dtype=np.float32)}


def shapes(batches, key="x"):
  return [b[key].shape for b in batches]


# Rows.


@pytest.mark.parametrize(
  ("sizes", "options", "wanted"),
  [
    ([8, 8, 3], {}, [8, 8, 8]),
    ([6, 5], {}, [8, 8]),  # a multiple of the replicas
    ([6, 8], {}, [8, 8]),
    ([3, 8, 5], {"batch_size": 8}, [8, 8, 8]),
    ([3, 5], {"batch_size": 6}, [8, 8]),
    ([8, 0, 2], {}, [8, 8, 8]),
    ([0, 2], {"batch_size": 4}, [4, 4]),
    ([8, 3, 8, 2], {"drop_remainder": True}, [8, 8]),
    ([6, 6, 5], {"drop_remainder": True}, [8, 8]),
    ([6, 6, 5], {"batch_size": 5, "drop_remainder": True}, [8, 8, 8]),
    ([8, 8, 3], {"drop_remainder": True, "mask": None}, [8, 8]),
  ],
)
def test_rows_are_brought_to_one_size(sizes, options, wanted):
  batches = list(distributed([rows(n) for n in sizes], **options))
  assert shapes(batches) == [(n,) for n in wanted]
  if options.get("drop_remainder"):
    least = options.get("batch_size", sizes[0])
    sizes = [n for n in sizes if n >= least]
  for n, batch in zip(sizes, batches, strict=True):
    padded = batch["x"].shape[0] - n
    first = [1.0] if n else [0.0]
    assert batch["x"].tolist() == [*range(1, n + 1), *(first * padded)]
    if options.get("mask", "mask"):
      assert batch["mask"].tolist() == [True] * n + [False] * padded
      assert batch["mask"].dtype == bool
    else:
      assert batch.keys() == {"x"}


def test_a_larger_batch_is_refused():
  with pytest.raises(ValueError, match=r"has 9 examples, the first .* says 8"):
    list(distributed([rows(8), rows(9)]))
  with pytest.raises(ValueError, match=r"has 9 examples, .* batch_size says 4"):
    list(distributed([rows(9)], batch_size=4))
  with pytest.raises(ValueError, match="first batch has no examples: give the"):
    list(distributed([rows(0)]))


@pytest.mark.parametrize("count", [3, 6])
@pytest.mark.parametrize("kind", ["no mask", "tuple", "array"])
def test_without_a_mask_nothing_is_padded(kind, count):
  def batch(count):
    x = np.arange(count)
    return {"no mask": {"x": x}, "tuple": (x, x), "array": x}[kind]

  options = {"mask": None} if kind == "no mask" else {}
  whole = list(distributed([batch(8), batch(8)], **options))
  assert len(whole) == 2
  for x in jax.tree.leaves(whole):
    assert x.tolist() == list(range(8))
  assert jax.tree.structure(whole[0]) == jax.tree.structure(batch(8))

  message = f"has {count} examples and would be padded to 8, but has no mask"
  with pytest.raises(ValueError, match=message):
    list(distributed([batch(8), batch(count)], **options))
  dropped = distributed(
    [batch(8), batch(count)], drop_remainder=True, **options
  )
  assert len(list(dropped)) == 1


# Masks.


def test_a_mask_of_the_batch_is_kept():
  own = np.array([True, False, True])
  batches = [{"x": np.ones(4), "mask": np.ones(4, bool)}]
  batches.append({"x": np.ones(3), "mask": own})
  out = list(distributed(batches))
  assert out[0]["mask"].tolist() == [True] * 4
  assert out[1]["mask"].tolist() == [True, False, True, False]
  tokens = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1]], bool)
  (out,) = distributed([{"x": np.ones((3, 3)), "mask": tokens}])
  np.testing.assert_array_equal(out["mask"], [*tokens, [False] * 3])
  assert own.tolist() == [True, False, True]  # as it was


def test_a_mask_of_another_kind_is_refused():
  batch = {"x": np.ones(4), "mask": np.ones(4, np.float32)}
  with pytest.raises(ValueError, match=r"batch\[mask\] must be a bool array"):
    list(distributed([batch]))
  (out,) = distributed([batch], mask="real")
  assert out["mask"].dtype == jnp.float32
  assert out["real"].tolist() == [True] * 4
  (out,) = distributed([batch], mask=None)
  assert out.keys() == batch.keys()


def test_any_mapping_is_a_dict():
  (out,) = distributed([flax.core.freeze(rows(4))])
  assert type(out) is dict and out.keys() == {"x", "mask"}


# All batches are like the first.


@pytest.mark.parametrize(
  ("second", "message"),
  [
    (
      {"x": np.ones((4, 3), np.float32)},
      "x: shape .'batch', 3., where .*2. is",
    ),
    (
      {"x": np.ones(4, np.float32)},
      r"x: shape \('batch',\), where .*2. is exp",
    ),
    ({"x": np.ones((4, 2), np.int32)}, "x: dtype int32, where float32 is"),
    ({"y": np.ones((4, 2), np.float32)}, "x: missing, where float32"),
    ({"x": [np.ones((4, 2))]}, "x: missing, where float32"),
    ({"x": np.ones((4, 2)), "y": np.ones(4)}, "y: float32.*where nothing is"),
    ([np.ones((4, 2))], "x: missing"),
  ],
)
def test_leaves_that_differ_from_the_first_batch(second, message):
  batches = distributed([{"x": np.ones((4, 2), np.float32)}, second])
  iterator = iter(batches)
  next(iterator)
  with pytest.raises(ValueError, match=message):
    next(iterator)


def test_containers_that_differ_from_the_first_batch():
  a, b = {"x": (np.ones(4),)}, {"x": [np.ones(4)]}
  with pytest.raises(
    ValueError, match=r"a batch is a .*\[\*\].*, the first one"
  ):
    list(distributed([a, b]))


def test_dtypes_are_compared_as_they_are_on_the_device():
  batches = [{"x": np.arange(4)}, {"x": np.arange(4, dtype=np.int32)}]
  assert [b["x"].dtype for b in distributed(batches)] == [jnp.int32] * 2


# Buckets.


def tokens(count, length, start=1):
  x = np.arange(start, start + count * length, dtype=np.int32)
  return {
    "inputs": x.reshape(count, length),
    "labels": -x.reshape(count, length),
  }


def test_lengths_are_padded_to_powers_of_two():
  lengths = [5, 8, 1, 9, 16, 33, 2, 3]
  batches = [tokens(8 if n != 3 else 5, n) for n in lengths]
  wanted = [8, 8, 1, 16, 16, 64, 2, 4]
  traces = []

  @jax.jit
  def evaluate(metrics, batch):
    traces.append(batch["mask"].shape)
    return metrics.merge(
      steps.Metrics.single_from_model_output(
        loss=batch["inputs"].astype(jnp.float32),
        correct=batch["labels"] < -3,
        mask=batch["mask"],
      )
    )

  metrics = jax.device_put(
    steps.Metrics.empty(), jax.sharding.NamedSharding(MESH, P())
  )
  out = list(distributed(batches, bucket="power_of_two"))
  for given, batch, length in zip(batches, out, wanted, strict=True):
    count, real = given["inputs"].shape
    for key in ("inputs", "labels", "mask"):
      assert batch[key].shape == (8, length)
    mask = np.zeros((8, length), bool)
    mask[:count, :real] = True
    np.testing.assert_array_equal(batch["mask"], mask)
    for key in ("inputs", "labels"):
      np.testing.assert_array_equal(batch[key][:count, :real], given[key])
      assert not batch[key][:, real:].any()
    metrics = evaluate(metrics, batch)
  assert len(traces) == len(set(traces)) == 6  # 1, 2, 4, 8, 16, 64
  everything = np.concatenate([b["inputs"].ravel() for b in batches])
  assert metrics.compute() == {
    "loss": pytest.approx(everything.mean(), rel=1e-6),
    "accuracy": pytest.approx((everything > 3).mean()),
  }


def test_rows_go_to_the_next_bucket():
  sizes = [8, 3, 9, 16, 17, 40]
  out = list(distributed([rows(n) for n in sizes], bucket="power_of_two"))
  assert shapes(out) == [(8,), (8,), (16,), (16,), (32,), (64,)]
  assert [b["mask"].sum() for b in out] == sizes
  # batch_size is the smallest bucket.
  out = list(
    distributed([rows(n) for n in sizes], bucket="power_of_two", batch_size=1)
  )
  assert shapes(out) == [(8,), (4,), (16,), (16,), (32,), (64,)]


def test_only_the_leaves_named_vary():
  def batch(length):
    return {
      "text": {"ids": np.ones((4, length)), "kind": np.ones(4)},
      "dense": np.ones((4, 13)),
    }

  batches = [batch(3), batch(6)]
  with pytest.raises(
    ValueError, match=r"ids\] has 3 .*dense\] has 13, and one"
  ):
    list(distributed(batches, bucket="power_of_two"))
  for dims in ({"text/ids": (1,)}, {"text": (1,)}):
    out = list(distributed(batches, bucket="power_of_two", bucket_dims=dims))
    assert [b["text"]["ids"].shape for b in out] == [(4, 4), (4, 8)]
    assert [b["dense"].shape for b in out] == [(4, 13)] * 2
    assert [b["mask"].sum() for b in out] == [12, 24]
  with pytest.raises(ValueError, match=r"dense: shape .*14.* where .*13"):
    list(
      distributed(
        [batch(3), {**batch(3), "dense": np.ones((4, 14))}],
        bucket="power_of_two",
        bucket_dims=dims,
      )
    )


def test_several_dimensions_or_none_vary():
  images = [
    {"x": np.ones((4, h, w, 3)), "label": np.ones(4)}
    for h, w in ((5, 9), (8, 3))
  ]
  options = dict(bucket="power_of_two")
  out = list(distributed(images, bucket_dims=(2, 1), **options))
  assert shapes(out) == [(4, 8, 16, 3), (4, 8, 4, 3)]
  assert shapes(out, "mask") == [(4, 8, 16), (4, 8, 4)]
  assert [b["mask"].sum() for b in out] == [4 * 45, 4 * 24]
  assert [b["x"].sum() for b in out] == [3 * 4 * 45, 3 * 4 * 24]
  out = list(distributed(images[:1], bucket_dims=(), **options))
  assert shapes(out) == [(4, 5, 9, 3)] and shapes(out, "mask") == [(4,)]


def test_masks_of_the_batch_in_buckets():
  own = np.array([[1, 0, 1]] * 3, bool)
  batch = {"x": np.ones((3, 3)), "mask": own}
  (out,) = distributed([batch], bucket="power_of_two")
  wanted = np.zeros((4, 4), bool)
  wanted[:3, :3] = own
  np.testing.assert_array_equal(out["mask"], wanted)
  batch = {"x": np.ones((3, 3)), "mask": own[0]}
  (out,) = distributed([batch], bucket="power_of_two")
  wanted[:3, :3] = own[0][:, None]
  np.testing.assert_array_equal(out["mask"], wanted)
  batch = {"x": np.ones((3, 3)), "mask": np.ones((3, 2), bool)}
  with pytest.raises(ValueError, match=r"batch\[mask\] .* do not go together"):
    list(distributed([batch], bucket="power_of_two", bucket_dims={"x": (1,)}))


def test_buckets_can_be_split():
  mesh = jax.sharding.Mesh(
    np.array(jax.devices()[:6]).reshape(2, 3), ("replica", "m0")
  )
  batches = [{"x": np.ones((2, n)), "y": np.ones((2, n))} for n in (2, 4, 7)]
  out = list(
    distributed(
      batches, mesh, bucket="power_of_two", spec={"x": P("replica", "m0")}
    )
  )
  assert shapes(out) == shapes(out, "y") == shapes(out, "mask")
  assert shapes(out) == [(2, 3), (2, 6), (2, 12)]


def test_the_lengths_of_joined_batches_may_differ():
  batches = [tokens(2, n) for n in (3, 5, 4, 2)]
  (out,) = distribute.distribute_datasets_from_function(
    MESH, lambda _: batches, bucket="power_of_two"
  )
  assert out["inputs"].shape == out["mask"].shape == (8, 8)
  lengths = np.repeat([3, 5, 4, 2], 2)
  np.testing.assert_array_equal(out["mask"], np.arange(8) < lengths[:, None])
  real = np.asarray(out["inputs"])[np.asarray(out["mask"])]
  wanted = np.concatenate([b["inputs"].ravel() for b in batches])
  np.testing.assert_array_equal(real, wanted)


# Arguments.


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (
      {"batch_size": 0},
      "batch_size must be an integer of at least 1, .* got 0",
    ),
    ({"batch_size": 8.0}, r"batch_size must be .* got 8\.0"),
    ({"batch_size": True}, "batch_size must be .* got True"),
    ({"mask": ""}, "mask must be a key or None, got ''"),
    ({"mask": True}, "mask must be a key or None, got True"),
    ({"drop_remainder": 1}, "drop_remainder must be a bool, got 1"),
    (
      {"bucket": "linear"},
      "bucket must be None or 'power_of_two', got 'linear'",
    ),
    (
      {"bucket": "power_of_two", "mask": None},
      "it needs a mask, got mask=None",
    ),
    ({"bucket_dims": (1,)}, r"bucket_dims=\(1,\) needs bucket='power_of_two'"),
    ({"bucket": "power_of_two", "bucket_dims": 1}, "must be a tuple .* got 1"),
    ({"bucket": "power_of_two", "bucket_dims": (0,)}, r"got \(0,\) for <root>"),
    (
      {"bucket": "power_of_two", "bucket_dims": {"x": (-1,)}},
      r"bucket_dims must be .* got \(-1,\) for x",
    ),
  ],
)
def test_arguments_that_cannot_be(options, message):
  with pytest.raises(ValueError, match=message):
    distributed([], **options)


def test_arguments_that_do_not_fit_the_batches():
  with pytest.raises(
    ValueError, match="bucket_dims names 'y'; the batch has x"
  ):
    list(distributed([rows(4)], bucket="power_of_two", bucket_dims={"y": (1,)}))
  with pytest.raises(
    ValueError, match="adds a mask: batches must be dicts, got"
  ):
    list(distributed([(np.ones(4),)], bucket="power_of_two"))
