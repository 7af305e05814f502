"""Finds the processes of a program from arguments and environment variables."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Cluster:
  """The processes of a program, as one of them sees them.

  Attributes:
    coordinator_address: `"host:port"` of the coordination service, which
      process 0 runs; None for one process.
    num_processes: Number of processes.
    process_id: Index of this process, from 0.
    local_device_ids: The GPUs of the machine that this process uses; None for
      all of them.
    source: Where the values come from, for the log.
  """

  coordinator_address: str | None = None
  num_processes: int = 1
  process_id: int = 0
  local_device_ids: tuple[int, ...] | None = None
  source: str = ""
