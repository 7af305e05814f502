"""The devices of a run, and the worker that this process is.

With `AGN(transport="store")` each process is a worker: a JAX world of its own,
which nothing but commits connects with the others. Every other run has one
worker, which may have many processes.
"""

from __future__ import annotations

from collections.abc import Sequence
import contextlib
import dataclasses
import logging
import math
import operator
import os
from typing import Any

import jax
import ml_collections

from flaxshard import wrappers as wrappers_lib
from flaxshard.core import checks
from flaxshard.core import multihost
from flaxshard.partitioning import compile_only
from flaxshard.partitioning import device_mesh
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.partitioning.topology import Topology
from flaxshard.processes import cluster
from flaxshard.strategy.strategy import Strategy

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Rank:
  """The worker that this process is.

  A run of N workers is divided like one of N replicas; see `config_of_worker`.

  Attributes:
    worker_id: Index of the worker, from 0.
    num_workers: Number of workers.
    start_timeout: Seconds that the workers wait for each other at the start.
  """

  worker_id: int = 0
  num_workers: int = 1
  start_timeout: float = 300.0


def folder_of_worker(workdir: str, worker_id: int) -> str:
  """Returns the folder of a worker's checkpoints and metrics.

  Args:
    workdir: The folder of the run, which is that of worker 0.
    worker_id: Index of the worker.

  Example:
    >>> folder_of_worker("run", 2)
    'run/workers/2'
  """
  if not worker_id:
    return workdir
  return os.path.join(workdir, "workers", str(worker_id))


def has_workers(config: Any) -> bool:
  """Returns whether a run has workers: whether its center is in a store.

  Args:
    config: A checked config.
  """
  wrappers = wrappers_lib.from_config(config.wrappers)
  return any(w.reduces == "store" for w in wrappers)


def config_of_worker(config: Any, num_workers: int) -> Any:
  """Returns the config of a run of one worker like each of several.

  `batch_size`, `mesh.replica` and `mesh.virtual_devices` of a config are those
  of all workers, and each gets an equal share.

  Args:
    config: A checked config.
    num_workers: Number of workers.

  Raises:
    ValueError: A field cannot be divided equally.
  """
  checks.integer("num_processes", num_workers, minimum=1)
  shares = {}
  for path in ("batch_size", "mesh.replica", "mesh.virtual_devices"):
    total = operator.attrgetter(path)(config)
    # -1 uses the devices of each worker.
    if total != -1 and total % num_workers:
      raise ValueError(
        f"config.{path}={total} must be a multiple of the {num_workers} "
        "workers: each gets an equal share."
      )
    shares[path] = total if total == -1 else total // num_workers
  config = ml_collections.ConfigDict(config.to_dict())
  config.update_from_flattened_dict(shares)
  return config.lock()


def find_rank(
  config: Any,
  worker_id: int | None = None,
  num_workers: int | None = None,
  start_timeout: float = 300.0,
) -> Rank:
  """Returns the worker that this process is.

  Call it before JAX starts its devices: with several workers on a machine, each
  uses its own GPUs.

  Args:
    config: A checked config.
    worker_id: Index of the worker; None: as found in the environment, in the
      variables of JAX, torchrun, Slurm, Open MPI or Kubernetes.
    num_workers: Number of workers; None: as found in the environment.
    start_timeout: Seconds that the workers wait for each other at the start.

  Raises:
    ValueError: The processes are connected by JAX, the config has no AGN
      with a center in a store, or an index or a number is wrong or missing.
  """
  if not has_workers(config):
    if worker_id is not None or num_workers is not None:
      raise ValueError(
        f"worker_id={worker_id!r} and num_workers={num_workers!r} need an AGN "
        "with transport='store' in config.wrappers: without it, the processes "
        "are one JAX program."
      )
    return Rank()
  if jax.distributed.is_initialized():
    raise ValueError(
      "config.wrappers: with transport='store', AGN's workers are not "
      "connected by JAX. Leave out flaxshard.initialize() and "
      "jax.distributed.initialize()."
    )
  found = cluster.find(
    os.environ,
    num_processes=num_workers,
    process_id=worker_id,
    needs_coordinator=False,
  )
  if found.local_device_ids is not None:
    cluster.use_devices(found.local_device_ids)
  rank = Rank(found.process_id, found.num_processes, start_timeout)
  # One worker may be a mistake: each of N is started with --num_processes=N.
  level = logging.WARNING if rank.num_workers == 1 else logging.INFO
  message = "worker %d of %d: %s"
  _log.log(level, message, rank.worker_id, rank.num_workers, found.source)
  return rank


