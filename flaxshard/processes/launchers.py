"""Reads the environment variables of torchrun, Slurm, Open MPI and Kubernetes.

References:
  https://docs.pytorch.org/docs/stable/elastic/run.html
  https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
  https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html
  https://kubernetes.io/docs/concepts/workloads/controllers/job/
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import re
from typing import Any


@dataclasses.dataclass(frozen=True)
class Found:
  """The variables of a launcher that are set.

  Attributes:
    source: The launcher, for the log and for error messages.
    values: `coordinator_address`, `num_processes` and `process_id`, as far as
      the variables have them.
    variables: Names of the variables that were read.
    missing: Names of the variables that the missing values need.
    local_device_ids: The GPUs of this process; None for all that it sees.
  """

  source: str
  values: Mapping[str, Any]
  variables: tuple[str, ...]
  missing: tuple[str, ...] = ()
  local_device_ids: tuple[int, ...] | None = None


def integer(environ: Mapping[str, str], name: str) -> int:
  """Returns the value of a variable that is an integer, not below 0."""
  value = environ[name].strip()
  if not (value.isascii() and value.isdigit()):
    raise ValueError(
      f"{name}={environ[name]!r} must be an integer of at least 0."
    )
  return int(value)


def integers(environ: Mapping[str, str], name: str) -> tuple[int, ...]:
  """Returns the value of a variable such as `"0,1"`."""
  parts = [part.strip() for part in environ[name].split(",")]
  if not all(part.isascii() and part.isdigit() for part in parts):
    raise ValueError(
      f"{name}={environ[name]!r} must be integers with commas between them."
    )
  return tuple(map(int, parts))


def _port(environ: Mapping[str, str], number: int) -> int:
  """Returns the coordinator's port for a number that all processes know.

  As JAX chooses it for Slurm: above the ports that Linux gives to outgoing
  connections, which end at 60999.
  """
  if "JAX_COORDINATOR_PORT" in environ:
    return integer(environ, "JAX_COORDINATOR_PORT")
  return 2**16 - 2**12 + number % 2**12


def _address(host: str, port: int) -> str:
  return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _local_device_ids(
  environ: Mapping[str, str], local_id: int, local_count: int
) -> tuple[int, ...] | None:
  """Returns this process's part of the GPUs of its machine.

  Args:
    environ: The environment variables.
    local_id: Index of the process among those of its machine.
    local_count: Number of processes on its machine.
  """
  if local_count == 1 or environ.get("JAX_PLATFORMS") == "cpu":
    return None
  for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
    if name in environ:
      gpus = len(environ[name].split(","))
      if gpus < local_count:
        return None  # The launcher has given each process its own.
      if gpus % local_count:
        raise ValueError(
          f"{name}={environ[name]!r} has {gpus} GPUs, which {local_count} "
          "processes of this machine cannot share equally; set "
          "JAX_LOCAL_DEVICE_IDS in each process."
        )
      share = gpus // local_count
      return tuple(range(local_id * share, (local_id + 1) * share))
  # One GPU for each process, as JAX does it. Without GPUs it has no effect.
  return (local_id,)


def torchrun(environ: Mapping[str, str]) -> Found | None:
  """Reads the variables of torchrun, and of launchers that set the same."""
  names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
  missing = tuple(name for name in names if name not in environ)
  if len(missing) == len(names):
    return None
  values: dict[str, Any] = {}
  if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
    # torchrun's own store listens on MASTER_PORT.
    port = _port(environ, integer(environ, "MASTER_PORT"))
    values["coordinator_address"] = _address(environ["MASTER_ADDR"], port)
  if "WORLD_SIZE" in environ:
    values["num_processes"] = integer(environ, "WORLD_SIZE")
  if "RANK" in environ:
    values["process_id"] = integer(environ, "RANK")
  local = None
  if "LOCAL_RANK" in environ and "LOCAL_WORLD_SIZE" in environ:
    local = _local_device_ids(
      environ,
      integer(environ, "LOCAL_RANK"),
      integer(environ, "LOCAL_WORLD_SIZE"),
    )
  return Found("torchrun", values, names, missing, local)


# Step ids that are no step of srun: an interactive shell of salloc, the batch
# script, and what was adopted from outside (slurm/slurm.h).
_SLURM_SHELLS = {
  "4294967290": "an interactive shell",
  "4294967291": "a batch script",
  "4294967292": "an external step",
}


def slurm(environ: Mapping[str, str]) -> Found | str | None:
  """Reads the variables that srun sets in each task of a step.

  A shell of salloc and a batch script have some of these variables too, for the
  number of tasks that a step of the job would have.

  Returns:
    The variables of a step; the reason why this is no step, if Slurm's
    variables are set; None without them.
  """
  if "SLURM_JOB_ID" not in environ and "SLURM_STEP_NODELIST" not in environ:
    return None
  if "OMPI_COMM_WORLD_SIZE" in environ:
    # mpirun starts one daemon on each node with srun: those are its variables.
    return None
  step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID"))
  shell = _SLURM_SHELLS.get(step or "")
  if step is None and "SLURM_STEP_NODELIST" not in environ:
    shell = "a shell or a batch script outside of srun"
  elif "SLURM_PTY_PORT" in environ:
    shell = "a shell of srun --pty"
  if shell:
    return f"in Slurm's job, but in {shell}: srun starts a process per task"

  count = (
    "SLURM_STEP_NUM_TASKS"
    if "SLURM_STEP_NUM_TASKS" in environ
    else "SLURM_NTASKS"
  )
  names = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", count, "SLURM_PROCID")
  missing = tuple(name for name in names if name not in environ)
  values: dict[str, Any] = {}
  if "SLURM_JOB_ID" in environ and "SLURM_STEP_NODELIST" in environ:
    host = first_node(environ["SLURM_STEP_NODELIST"])
    port = _port(environ, integer(environ, "SLURM_JOB_ID"))
    values["coordinator_address"] = _address(host, port)
  if count in environ:
    values["num_processes"] = integer(environ, count)
  if "SLURM_PROCID" in environ:
    values["process_id"] = integer(environ, "SLURM_PROCID")
  return Found(
    "Slurm's srun", values, names, missing, _slurm_device_ids(environ)
  )


def first_node(node_list: str) -> str:
  """Returns the first host of a Slurm node list.

  Example:
    >>> first_node("rack[2-3]node[007-010,12]-ib,gpu-a")
    'rack2node007-ib'
  """
  # Up to the first comma outside of brackets.
  first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", node_list.strip())
  host = re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0] if first else "")
  if not re.fullmatch(r"[\w.-]+", host):
    raise ValueError(f"SLURM_STEP_NODELIST={node_list!r} has no first host.")
  return host


def _slurm_device_ids(environ: Mapping[str, str]) -> tuple[int, ...] | None:
  # With these options Slurm shows each task its own GPUs only.
  is_bound = environ.get("SLURM_GPU_BIND", "none") != "none"
  if is_bound or "SLURM_GPUS_PER_TASK" in environ:
    return None
  if "SLURM_LOCALID" not in environ:
    return None
  # Such as "2(x3),1": two tasks on each of three nodes, one on the last.
  tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
  counts: list[int] = []
  for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks):
    counts += [int(count)] * int(times or 1)
  node = integer(environ, "SLURM_NODEID") if "SLURM_NODEID" in environ else 0
  if node >= len(counts):
    return None
  return _local_device_ids(
    environ, integer(environ, "SLURM_LOCALID"), counts[node]
  )


def open_mpi(environ: Mapping[str, str]) -> Found | None:
  """Reads the variables that Open MPI's mpirun sets."""
  prefix = "OMPI_COMM_WORLD_"
  names = tuple(
    prefix + name for name in ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK")
  )
  missing = tuple(name for name in names if name not in environ)
  if len(missing) == len(names):
    return None
  if missing:
    return Found("Open MPI's mpirun", {}, names, missing)
  size, rank, local_size, local_rank = (integer(environ, n) for n in names)
  values: dict[str, Any] = {"num_processes": size, "process_id": rank}
  address, port_number = _mpirun_host(environ)
  if size == local_size:
    address = "127.0.0.1"
  if address:
    values["coordinator_address"] = _address(
      address, _port(environ, port_number)
    )
  return Found(
    "Open MPI's mpirun",
    values,
    names,
    () if address else ("JAX_COORDINATOR_ADDRESS",),
    _local_device_ids(environ, local_rank, local_size),
  )


