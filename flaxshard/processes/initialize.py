"""Connects this process with the other processes of the program."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
from typing import Any

import jax

from flaxshard.core import checks
from flaxshard.core import multihost
from flaxshard.processes import cluster as cluster_lib
from flaxshard.processes import failures

_log = logging.getLogger(__name__)

# Seconds after which a process says that it waits.
_NOTICE_SECONDS = 15.0


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
  stays one process and opens no port, except on a Cloud TPU.

  A second call connects nothing, and neither does a call after
  `jax.distributed.initialize`.

  Args:
    coordinator_address: `"host:port"` of process 0, with a port that is free
      there.
    num_processes: Number of processes.
    process_id: Index of this process, from 0.
    heartbeat_timeout: Seconds without a sign of life after which JAX counts a
      process as lost, and ends the others.
    initialization_timeout: Seconds to wait for the other processes. Then JAX
      ends this one.

  Returns:
    The processes of the program.

  Raises:
    ValueError: An argument or a variable is invalid, or some of the values are
      given and others not found.
    RuntimeError: JAX has started its devices already, or cannot open the
      coordinator's port.

  Example:
    >>> import flaxshard as fs
    >>> fs.initialize(num_processes=1).num_processes
    1

  References:
    https://docs.jax.dev/en/latest/multi_process.html
  """
  heartbeat_timeout = checks.number(
    "heartbeat_timeout", heartbeat_timeout, above=0, below=1e6
  )
  initialization_timeout = checks.number(
    "initialization_timeout", initialization_timeout, above=0, below=1e6
  )
  found = cluster_lib.find(
    os.environ, coordinator_address, num_processes, process_id
  )
  timeouts: dict[str, Any] = {
    "heartbeat_timeout_seconds": math.ceil(heartbeat_timeout),
    "initialization_timeout": math.ceil(initialization_timeout),
  }
  if jax.distributed.is_initialized():
    if found.num_processes == 1 or not found.coordinator_address:
      found = _existing("jax.distributed.initialize was called before")
  elif found == cluster_lib.Cluster() and cluster_lib.has_tpu(os.environ):
    # Not a virtual machine of Google's cloud: one process.
    with contextlib.suppress(ValueError):
      jax.distributed.initialize(**timeouts)
      found = _existing("Cloud TPU, by JAX's own detection")
  elif found.num_processes > 1:
    _connect(found, timeouts)
  if found.num_processes == 1:
    _log.info("one process: %s", found.source)
    return found
  multihost.set_process(found.process_id, found.num_processes)
  failures.watch()
  return found


def _connect(found: cluster_lib.Cluster, timeouts: dict[str, Any]) -> None:
  address = found.coordinator_address
  gpus = found.local_device_ids
  who = f"process {found.process_id} of {found.num_processes}"
  where = address or "the address that JAX has chosen"
  _log.info(
    "%s, coordinator %s%s: %s",
    who,
    address or "chosen by JAX",
    f", local devices {', '.join(map(str, gpus))}" if gpus else "",
    found.source,
  )
  bind_address = None
  if address is not None and address.startswith("127.0.0.1:"):
    # All processes are on this machine: nothing else can reach the port.
    bind_address = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", address)
  notice = threading.Timer(
    _NOTICE_SECONDS,
    _log.warning,
    (
      f"{who} waits for the others at {where}, at most "
      f"{timeouts['initialization_timeout']} s",
    ),
  )
  notice.daemon = True
  notice.start()
  try:
    jax.distributed.initialize(
      address,
      found.num_processes,
      found.process_id,
      cluster_detection_method=found.detection_method,
      coordinator_bind_address=bind_address,
      **timeouts,
    )
  finally:
    notice.cancel()
  if found.detection_method != "deactivate" or gpus:
    cluster_lib.use_devices(gpus)


def _existing(source: str) -> cluster_lib.Cluster:
  # The first time it starts JAX's devices: JAX has no other public name for the
  # two numbers.
  index, count = multihost.process_index(), multihost.process_count()
  _log.info("process %d of %d: %s", index, count, source)
  return cluster_lib.Cluster(None, count, index, source=source)
