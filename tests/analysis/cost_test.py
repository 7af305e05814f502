"""The roofline, computed by hand."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxshard.analysis import cost as cost_lib
from flaxshard.analysis.links import LinkTime


def create_cost(compute, hbm, ici=(), dcn=(), model=None):
  """Returns a cost with these seconds; the chip has 100 FLOP/s."""
  times = [
    LinkTime(("data",), network, "", 1.0, seconds)
    for network, several in (("ici", ici), ("dcn", dcn))
    for seconds in several
  ]
  return cost_lib.Cost(
    "chip", {"bf16": 1.0}, model, 1.0, tuple(times), compute, hbm, 100.0
  )


@pytest.mark.parametrize(
  "seconds, step, bound",
  [
    ((4.0, 3.0, (1.0, 2.5), (0.5,)), 4.0, "compute"),
    ((2.0, 3.0, (1.0, 1.5), (0.5,)), 3.0, "HBM"),
    ((2.0, 3.0, (1.0, 2.5), (0.5,)), 3.5, "ICI"),
    ((2.0, 3.0, (1.0, 2.5), (5.0,)), 5.0, "DCN"),
  ],
)
def test_roofline_is_the_longest_part(seconds, step, bound):
  cost = create_cost(*seconds, model=200.0)
  assert (cost.step_seconds, cost.bound) == (step, bound)
  assert cost.mfu == 200.0 / (step * 100.0)
  compute, hbm, ici, dcn = seconds
  assert cost.serial_seconds == compute + hbm + sum(ici) + sum(dcn)


def test_an_unknown_part_makes_the_step_unknown():
  cost = create_cost(1.0, 1.0, (2.0, None), model=1.0)
  assert cost.ici_seconds is cost.step_seconds is cost.bound is None
  assert cost.mfu is cost.serial_seconds is cost.link_seconds is None
  assert cost.dcn_seconds == 0.0


def read_product(kind, dtype=jnp.bfloat16, **kwargs):
  """Returns the cost of [256, 512] times [512, 1024] on a kind of device."""
  device = types.SimpleNamespace(device_kind=kind, num_cores=1)
  devices = np.empty((1,), object)
  devices[0] = device
  mesh = types.SimpleNamespace(
    devices=devices, axis_names=("data",), shape={"data": 1}
  )
  x = jax.ShapeDtypeStruct((256, 512), dtype)
  y = jax.ShapeDtypeStruct((512, 1024), dtype)
  traced = jax.jit(lambda x, y: x @ y).trace(x, y)
  compiled = traced.lower().compile()
  return cost_lib.read_cost(compiled, mesh, (), jaxpr=traced.jaxpr, **kwargs)


def test_product_on_a_tpu():
  # The CPU's compiler, but the speeds of the TPU. The CPU multiplies float32.
  cost = read_product("TPU v5 lite", jnp.float32)
  flops = 2 * 256 * 512 * 1024
  nbytes = 4 * (256 * 512 + 512 * 1024 + 256 * 1024)
  assert cost.flops == {"f32": flops}
  assert cost.model_flops == flops
  assert cost.hbm_bytes == nbytes
  assert cost.compute_seconds == flops / 197e12
  assert cost.hbm_seconds == nbytes / 819e9
  assert (cost.chip, cost.bound, cost.peak_flops) == ("TPU v5e", "HBM", 197e12)
  assert cost.mfu == pytest.approx(flops / 197e12 / (nbytes / 819e9))
  assert cost.notes == ()


def test_unknown_devices_have_flops_and_no_times():
  cost = read_product("TPU v99")
  assert cost.total_flops == 2 * 256 * 512 * 1024
  assert cost.compute_seconds is cost.hbm_seconds is cost.step_seconds is None
  assert "not known" in cost.notes[0]


def test_known_chip_with_unpublished_speeds_has_no_times():
  cost = read_product("TPU v2", jnp.float32)
  assert cost.chip == "TPU v2"
  assert cost.compute_seconds is cost.hbm_seconds is cost.mfu is None
