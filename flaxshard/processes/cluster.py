"""Finds the processes of a program from arguments and environment variables."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import Any, NamedTuple

import jax

from flaxshard.core import checks


@dataclasses.dataclass(frozen=True)
class Cluster:
  """The processes of a program, as one of them sees them.

  Attributes:
    coordinator_address: `"host:port"` of JAX's coordination service, which
      process 0 runs. None for one process, and where JAX finds it.
    num_processes: Number of processes.
    process_id: Index of this process, from 0.
    local_device_ids: Indices of the machine's GPUs that this process uses; None
      for all that it sees.
    source: Where the values were found, for the log.
    detection_method: How JAX finds the address, as for
      `jax.distributed.initialize`.
  """

  coordinator_address: str | None = None
  num_processes: int = 1
  process_id: int = 0
  local_device_ids: tuple[int, ...] | None = None
  source: str = "no cluster variables are set"
  detection_method: str | None = "deactivate"


class _Launcher(NamedTuple):
  """The variables that a launcher sets in each process.

  Attributes:
    name: The launcher.
    method: How JAX finds the coordinator; "deactivate": flaxshard does.
    num_processes: Variable with the number of processes.
    process_id: That with the index of this process.
    local_id: That with its index among those of its machine.
    local_count: That with the number of those; for Slurm, of nodes.
  """

  name: str
  method: str
  num_processes: str
  process_id: str
  local_id: str
  local_count: str


_LAUNCHERS = (
  _Launcher(
    *("torchrun", "deactivate"),
    *("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
  ),
  # Before Slurm: mpirun starts one daemon on each node with srun.
  _Launcher(
    *("Open MPI's mpirun", "ompi"),
    *("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
  ),
  # Not SLURM_NTASKS: a batch script and a shell of salloc have it too.
  _Launcher(
    *("Slurm's srun", "slurm"),
    *("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    *("SLURM_LOCALID", "SLURM_STEP_NUM_NODES"),
  ),
)

# The variable of each argument. JAX itself reads the first one only.
_VARIABLES = {
  "coordinator_address": "JAX_COORDINATOR_ADDRESS",
  "num_processes": "JAX_NUM_PROCESSES",
  "process_id": "JAX_PROCESS_ID",
}
_POD_INDEX = "JOB_COMPLETION_INDEX"
_DEVICE_IDS = "JAX_LOCAL_DEVICE_IDS"


def find(
  environ: Mapping[str, str],
  coordinator_address: str | None = None,
  num_processes: int | None = None,
  process_id: int | None = None,
  *,
  needs_coordinator: bool = True,
) -> Cluster:
  """Returns the processes of this program.

  Each of the three values is taken from the first of these that has it: the
  arguments, JAX's variables, the index of a pod in an indexed Job of
  Kubernetes, a launcher (torchrun, Open MPI or Slurm).

  Args:
    environ: The environment variables. Empty ones count as not set.
    coordinator_address: `"host:port"` of process 0.
    num_processes: Number of processes.
    process_id: Index of this process, from 0.
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
  if num_processes is not None:
    num_processes = checks.integer("num_processes", num_processes, minimum=1)
  if process_id is not None:
    process_id = checks.integer("process_id", process_id, minimum=0)
  arguments: dict[str, Any] = {
    "coordinator_address": coordinator_address,
    "num_processes": num_processes,
    "process_id": process_id,
  }
  if not needs_coordinator:
    del arguments["coordinator_address"]
  # The name under which a value was found, and the value, by field.
  found: dict[str, tuple[str, Any]] = {}

  def read(field: str, variable: str) -> None:
    """Adds the value of a variable, if it is set and the field is not found."""
    if field not in found and variable in environ:
      is_address = field == "coordinator_address"
      value = environ[variable] if is_address else _integer(environ, variable)
      found[field] = variable, value

  for field, given in arguments.items():
    if given is not None:
      found[field] = field, given
    read(field, _VARIABLES[field])
  if "num_processes" in found:
    read("process_id", _POD_INDEX)
    name, count = found["num_processes"]
    if count == 1:
      return Cluster(source=f"{name}: num_processes is 1")

  launcher = None
  if len(found) < len(arguments):
    launcher = next((x for x in _LAUNCHERS if x.num_processes in environ), None)
  if launcher and _integer(environ, launcher.num_processes) == 1:
    if not found:
      return Cluster(source=f"{launcher.name} started one process")
    # It says nothing about processes that are given otherwise.
    launcher = None
  if launcher:
    read("num_processes", launcher.num_processes)
    read("process_id", launcher.process_id)
    if needs_coordinator and {"MASTER_ADDR", "MASTER_PORT"} <= set(environ):
      found.setdefault("coordinator_address", ("MASTER_ADDR", _master(environ)))
  if not found:
    if _POD_INDEX in environ and not has_tpu(environ):
      raise ValueError(
        f"{_POD_INDEX}={environ[_POD_INDEX]!r} is set, as in an indexed Job of "
        "Kubernetes, but not JAX_NUM_PROCESSES and JAX_COORDINATOR_ADDRESS. "
        "Set both, or JAX_NUM_PROCESSES=1 for one process."
      )
    return Cluster()

  method = "deactivate"
  if launcher and "coordinator_address" not in found:
    method = launcher.method
  missing = [
    f"{field} (--{field} or {_VARIABLES[field]})"
    for field in arguments
    if field not in found
    and (field != "coordinator_address" or method == "deactivate")
  ]
  if missing:
    have = ", ".join(f"{name}={value!r}" for name, value in found.values())
    raise ValueError(
      f"{have} is set, but not {', '.join(missing)}. Set all of them, or "
      "num_processes=1 for one process."
    )
  names = ", ".join(name for name, _ in found.values())
  source = f"{launcher.name}, {names}" if launcher else f"given by {names}"
  address = found.get("coordinator_address", ("", None))[1]
  count, index = found["num_processes"][1], found["process_id"][1]
  if index >= count:
    raise ValueError(
      f"process_id={index} must be less than num_processes={count} ({source})."
    )
  if address is not None:
    host, _, port = str(address).rpartition(":")
    if not (host and port.isascii() and port.isdigit()):
      raise ValueError(
        "coordinator_address must be 'host:port' such as 'node1:1234' or "
        f"'[::1]:1234', got {address!r}."
      )
  gpus = _local_device_ids(environ, launcher)
  return Cluster(address, count, index, gpus, source, method)


