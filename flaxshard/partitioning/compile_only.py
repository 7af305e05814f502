"""Devices of the TPU compiler: programs are compiled for them, but not run."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import functools
import importlib.util
import os
import threading
from typing import Any

import jax
from jax.experimental import topologies

from flaxshard.partitioning import described_devices
from flaxshard.partitioning.tpu_generations import TopologyName

# libtpu reads these when it is loaded. Without them it writes errors about the
# accelerator type and the hostnames to stderr, and a second process fails on
# the lock file of the first.
_ENVIRONMENT = {
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  "TPU_ACCELERATOR_TYPE": "v5litepod-8",
  "TPU_WORKER_HOSTNAMES": "localhost",
}
_lock = threading.Lock()


def is_compile_only(devices: Any) -> bool:
  """Returns whether devices are for compiling alone.

  Args:
    devices: A `jax.sharding.Mesh`, or a device.
  """
  if isinstance(devices, jax.sharding.Mesh):
    devices = devices.devices.flat[0]
  client = getattr(devices, "client", None)
  return getattr(client, "runtime_type", None) == described_devices.RUNTIME_TYPE


def check_can_run(where: str, mesh: Any) -> None:
  """Raises a ValueError if a mesh has devices for compiling alone.

  Args:
    where: What needs to run on the devices, for the error message.
    mesh: The mesh.
  """
  if is_compile_only(mesh):
    device = mesh.devices.flat[0]
    raise ValueError(
      f"{where}: the mesh has {mesh.devices.size} devices of the kind "
      f"{device.device_kind!r} that exist for compiling alone; they run "
      "nothing and hold no arrays. Strategy.jit(fn).lower(...) and "
      "jax.jit(fn).lower(...) work, with jax.ShapeDtypeStructs; to run, create "
      "the Strategy from the devices of this machine."
    )


def check_can_hold(where: str, tree: Any) -> None:
  """Raises a ValueError if a tree is sharded over such devices.

  Args:
    where: What the tree is, for the error message.
    tree: A tree of arrays or `jax.ShapeDtypeStruct`s.
  """
  for x in jax.tree.leaves(tree):
    sharding = getattr(x, "sharding", None)
    if isinstance(sharding, jax.sharding.NamedSharding):
      check_can_run(where, sharding.mesh)
      return  # a state is on one mesh


def abstract_array(
  x: Any, sharding: jax.sharding.Sharding
) -> jax.ShapeDtypeStruct:
  """Returns the shape and dtype of an array, with another sharding.

  Args:
    x: An array, a number, or a `jax.ShapeDtypeStruct`.
    sharding: The sharding.
  """
  if not isinstance(x, jax.ShapeDtypeStruct):
    x = jax.typeof(x)
  return jax.ShapeDtypeStruct(
    x.shape, x.dtype, sharding=sharding, weak_type=x.weak_type
  )


def has_libtpu() -> bool:
  """Returns whether the TPU compiler is installed."""
  # JAX looks for the library in the same two places.
  path = os.environ.get("TPU_LIBRARY_PATH")
  return bool(path and os.path.isfile(path)) or (
    importlib.util.find_spec("libtpu") is not None
  )


def devices(name: TopologyName) -> tuple[Any, ...]:
  """Returns the devices of a topology, in the order of the TPU compiler.

  Each call with the same name returns the same devices: meshes over them are
  then equal, too.

  Args:
    name: The checked name of the topology.
  """
  # Without the lock two threads could get two sets of devices for a name.
  with _lock:
    if has_libtpu():
      return _compiler_devices(name)
    return _described_devices(name)


@functools.cache
def _described_devices(name: TopologyName) -> tuple[Any, ...]:
  return tuple(described_devices.describe_devices(name))


@functools.cache
def _compiler_devices(name: TopologyName) -> tuple[Any, ...]:
  options: dict[str, Any] = {
    "chips_per_host_bounds": list(name.chips_per_process)
  }
  if name.num_slices > 1:
    options["num_slices"] = name.num_slices
  if name.generation.chip_config is not None:
    options["chip_config_name"] = name.generation.chip_config
  with _libtpu_environment():
    description = topologies.get_topology_desc(
      name.layout, platform="tpu", **options
    )
  return tuple(description.devices)


@contextlib.contextmanager
def _libtpu_environment() -> Iterator[None]:
  """Sets what libtpu needs in order to be loaded where there is no TPU."""
  added = []
  # JAX sets this variable when it finds no TPU in the machine.
  if os.environ.get("TPU_SKIP_MDS_QUERY") == "1":
    added = [key for key in _ENVIRONMENT if key not in os.environ]
  os.environ.update({key: _ENVIRONMENT[key] for key in added})
  try:
    yield
  finally:
    # Other libraries read them as facts about a cluster.
    for key in added:
      del os.environ[key]
