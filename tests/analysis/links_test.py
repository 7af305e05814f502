"""Times on the links, computed by hand for small toruses."""

import types

import numpy as np
import pytest

from flaxshard.analysis import chips
from flaxshard.analysis import links
from flaxshard.compiled.collectives import Collective

V5E, V5P, TPU7X = (
  chips.find_device(types.SimpleNamespace(device_kind=kind, num_cores=cores))
  for kind, cores in (("TPU v5 lite", 1), ("TPU v5", 2), ("TPU7x", 1))
)
MB = 10**6


def create_mesh(sides, axes, cores=1, slices=1):
  """Returns a mesh over chips in the order of their coordinates."""
  devices = [
    types.SimpleNamespace(
      coords=(*place[1:], *(0,) * (3 - len(sides))),
      slice_index=place[0],
      core_on_chip=core,
    )
    for place in np.ndindex(slices, *sides)
    for core in range(cores)
  ]
  array = np.empty(len(devices), object)
  array[:] = devices
  return types.SimpleNamespace(
    devices=array.reshape(tuple(axes.values())),
    axis_names=tuple(axes),
    shape=axes,
  )


def create_collective(kind, operand, group_size, axes, **kwargs):
  values = {
    "kind": kind,
    "dtype": "bf16",
    "operand_bytes": operand,
    "result_bytes": operand * (group_size if kind == "all-gather" else 1),
    "group_size": group_size,
    "axes": axes,
    "network": "ici",
    "executions": 1.0,
    "in_conditional": False,
    "purpose": "other",
    "parameters": (),
    "op_name": "",
    "source": "",
  }
  return Collective(**values | kwargs)


def seconds(mesh, device, collective, **kwargs):
  (time,) = links.link_times([collective], mesh, device, **kwargs)
  return time.seconds


def test_all_reduce_uses_both_dimensions_of_a_torus():
  mesh = create_mesh((2, 4), {"data": 8})
  collective = create_collective("all-reduce", 80 * MB, 8, ("data",))
  (time,) = links.link_times([collective], mesh, V5E)
  assert time.nbytes == 140 * MB  # 2 * 7/8 of the operand
  # Two lines, one link of 50 GB/s each.
  assert time.seconds == pytest.approx(140e6 / 100e9)
  assert time.links == "x: line, y: line"


@pytest.mark.parametrize(
  "sides, axes, axis, group_size, expected",
  [
    # y alone is 16 long: a ring, so both directions of 50 GB/s.
    ((2, 16), {"a": 2, "b": 16}, "b", 16, 100e9),
    ((2, 16), {"a": 2, "b": 16}, "a", 2, 50e9),
    # A part of the ring is a line.
    ((1, 16), {"a": 2, "b": 8}, "b", 8, 50e9),
    # Every second chip: the two groups share each link.
    ((1, 4), {"a": 2, "b": 2}, "a", 2, 25e9),
    # Around the ring, eight groups of every eighth chip.
    ((1, 16), {"a": 2, "b": 8}, "a", 2, 100e9 / 8),
  ],
)
def test_bandwidth_of_a_mesh_axis(sides, axes, axis, group_size, expected):
  mesh = create_mesh(sides, axes)
  collective = create_collective("reduce-scatter", 64 * MB, group_size, (axis,))
  nbytes = 64e6 * (group_size - 1) / group_size
  assert seconds(mesh, V5E, collective) == pytest.approx(nbytes / expected)


def test_cubes_are_rings_in_all_dimensions():
  collective = create_collective("all-gather", MB, 64, ("data",))
  mesh = create_mesh((4, 4, 4), {"data": 64})
  # 6 links of 100 GB/s.
  assert seconds(mesh, V5P, collective) == pytest.approx(63e6 / 600e9)
  mesh = create_mesh((2, 4, 8), {"data": 64})
  assert seconds(mesh, V5P, collective) == pytest.approx(63e6 / 300e9)


def test_cores_of_a_chip_share_its_links():
  mesh = create_mesh((2, 2, 1), {"a": 4, "b": 2}, cores=2)
  # The groups of "a" are those of one core each: two for each link.
  collective = create_collective("all-reduce", 8 * MB, 4, ("a",))
  assert seconds(mesh, TPU7X, collective) == pytest.approx(12e6 / 100e9)
  # Between the cores of a chip there is no link.
  within = create_collective("all-reduce", 8 * MB, 2, ("b",))
  assert links.link_times([within], mesh, TPU7X) == ()