def has_tpu(environ: Mapping[str, str]) -> bool:
  """Returns whether JAX has found TPU chips on this machine.

  Args:
    environ: The environment variables, after JAX was imported, which sets one.

  Example:
    >>> has_tpu({"TPU_ML_PLATFORM": "JAX"})
    True
  """
  return environ.get("TPU_ML_PLATFORM") == "JAX"


def use_devices(ids: tuple[int, ...] | None) -> None:
  """Makes JAX start with some of the GPUs of this machine.

  Args:
    ids: Their indices; None for all.
  """
  visible = "all" if ids is None else ",".join(map(str, ids))
  # As jax.distributed.initialize does it. Without GPUs they have no effect.
  jax.config.update("jax_cuda_visible_devices", visible)
  jax.config.update("jax_rocm_visible_devices", visible)


def _integer(environ: Mapping[str, str], name: str) -> int:
  value = environ[name].strip()
  if not (value.isascii() and value.isdigit()):
    raise ValueError(
      f"{name}={environ[name]!r} must be an integer of at least 0."
    )
  return int(value)


def _master(environ: Mapping[str, str]) -> str:
  """Returns the coordinator's address from torchrun's variables."""
  # torchrun's own store listens on MASTER_PORT. As JAX does for Slurm: above
  # the ports that Linux gives to outgoing connections, which end at 60999.
  port = 2**16 - 2**12 + _integer(environ, "MASTER_PORT") % 2**12
  if "JAX_COORDINATOR_PORT" in environ:
    port = _integer(environ, "JAX_COORDINATOR_PORT")
  host = environ["MASTER_ADDR"]
  return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _local_device_ids(
  environ: Mapping[str, str], launcher: _Launcher | None
) -> tuple[int, ...] | None:
  """Returns this process's part of the GPUs of its machine.

  JAX would give each process of a launcher one GPU, and also one that is alone
  on its machine.
  """
  if _DEVICE_IDS in environ:
    ids = environ[_DEVICE_IDS].split(",")
    return tuple(_integer({_DEVICE_IDS: i}, _DEVICE_IDS) for i in ids)
  # With --gpus-per-task and --gpu-bind, Slurm shows each task its own GPUs.
  is_bound = environ.get("SLURM_GPU_BIND", "none") != "none"
  if (
    launcher is None
    or is_bound
    or not {launcher.local_id, launcher.local_count} <= set(environ)
    or "SLURM_GPUS_PER_TASK" in environ
    or environ.get("JAX_PLATFORMS") == "cpu"
  ):
    return None
  local_id = _integer(environ, launcher.local_id)
  local_count = _integer(environ, launcher.local_count)
  if launcher.method == "slurm":
    # The variable is the number of nodes.
    local_count = -(-_integer(environ, launcher.num_processes) // local_count)
  if local_count == 1:
    return None
  for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
    if name in environ:
      share = len(environ[name].split(",")) // local_count
      # With fewer GPUs, the launcher has given each process its own.
      return tuple(range(local_id * share, (local_id + 1) * share)) or None
  # One GPU for each process, as JAX does it. Without GPUs it has no effect.
  return (local_id,)
