"""Which worker of a run this process is, and its share of devices and data.

With `AGN(transport="store")` each process is a worker: a JAX world of its own,
which nothing but commits connects with the others. Every other run has one
worker, which may have many processes.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import logging
import operator
import os
from typing import Any

import jax
import ml_collections

from flaxshard import wrappers as wrappers_lib
from flaxshard.core import checks
from flaxshard.processes import cluster
from flaxshard.train import config as config_lib
from flaxshard.wrappers.agn import AGN

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


def store_agn(config: Any) -> AGN | None:
  """Returns the AGN of a config whose center is in a store, if there is one.

  Args:
    config: A checked config.
  """
  for wrapper in wrappers_lib.from_config(config.wrappers):
    if isinstance(wrapper, AGN) and wrapper.commits_to_store:
      return wrapper
  return None


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
  return config_lib.check(config)


def find(
  config: Any,
  worker_id: int | None = None,
  num_workers: int | None = None,
  start_timeout: float = 300.0,
  environ: Mapping[str, str] = os.environ,
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
    environ: The environment variables.

  Raises:
    ValueError: The processes are connected by JAX, the config has no AGN
      with a center in a store, or an index or a number is wrong or missing.
  """
  if store_agn(config) is None:
    for name, value in (("worker_id", worker_id), ("num_workers", num_workers)):
      if value is not None:
        raise ValueError(
          f"{name}={value!r} needs an AGN with transport='store' in "
          "config.wrappers: without it, the processes are one JAX program."
        )
    return Rank()
  if jax.distributed.is_initialized():
    raise ValueError(
      "config.wrappers: with transport='store', AGN's workers are not "
      "connected by JAX. Leave out flaxshard.initialize() and "
      "jax.distributed.initialize()."
    )
  found = cluster.find(
    environ,
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
