"""Builds the strategy that `config.mesh` describes, and places arrays on it."""

from __future__ import annotations

from collections.abc import Sequence
import contextlib
import logging
import math
from typing import Any

import jax

from flaxshard.core import multihost
from flaxshard.partitioning import compile_only
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.partitioning.topology import Topology
from flaxshard.strategy.strategy import Strategy

_log = logging.getLogger(__name__)


def create_strategy(config: Any, topology: str | None = None) -> Strategy:
  """Returns the strategy of a checked config, of one worker if it has several.

  Call it before anything else uses JAX: the number of virtual devices cannot be
  changed later.

  Args:
    config: A checked config; see `ranks.config_of_worker`.
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
  axes = dict(mesh.axes) or mesh_lib.prime_axes(logical_count)
  shape = {mesh_lib.REPLICA: replicas, **axes}
  if used < len(devices):
    return Strategy(devices=devices[:used], mesh_shape=shape)
  # With all devices, the mesh follows the topology of the network.
  return Strategy(topology, mesh_shape=shape)


def _use_virtual_devices(count: int) -> None:
  """Makes JAX start with CPU devices, so many over all processes.

  GPUs and TPUs are used instead where there are any.
  """
  processes = 1
  if jax.distributed.is_initialized():
    processes = multihost.process_count()
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


def replicate(strategy: Strategy, tree: Any) -> Any:
  """Returns a tree of arrays, whole on every device of the strategy.

  Args:
    strategy: The strategy of the config.
    tree: Arrays that are the same in all processes. They are not compared, so
      that no process waits for another one.
  """
  replicated = jax.sharding.NamedSharding(
    strategy.mesh, jax.sharding.PartitionSpec()
  )
  return jax.tree.map(
    lambda x: mesh_lib.put(x, replicated, compare=False), tree
  )
