import dataclasses

from given_plans import build
from given_plans import create_plan
from given_plans import GIB
import jax
import jax.numpy as jnp
import pytest

import flaxshard as fs
from flaxshard.analysis import search


def search_largest(peak_of, unit=4, limit=2**20, within=0.0, gives_up=9e9):
  """Searches with peaks that are a function of the batch size.

  Args:
    peak_of: Returns the peak in bytes.
    unit: Batch sizes are multiples of it.
    limit: Largest batch size.
    within: As in `largest_batch`.
    gives_up: The compiler says no more than this many bytes.
  """

  def make(batch_size):
    assert batch_size % unit == 0 and 0 < batch_size <= limit
    peak = int(peak_of(batch_size))
    return create_plan(
      peak=min(peak, int(gives_up)),
      hbm=8 * GIB,
      batch_size=batch_size,
      peak_is_lower_bound=peak > gives_up,
    )

  return search._search(make, unit, limit // unit, within, lambda t: None)


@pytest.mark.parametrize("slope", [10**4, 10**6, 10**7, 3 * 10**8])
def test_linear_memory_takes_few_tries(slope):
  found = search_largest(lambda n: 3 * GIB + slope * n, gives_up=1e12)
  expected = int(5 * GIB / slope) // 4 * 4
  assert found.batch_size == expected
  assert found.plan.batch_size == expected
  assert len(found.tries) <= 4
  by_size = {t.batch_size: t.fits for t in found.tries}
  assert by_size[expected] and by_size[expected + 4] is False


@pytest.mark.parametrize("slope", [10**4, 10**6, 3 * 10**8])
def test_a_compiler_that_gives_up_early_takes_a_few_more(slope):
  # It says a lower bound, and the state alone is less than half of the base.
  found = search_largest(lambda n: 6.5 * GIB + slope * n, gives_up=8.2 * GIB)
  assert found.batch_size == int(1.5 * GIB / slope) // 4 * 4
  assert len(found.tries) <= 12


def test_memory_that_is_traded_for_time_near_the_limit():
  # From 90 % on, memory grows at a fourth of its rate.
  def peak_of(n):
    linear = 3 * GIB + 10**7 * n
    knee = 0.9 * 8 * GIB
    return linear if linear < knee else knee + (linear - knee) / 4

  found = search_largest(peak_of, within=0.02)
  exact = search_largest(peak_of)
  assert peak_of(exact.batch_size) <= 8 * GIB < peak_of(exact.batch_size + 4)
  assert exact.batch_size * 0.97 <= found.batch_size <= exact.batch_size
  assert len(found.tries) <= 9
  assert len(found.tries) <= len(exact.tries) <= 14


def test_steps_of_padding():
  # Memory grows at every 128th example.
  found = search_largest(lambda n: 3 * GIB + 10**7 * 128 * -(-n // 128))
  assert found.batch_size == 5 * GIB // 10**7 // 128 * 128
  assert len(found.tries) <= 12


def test_nothing_fits():
  found = search_largest(lambda n: 20 * GIB, limit=64)
  assert (found.batch_size, found.plan.batch_size) == (0, 4)
  assert [t.batch_size for t in found.tries] == [32, 16, 8, 4]
  assert "no batch fits" in str(found)


def test_the_limit_fits():
  found = search_largest(lambda n: 3 * GIB + n, limit=100)
  assert (found.batch_size, found.at_limit) == (100, True)
  assert "limit" in str(found)


def test_the_table_shows_all_tries():
  found = search_largest(lambda n: 3 * GIB + 10**9 * n, gives_up=1e12)
  assert "largest batch on v5e:2x2: 4" in str(found)
  for attempt in found.tries:
    assert f"{attempt.batch_size}" in str(found)
    assert ("does not fit" in str(attempt)) == (not attempt.fits)


def test_devices_of_unknown_memory_are_an_error():
  with pytest.raises(ValueError, match="unknown what fits a cpu device"):
    fs.largest_batch(build, fs.Strategy(), features=3)


@pytest.mark.parametrize(
  "args, kwargs, error",
  [
    ((3, "v5e:2x2"), {}, TypeError),
    ((build, fs.Strategy), {}, TypeError),
    ((build, "v5e:2x2"), {"within": 1.0}, ValueError),
    ((build, None), {"multiple": 0}, ValueError),
    ((build, None), {"on_try": 3}, TypeError),
    ((build, None), {"limit": 2}, ValueError),
  ],
)
def test_invalid_arguments(args, kwargs, error):
  with pytest.raises(error):
    fs.largest_batch(*args, **kwargs)


def test_batches_are_multiples_of_the_replicas_too():
  with pytest.raises(ValueError, match="limit must be at least 24"):
    fs.largest_batch(build, None, multiple=3, limit=23)  # 8 replicas


@pytest.mark.tpu
def test_largest_batch_on_a_topology():
  tries = []

  def build_wide(strategy, batch_size):
    step, state, batch = build(strategy, batch_size)
    # 4 MiB of every example on v5e, whose devices have 15.75 GiB.
    noise = jax.ShapeDtypeStruct((batch_size, 2**20), jnp.float32)
    return (
      lambda state, batch: (step(state, batch[0]), batch[1] * 2),
      state,
      (batch, strategy.shard_batch(noise)),
    )

  found = fs.largest_batch(build_wide, "v5e:2x2", on_try=tries.append)
  # The noise and its double, without memory for more: 1,900 to 2,016 on each of
  # four devices.
  assert 4 * 1900 < found.batch_size <= 4 * 2016
  assert found.batch_size % 4 == 0
  assert found.plan.memory.fits
  assert found.tries == tuple(tries)
  assert len(tries) <= 5
  assert dataclasses.asdict(tries[0])["fits"]
