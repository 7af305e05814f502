"""Connects this process with the other processes of the program."""

from __future__ import annotations

import logging
import math

import jax

from flaxshard.core import checks
from flaxshard.processes import cluster as cluster_lib

_log = logging.getLogger(__name__)

# JAX ends a process with SIGABRT when its own heartbeat times out: later than
# flaxshard's heartbeat, which names the lost process.
_JAX_HEARTBEAT_MARGIN = 30.0


def initialize(
  coordinator_address: str | None = None,
  num_processes: int | None = None,
  process_id: int | None = None,
  *,
  heartbeat_timeout: float = 60.0,
  initialization_timeout: float = 300.0,
) -> cluster_lib.Cluster:
  """Connects this process with the other processes of the program.

  Call it before anything else uses JAX. With one process it does nothing.

  Args:
    coordinator_address: `"host:port"` of process 0.
    num_processes: Number of processes.
    process_id: Index of this process, from 0.
    heartbeat_timeout: Seconds without a sign of life after which a process
      counts as lost.
    initialization_timeout: Seconds to wait for the other processes.

  Returns:
    The processes of the program.
  """
  checks.number("heartbeat_timeout", heartbeat_timeout, above=0)
  checks.number("initialization_timeout", initialization_timeout, above=0)
  if coordinator_address is None or num_processes is None or process_id is None:
    return cluster_lib.Cluster(source="one process")
  found = cluster_lib.Cluster(
    coordinator_address, num_processes, process_id, source="the arguments"
  )
  if num_processes > 1 and not jax.distributed.is_initialized():
    # Has no effect on other platforms.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
      coordinator_address,
      num_processes,
      process_id,
      initialization_timeout=math.ceil(initialization_timeout),
      heartbeat_timeout_seconds=math.ceil(
        heartbeat_timeout + _JAX_HEARTBEAT_MARGIN
      ),
    )
  _log.info(
    "process %d of %d: %s", process_id, max(num_processes, 1), found.source
  )
  return found
