"""Connects this process with the other processes of the program."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from typing import Any

import jax

from flaxshard.core import checks
from flaxshard.core import multihost
from flaxshard.processes import cluster as cluster_lib
from flaxshard.processes import failures
from flaxshard.processes import rendezvous
from flaxshard.processes import tpu

_log = logging.getLogger(__name__)

# JAX ends a process with SIGABRT when its own heartbeat times out: later than
# flaxshard's heartbeat, which names the lost process.
_JAX_HEARTBEAT_MARGIN = 30.0


# The arguments of the call that connected the processes, and its result.
_connected: tuple[dict[str, Any], cluster_lib.Cluster] | None = None


def initialize(
  coordinator_address: str | None = None,
  num_processes: int | None = None,
  process_id: int | None = None,
  *,
  heartbeat_timeout: float = 60.0,
  initialization_timeout: float = 300.0,
) -> cluster_lib.Cluster:
  """Connects this process with the other processes of the program.

  Call it before anything else uses JAX. Without arguments it finds the other
  processes in the environment: JAX's variables, torchrun, Slurm, Open MPI,
  Kubernetes, Cloud TPU. One line of the log says what was found. One process
  stays one process and opens no port.

  A second call with the same arguments does nothing, and neither does a call
  after `jax.distributed.initialize`.

  Args:
    coordinator_address: `"host:port"` of process 0, with a port that is free
      there.
    num_processes: Number of processes.
    process_id: Index of this process, from 0.
    heartbeat_timeout: Seconds without a sign of life after which a process
      counts as lost.
    initialization_timeout: Seconds to wait for the other processes.

  Returns:
    The processes of the program.

  Raises:
    ValueError: An argument or a variable is invalid, some of the values are
      given and others not found, the coordinator's port is in use, two
      processes have the same index, or the processes are connected already with
      other arguments.
    TimeoutError: After `initialization_timeout`, a process is missing. The
      message names it and the address.
    RuntimeError: JAX has started its devices already.

  Example:
    >>> initialize(num_processes=1).num_processes
    1

  References:
    https://docs.jax.dev/en/latest/multi_process.html
  """
  global _connected
  heartbeat_timeout = checks.number(
    "heartbeat_timeout", heartbeat_timeout, above=0, below=1e6
  )
  initialization_timeout = checks.number(
    "initialization_timeout", initialization_timeout, above=0, below=1e6
  )
  arguments = {
    "coordinator_address": coordinator_address,
    "num_processes": num_processes,
    "process_id": process_id,
    "heartbeat_timeout": heartbeat_timeout,
    "initialization_timeout": initialization_timeout,
  }
  if _connected is not None and jax.distributed.is_initialized():
    _check_same_arguments(_connected[0], arguments)
    return _connected[1]
  found = cluster_lib.find(
    os.environ,
    coordinator_address,
    num_processes,
    process_id,
    num_tpu_hosts=tpu.num_hosts(os.environ),
  )
  if jax.distributed.is_initialized():
    found = _describe_existing(found)
  elif found.num_processes > 1:
    found = _connect(found, heartbeat_timeout, initialization_timeout)
    _connected = arguments, found
  if found.num_processes > 1:
    multihost.set_process(found.process_id, found.num_processes)
    failures.watch(heartbeat_timeout, found.coordinator_address)
  if found.num_processes == 1:
    _log.info("one process: %s", found.source)
  else:
    gpus = found.local_device_ids
    _log.info(
      "process %d of %d, coordinator %s%s: %s",
      found.process_id,
      found.num_processes,
      found.coordinator_address or "chosen by JAX",
      "" if gpus is None else f", local devices {', '.join(map(str, gpus))}",
      found.source,
    )
  return found


def _check_same_arguments(first: dict[str, Any], now: dict[str, Any]) -> None:
  for name, value in now.items():
    if value != first[name]:
      raise ValueError(
        f"initialize was called with {name}={first[name]!r} before, now with "
        f"{name}={value!r}: the processes of a program are connected once."
      )


def _describe_existing(found: cluster_lib.Cluster) -> cluster_lib.Cluster:
  """Returns the processes that jax.distributed.initialize has connected."""
  source = "jax.distributed.initialize was called before"
  if found.num_processes > 1 and found.coordinator_address:
    return dataclasses.replace(found, source=f"{source}; {found.source}")
  # Starts JAX's devices: JAX has no other public name for the two numbers.
  return cluster_lib.Cluster(
    num_processes=jax.process_count(),
    process_id=jax.process_index(),
    source=source,
  )


def _connect(
  found: cluster_lib.Cluster,
  heartbeat_timeout: float,
  initialization_timeout: float,
) -> cluster_lib.Cluster:
  _check_devices_not_started()
  timeouts: dict[str, Any] = {
    "initialization_timeout": math.ceil(initialization_timeout),
    "heartbeat_timeout_seconds": math.ceil(
      heartbeat_timeout + _JAX_HEARTBEAT_MARGIN
    ),
  }
  if found.coordinator_address is None:
    # A Cloud TPU with several hosts.
    jax.distributed.initialize(**timeouts)
    return dataclasses.replace(
      found,
      num_processes=jax.process_count(),
      process_id=jax.process_index(),
    )
  bind_address = _bind_address(found.coordinator_address)
  rendezvous.meet(found, initialization_timeout, bind_address)
  jax.distributed.initialize(
    found.coordinator_address,
    found.num_processes,
    found.process_id,
    found.local_device_ids,
    # Otherwise JAX takes its GPUs from a launcher's variables.
    cluster_detection_method="deactivate",
    coordinator_bind_address=bind_address,
    **timeouts,
  )
  return found


def _bind_address(coordinator_address: str) -> str | None:
  """Returns where process 0 listens, None for JAX's default, all addresses."""
  given = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
  if given:
    cluster_lib.split_address("JAX_COORDINATOR_BIND_ADDRESS", given)
    return given
  # All processes are on this machine: nothing else can reach the port.
  is_local = coordinator_address.startswith("127.0.0.1:")
  return coordinator_address if is_local else None


def _check_devices_not_started() -> None:
  count = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
  try:
    # JAX accepts another number before its devices have started only.
    jax.config.update("jax_num_cpu_devices", max(count, 1) + 1)
    jax.config.update("jax_num_cpu_devices", count)
  except RuntimeError:
    raise RuntimeError(
      "flaxshard.initialize must be called before JAX starts its devices: "
      "before jax.devices(), jax.process_count() and any computation."
    ) from None
