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

from flaxshard.partitioning import tpu_generations
from flaxshard.partitioning.tpu_generations import TopologyName

# The runtime type of JAX's compile-only clients.
RUNTIME_TYPE = "compile_only_runtime"

# libtpu reads these when it is loaded. Without them it writes errors about the
# accelerator type and the hostnames to stderr, and a second process fails on
# the lock file of the first.
_ENVIRONMENT = {
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  "TPU_ACCELERATOR_TYPE": "v5litepod-8",
  "TPU_WORKER_HOSTNAMES": "localhost",
}
_environment_lock = threading.Lock()


def is_compile_only(devices: Any) -> bool:
  """Returns whether devices are for compiling alone.

  Args:
    devices: A `jax.sharding.Mesh`, or a device.
  """
  if isinstance(devices, jax.sharding.Mesh):
    devices = devices.devices.flat[0]
  client = getattr(devices, "client", None)
  return getattr(client, "runtime_type", None) == RUNTIME_TYPE


def check_can_run(where: str, mesh: jax.sharding.Mesh) -> None:
  """Raises a ValueError if a mesh has devices for compiling alone.

  Args:
    where: What needs to run on the devices, for the error message.
    mesh: The mesh.
  """
  if is_compile_only(mesh):
    device = mesh.devices.flat[0]
    raise ValueError(
      f"{where} cannot run on {device.device_kind} devices that exist only for "
      "the compiler, as those of Topology.named do. Lower and compile the "
      "program with `.lower(...).compile()`, or create the Strategy from the "
      "devices of this machine."
    )


def has_libtpu() -> bool:
  """Returns whether the TPU compiler is installed."""
  # JAX looks for the library in the same two places.
  path = os.environ.get("TPU_LIBRARY_PATH")
  return bool(path and os.path.isfile(path)) or (
    importlib.util.find_spec("libtpu") is not None
  )


@functools.cache
def devices(name: TopologyName) -> tuple[Any, ...]:
  """Returns the devices of a topology, in the order of the TPU compiler.

  Each call with the same name returns the same devices: meshes over them are
  then equal, too.

  Args:
    name: The checked name of the topology.
  """
  if not has_libtpu():
    return tpu_generations.described_devices(name)
  options: dict[str, Any] = {"num_slices": name.num_slices}
  if name.generation.chip_config is not None:
    options["chip_config_name"] = name.generation.chip_config
  if name.chips_per_process != tpu_generations.CHIPS_PER_PROCESS:
    options["chips_per_host_bounds"] = list(name.chips_per_process)
  with _libtpu_environment():
    description = topologies.get_topology_desc(
      name.layout, platform="tpu", **options
    )
  return tuple(description.devices)


@contextlib.contextmanager
def _libtpu_environment() -> Iterator[None]:
  """Sets what libtpu needs in order to be loaded where there is no TPU."""
  with _environment_lock:
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