def _mpirun_host(environ: Mapping[str, str]) -> tuple[str, int]:
  """Returns the host of mpirun, and a number that differs between programs.

  mpirun is expected to run where its first process does.
  """
  # Open MPI 4 and before: "1144127488.0;tcp://192.0.2.2,198.51.100.2:42305".
  uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
  match = re.match(r"(\d+)\.\d+;(?:tcp://([^,:]+)|tcp6://\[([^,\]]+))", uri)
  if match:
    # The lower 16 bits count the programs of one mpirun.
    return match[2] or match[3], int(match[1]) // 2**16
  # Open MPI 5: "prterun-node1-14846@1", with the process id of mpirun.
  match = re.match(
    r"prterun-(.+)-(\d+)@\d+$", environ.get("PMIX_NAMESPACE", "")
  )
  return (match[1], int(match[2])) if match else ("", 0)


def kubernetes(environ: Mapping[str, str]) -> Found | None:
  """Reads the index that Kubernetes sets in each pod of an indexed Job.

  The rest is not in a pod's environment: the manifest sets JAX_NUM_PROCESSES
  and JAX_COORDINATOR_ADDRESS.
  """
  if "JOB_COMPLETION_INDEX" not in environ:
    return None
  return Found(
    "an indexed Job of Kubernetes",
    {"process_id": integer(environ, "JOB_COMPLETION_INDEX")},
    ("JOB_COMPLETION_INDEX",),
    ("JAX_NUM_PROCESSES", "JAX_COORDINATOR_ADDRESS"),
  )


# In the order in which they are asked.
ALL: tuple[Callable[[Mapping[str, str]], Found | str | None], ...] = (
  torchrun,
  slurm,
  open_mpi,
  kubernetes,
)