def test_all_to_all_is_limited_by_the_middle_of_the_ring():
  mesh = create_mesh((1, 16), {"data": 16})
  collective = create_collective("all-to-all", 16 * MB, 16, ("data",))
  # Half of 16 chips send half of 16 MB over two links of 50 GB/s.
  assert seconds(mesh, V5E, collective) == pytest.approx(64e6 / 100e9)


def test_permute_uses_one_direction_of_one_link():
  mesh = create_mesh((1, 16), {"data": 16})
  collective = create_collective("collective-permute", 5 * MB, 16, ("data",))
  assert seconds(mesh, V5E, collective) == pytest.approx(5e6 / 50e9)


def test_executions_multiply_and_the_period_divides():
  mesh = create_mesh((1, 2), {"data": 2})
  once = create_collective("all-reduce", 5 * MB, 2, ("data",))
  often = create_collective("all-reduce", 5 * MB, 2, ("data",), executions=12.0)
  rare = create_collective("all-reduce", 5 * MB, 2, ("data",), in_commit=True)
  one = seconds(mesh, V5E, once)
  assert one == pytest.approx(5e6 / 50e9)
  assert seconds(mesh, V5E, often) == pytest.approx(12 * one)
  assert seconds(mesh, V5E, rare, period=10) == pytest.approx(one / 10)
  (together,) = links.link_times([once, often, rare], mesh, V5E, 10)
  assert together.seconds == pytest.approx(13.1 * one)
  assert together.nbytes == pytest.approx(13.1 * 5e6)


def test_devices_of_a_slice_divide_the_bytes_between_slices():
  mesh = create_mesh((2, 2), {"data": 8}, slices=2)
  collective = create_collective(
    "all-reduce", 80 * MB, 8, ("data",), network="dcn"
  )
  ici, dcn = links.link_times([collective], mesh, V5E)
  assert (ici.network, ici.nbytes) == ("ici", 120 * MB)  # 2 * 3/4
  # 2 * 1/2 of the operand, a fourth of it by each of the 4 devices.
  assert (dcn.network, dcn.nbytes) == ("dcn", 20 * MB)
  assert dcn.seconds == pytest.approx(20e6 / 3.125e9)


def test_groups_in_one_slice_of_an_axis_over_slices():
  mesh = create_mesh((2, 2), {"data": 8}, slices=2)
  # The compiler's own all-reduce in each slice: groups of no mesh axis.
  collective = create_collective("all-reduce", 80 * MB, 4, ())
  (time,) = links.link_times([collective], mesh, V5E)
  assert time.axes == ("data",)
  assert time.seconds == pytest.approx(120e6 / 100e9)


def test_unknown_groups_count_as_over_one_link():
  mesh = create_mesh((2, 2), {"data": 4})
  collective = create_collective("all-reduce", 5 * MB, 2, ())
  (time,) = links.link_times([collective], mesh, V5E)
  assert (time.links, time.seconds) == ("as over one link", 5e6 / 50e9)


def test_gpus_use_all_links_of_a_host_and_their_network_is_unknown():
  h100 = chips.find_device(
    types.SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3")
  )
  # JAX gives GPUs coordinates.
  mesh = create_mesh((1, 2), {"data": 4}, slices=2)
  near = create_collective("all-reduce", 45 * MB, 2, ())
  assert seconds(mesh, h100, near) == pytest.approx(45e6 / (18 * 25e9))
  far = create_collective("all-reduce", 45 * MB, 4, ("data",), network="dcn")
  assert seconds(mesh, h100, far) is None


def test_unknown_devices_have_bytes_and_no_seconds():
  mesh = create_mesh((1, 2), {"data": 2})
  collective = create_collective("all-reduce", 5 * MB, 2, ("data",))
  (time,) = links.link_times([collective], mesh, None)
  assert (time.nbytes, time.seconds) == (5 * MB, None)


def test_groups_of_one_device_have_no_traffic():
  mesh = create_mesh((1, 2), {"data": 2})
  alone = create_collective("all-reduce", MB, 1, (), network="none")
  assert links.link_times([alone], mesh, V5E) == ()