def create_strategy(config: Any, topology: str | None = None) -> Strategy:
  """Returns the strategy of a checked config, of one worker if it has several.

  Call it before anything else uses JAX: the number of virtual devices cannot be
  changed later.

  Args:
    config: A checked config; see `config_of_worker`.
    topology: Name of devices that need not exist, such as `"v5e:2x4"`; see
      `Topology.named`. JAX starts none then. None: the devices of JAX.

  Raises:
    ValueError: There are too few devices, `batch_size` is not a multiple of the
      number of replicas, JAX has started without the virtual devices, or there
      is no such topology.
  """
  if topology is not None:
    named = Topology.named(topology)
    assert named.devices is not None
    return strategy_of(config, named.devices.ravel().tolist(), named)
  if config.mesh.virtual_devices:
    _use_virtual_devices(config.mesh.virtual_devices)
  devices = compile_only.all_devices()
  strategy = strategy_of(config, devices)
  _log.info(
    "JAX %s, process %d of %d, %d of %d %s devices, %r",
    jax.__version__,
    jax.process_index(),
    jax.process_count(),
    strategy.mesh.size,
    len(devices),
    devices[0].platform,
    strategy,
  )
  return strategy


def strategy_of(
  config: Any, devices: Sequence[Any], topology: Topology | None = None
) -> Strategy:
  """Returns the strategy of a config over the first of some devices.

  Args:
    config: A checked config. `mesh.virtual_devices` is not used.
    devices: The devices.
    topology: The topology of all of them; None: that of JAX's devices.

  Raises:
    ValueError: As in `create_strategy`.
  """
  mesh = config.mesh
  logical_field, logical_count = "logical_devices", mesh.logical_devices
  if mesh.axes:
    logical_field = "axes"
    logical_count = math.prod(dict(mesh.axes).values())
  # 0 if the logical devices of one replica do not fit.
  fitting = len(devices) // logical_count
  replicas: int = fitting if mesh.replica == -1 else mesh.replica
  used = replicas * logical_count
  if not 0 < used <= len(devices):
    raise ValueError(
      f"config.mesh.replica={mesh.replica} with config.mesh.{logical_field}="
      f"{mesh[logical_field]!r} needs {max(replicas, 1) * logical_count} "
      f"devices; there are {len(devices)}."
    )
  if config.batch_size % replicas:
    raise ValueError(
      f"config.batch_size={config.batch_size} must be a multiple of the "
      f"{replicas} replicas of config.mesh.replica={mesh.replica}."
    )
  # With prime factors as axes, every split has a PartitionSpec.
  axes = dict(mesh.axes) or device_mesh.prime_axes(logical_count)
  shape = {mesh_lib.REPLICA: replicas, **axes}
  if used < len(devices):
    return Strategy(devices=devices[:used], mesh_shape=shape)
  # With all devices, the mesh follows the topology of the network.
  return Strategy(topology, mesh_shape=shape)


def _use_virtual_devices(count: int) -> None:
  """Makes JAX start with CPU devices, so many over all processes.

  GPUs and TPUs are used instead where there are any.
  """
  # Asked for otherwise, the number of processes would start JAX.
  connected = jax.distributed.is_initialized()
  processes = multihost.process_count() if connected else 1
  if count % processes:
    raise ValueError(
      f"config.mesh.virtual_devices={count} must be a multiple of the "
      f"{processes} processes: each process gets an equal share."
    )
  # JAX raises if it has started already, perhaps with the right number.
  with contextlib.suppress(RuntimeError):
    jax.config.update("jax_num_cpu_devices", count // processes)
  devices = compile_only.all_devices()
  if devices[0].platform != "cpu":
    _log.warning(
      "config.mesh.virtual_devices=%d is not used: there are %d %s devices; "
      "JAX_PLATFORMS=cpu runs on virtual devices",
      count,
      len(devices),
      devices[0].platform,
    )
  elif len(devices) != count:
    raise ValueError(
      f"config.mesh.virtual_devices={count}: JAX has started with "
      f"{len(devices)} cpu devices already."
    )
