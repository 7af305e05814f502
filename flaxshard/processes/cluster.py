"""Finds the processes of a program from arguments and environment variables."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import Any

from flaxshard.core import checks
from flaxshard.processes import launchers


@dataclasses.dataclass(frozen=True)
class Cluster:
  """The processes of a program, as one of them sees them.

  Attributes:
    coordinator_address: `"host:port"` of JAX's coordination service, which
      process 0 runs. None for one process, and where JAX finds it (Cloud TPU).
    num_processes: Number of processes.
    process_id: Index of this process, from 0.
    local_device_ids: Indices of the machine's GPUs that this process uses; None
      for all that it sees.
    source: Where the values were found, for the log.
  """

  coordinator_address: str | None = None
  num_processes: int = 1
  process_id: int = 0
  local_device_ids: tuple[int, ...] | None = None
  source: str = "no cluster variables are set"


# The flag and JAX's variable of each value. JAX reads the first one only.
_VARIABLES = {
  "coordinator_address": "JAX_COORDINATOR_ADDRESS",
  "num_processes": "JAX_NUM_PROCESSES",
  "process_id": "JAX_PROCESS_ID",
}
# Those of launchers that say where the coordinator is, and nothing else.
_COORDINATOR_VARIABLES = (
  "MASTER_ADDR",
  "MASTER_PORT",
  "SLURM_JOB_ID",
  "SLURM_STEP_NODELIST",
  "JAX_COORDINATOR_ADDRESS",
)


def find(
  environ: Mapping[str, str],
  coordinator_address: str | None = None,
  num_processes: int | None = None,
  process_id: int | None = None,
  *,
  num_tpu_hosts: int = 0,
  needs_coordinator: bool = True,
) -> Cluster:
  """Returns the processes of this program.

  Each of the three values is taken from the first of these that has it: the
  arguments, JAX's variables, torchrun, Slurm, Open MPI, Kubernetes, Cloud TPU.
  Two launchers are never combined, but a launcher completes what the arguments
  and JAX's variables leave open.

  Args:
    environ: The environment variables. Empty ones count as not set.
    coordinator_address: `"host:port"` of process 0.
    num_processes: Number of processes.
    process_id: Index of this process, from 0.
    num_tpu_hosts: Hosts of the Cloud TPU slices that this machine belongs to; 0
      without TPUs.
    needs_coordinator: Whether JAX is to connect the processes. If not, the
      other two values are enough, and `coordinator_address` is not read: so it
      is for workers that commit over the network of the hosts.

  Raises:
    ValueError: A value is not allowed, or some of the values are found and
      others are not. The message names the missing variables.

  Example:
    >>> find({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node1",
    ...       "MASTER_PORT": "29500"}).coordinator_address
    'node1:62268'
  """
  environ = {name: value for name, value in environ.items() if value.strip()}
  variables = dict(_VARIABLES)
  if not needs_coordinator:
    del variables["coordinator_address"]
  arguments = {
    "coordinator_address": coordinator_address,
    "num_processes": num_processes,
    "process_id": process_id,
  }
  given: dict[str, Any] = {}
  names: list[str] = []
  for field, variable in variables.items():
    if arguments[field] is not None:
      given[field] = arguments[field]
      names.append(field)
    elif variable in environ:
      given[field] = environ[variable]
      if field != "coordinator_address":
        given[field] = launchers.integer(environ, variable)
      names.append(variable)
  if len(given) == len(variables) or given.get("num_processes") == 1:
    return _create(environ, given, f"given by {', '.join(names)}")

  half_set: list[launchers.Found] = []
  notes: list[str] = []
  for find_launcher in launchers.ALL:
    found = find_launcher(environ)
    if isinstance(found, str):
      notes.append(found)
    elif found is None:
      continue
    elif found.values.get("num_processes") == 1:
      # One task says nothing about processes that are given otherwise.
      if not given:
        return Cluster(source=f"{found.source} started one process")
    elif {*found.values, *given} >= {*variables}:
      source = (
        f"started by {found.source} ({', '.join(found.variables)} are set)"
      )
      if given:
        used = [field for field in variables if field not in given]
        source = (
          f"given by {', '.join(names)}; {', '.join(used)} from {found.source}"
        )
      return _create(
        environ, {**found.values, **given}, source, found.local_device_ids
      )
    else:
      half_set.append(found)

  if num_tpu_hosts > 1 and not given:
    if not needs_coordinator:
      raise ValueError(
        f"this machine is one of {num_tpu_hosts} hosts of a Cloud TPU, which "
        "JAX alone can number: set num_processes (--num_processes or "
        "JAX_NUM_PROCESSES) and process_id (--process_id or JAX_PROCESS_ID)."
      )
    return Cluster(
      num_processes=num_tpu_hosts,
      source=f"Cloud TPU with {num_tpu_hosts} hosts, by JAX's own detection",
    )
  if given:
    missing = [
      f"{field} (--{field} or {variables[field]})"
      for field in variables
      if field not in given
    ]
    have = ", ".join(
      f"{name}={value!r}"
      for name, value in zip(names, given.values(), strict=True)
    )
    raise ValueError(f"{have} is set, but not {', '.join(missing)}.")
  if half_set and num_tpu_hosts != 1:
    found = half_set[0]
    have = ", ".join(
      f"{name}={environ[name]!r}" for name in found.variables if name in environ
    )
    missing = [
      name
      for name in found.missing
      if needs_coordinator or name not in _COORDINATOR_VARIABLES
    ]
    raise ValueError(
      f"{have} is set, as by {found.source}, but not {', '.join(missing)}. Set "
      "all of them, or num_processes=1 for one process."
    )
  if num_tpu_hosts == 1:
    notes.append("a Cloud TPU with one host")
  return Cluster(source="; ".join(notes)) if notes else Cluster()


def _create(
  environ: Mapping[str, str],
  values: Mapping[str, Any],
  source: str,
  local_device_ids: tuple[int, ...] | None = None,
) -> Cluster:
  """Checks the values and returns the cluster."""
  count = checks.integer("num_processes", values["num_processes"], minimum=1)
  index = checks.integer("process_id", values.get("process_id", 0), minimum=0)
  if index >= count:
    raise ValueError(
      f"process_id={index} must be less than num_processes={count} ({source})."
    )
  if values.get("coordinator_address") is not None:
    split_address("coordinator_address", values["coordinator_address"])
  if count == 1:
    return Cluster(source=f"{source}: num_processes is 1")
  if "JAX_LOCAL_DEVICE_IDS" in environ:
    local_device_ids = launchers.integers(environ, "JAX_LOCAL_DEVICE_IDS")
  return Cluster(
    values.get("coordinator_address"), count, index, local_device_ids, source
  )


def split_address(argument: str, address: Any) -> tuple[str, int]:
  """Returns the host and the port of an address.

  Args:
    argument: Name of the argument, for the error message.
    address: `"host:port"`; an IPv6 host has brackets, as in `"[::1]:1234"`.

  Raises:
    ValueError: It is not such an address.

  Example:
    >>> split_address("address", "[::1]:1234")
    ('::1', 1234)
  """
  host, _, port = checks.string(argument, address).rpartition(":")
  is_bracketed = host.startswith("[") and host.endswith("]")
  if is_bracketed:
    host = host[1:-1]
  is_host = host and not set(host) & set("/[] ")
  if not is_host or (":" in host) != is_bracketed:
    raise ValueError(
      f"{argument} must be 'host:port' such as 'node1:1234' or '[::1]:1234', "
      f"got {address!r}."
    )
  if not (port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
    raise ValueError(
      f"{argument} must end with a port from 1 to 65535, got {address!r}."
    )
  return host, int(port)
