"""Devices of the TPU compiler: programs are compiled for them, but not run."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import functools
import os
import re
from typing import Any

import jax
from jax.experimental import topologies

# libtpu reads these when it is loaded. Without them it writes errors about the
# accelerator type and the hostnames to stderr, and a second process fails on
# the lock file of the first.
_ENVIRONMENT = {
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  "TPU_ACCELERATOR_TYPE": "v5litepod-8",
  "TPU_WORKER_HOSTNAMES": "localhost",
}
_NAME = re.compile(r"(?:(\d+)\*)?(\w+):(\d+(?:x\d+)+)", re.ASCII)


def named_devices(name: str) -> tuple[Any, ...]:
  """Returns the devices of a topology, in the order of the TPU compiler.

  Each call with the same name returns the same devices: meshes over them are
  then equal, too.

  Args:
    name: The name of the topology; see `Topology.named`.

  Raises:
    ValueError: There is no such topology, or no TPU compiler.
  """
  text = re.sub(r"\s", "", name).lower()
  match = _NAME.fullmatch(text)
  if match is None:
    raise ValueError(
      f"topology={name!r} must be a generation of TPUs and the chips of a "
      "slice along each axis, such as 'v5e:2x4', 'v5p:4x4x8', or '2*v5e:2x4' "
      "for two slices."
    )
  try:
    return _compiler_devices(match[2], match[3], int(match[1] or 1))
  except RuntimeError as e:  # of the compiler, or for the lack of one
    raise ValueError(
      f"topology={name!r}: {e} (flaxshard[tpu] installs the TPU compiler.)"
    ) from e


@functools.cache
def _compiler_devices(
  generation: str, sides: str, num_slices: int
) -> tuple[Any, ...]:
  options: dict[str, Any] = {}
  if set(sides.split("x")) == {"1"}:
    # By default each process has 2 x 2 chips.
    options["chips_per_host_bounds"] = [1, 1, 1]
  if num_slices > 1:
    options["num_slices"] = num_slices
  if generation == "v4":
    # On Cloud TPU, JAX shows the two cores of a v4 chip as one device.
    options["chip_config_name"] = "megacore"
  with quiet_libtpu():
    description = topologies.get_topology_desc(
      f"{generation}:{sides}", platform="tpu", **options
    )
  return tuple(description.devices)


def all_devices() -> list[jax.Device]:
  """Returns `jax.devices()`, without errors of libtpu where there is no TPU."""
  with quiet_libtpu():
    return jax.devices()


@contextlib.contextmanager
def quiet_libtpu() -> Iterator[None]:
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
      os.environ.pop(key, None)
