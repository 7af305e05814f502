"""What `config.mesh` asks for: a strategy, and where batches are split."""

from __future__ import annotations

from collections.abc import Mapping
import contextlib
import logging
import math
from typing import Any
import warnings

import jax
import numpy as np

from flaxshard import wrappers
from flaxshard.core import checks
from flaxshard.data import sharding
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.partitioning import partitions
from flaxshard.partitioning import specs as specs_lib
from flaxshard.state import replica_groups
from flaxshard.state.train_state import TrainState
from flaxshard.strategy.strategy import Strategy
from flaxshard.train import steps
from flaxshard.wrappers import base
from flaxshard.wrappers import stack

_log = logging.getLogger(__name__)

P = jax.sharding.PartitionSpec


def create_strategy(config: Any) -> Strategy:
  """Returns the strategy of a checked config.

  Raises:
    ValueError: There are too few devices, or `batch_size` is no multiple of the
      replicas; virtual devices, but JAX has started without them; wrappers that
      do not fit the replicas.
  """
  mesh = config.mesh
  if mesh.virtual_devices:
    _use_virtual_devices(mesh.virtual_devices)
  devices = jax.devices()
  named = dict(mesh.axes)
  logical = math.prod(named.values()) if named else mesh.logical_devices
  where = f"config.mesh.replica={mesh.replica}"
  replicas = len(devices) // logical if mesh.replica == -1 else mesh.replica
  if not 0 < replicas * logical <= len(devices):
    each = f"axes={mesh.axes!r}" if named else f"logical_devices={logical}"
    raise ValueError(
      f"{where} with config.mesh.{each} needs {max(replicas, 1) * logical} "
      f"devices; there are {len(devices)}."
    )
  if config.batch_size % replicas:
    raise ValueError(
      f"config.batch_size={config.batch_size} must be a multiple of the "
      f"{replicas} replicas of {where}."
    )
  _check_wrappers(config, replicas)
  axes = named or mesh_lib.prime_axes(logical)
  used = replicas * logical
  strategy = Strategy(
    # All of them are laid out as suits the network.
    devices=None if used == len(devices) else devices[:used],
    mesh_shape={mesh_lib.REPLICA: replicas, **axes},
  )
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


def _check_wrappers(config: Any, replicas: int) -> None:
  made = wrappers.from_config(config.wrappers)
  reducing = [base.name_of(w) for w in made if stack.reduces_gradients((w,))]
  if replicas > 1 and reducing and not config.mesh.per_replica:
    raise ValueError(
      f"config.wrappers: {', '.join(reducing)} reduces the gradients of "
      f"{replicas} replicas, which config.mesh.per_replica=False does not keep "
      "apart; set config.mesh.per_replica=True."
    )
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # they come again when the state is made
    try:
      stack.check_replicas(made, replicas)
    except ValueError as e:
      raise ValueError(f"config.wrappers: {e}") from e


def _use_virtual_devices(count: int) -> None:
  with contextlib.suppress(RuntimeError):  # JAX runs; so with as many, perhaps
    jax.config.update("jax_num_cpu_devices", count)
    jax.config.update("jax_platforms", "cpu")
  devices = jax.devices()
  if len(devices) != count or devices[0].platform != "cpu":
    raise ValueError(
      f"config.mesh.virtual_devices={count}: JAX has started with "
      f"{len(devices)} {devices[0].platform} devices already."
    )


def batch_specs(
  config: Any, strategy: Strategy, example: Mapping[str, Any]
) -> dict[str, P]:
  """Returns how each array of a batch is split, by `config.mesh.split`.

  Args:
    config: A checked config.
    strategy: Its strategy.
    example: An example without the batch dimension.

  Raises:
    ValueError: `config.mesh.split` names no array, or cannot split it.
  """
  split = dict(config.mesh.split)
  specs = {key: P(mesh_lib.REPLICA) for key in example}
  for key, pieces in split.items():
    where = f"config.mesh.split.{key}={tuple(pieces)!r}"
    if key not in example:
      raise ValueError(
        f"{where}: a batch has {', '.join(sorted(example))}."
        f"{checks.did_you_mean(key, example)}"
      )
    replicas = strategy.num_replicas_in_sync
    shape = (config.batch_size // replicas, *np.shape(example[key]))
    try:
      spec = partitions.partition_spec(strategy.mesh, shape, pieces)
    except ValueError as e:
      raise ValueError(f"{where}: {e}") from e
    specs[key] = P((mesh_lib.REPLICA, *specs_lib.axes_of(spec[0])), *spec[1:])
  return specs


def input_pipeline(strategy: Strategy) -> dict[str, int]:
  """Returns which part of each batch this process reads, and of how many."""
  return dict(
    process_index=sharding.pipeline_id(strategy.mesh),
    process_count=len(sharding.pipelines(strategy.mesh)),
  )


def init_progress(config: Any, strategy: Strategy, state: TrainState) -> Any:
  """Returns the progress of no step: of each replica, or of all together."""
  progress = jax.device_get(steps.init_progress(state))
  if config.mesh.per_replica:
    return strategy.distribute_values_from_function(lambda context: progress)
  return replicate(strategy, progress)


def replicate(strategy: Strategy, tree: Any) -> Any:
  """Returns a tree of arrays, whole on every device of the strategy."""
  sharding = jax.sharding.NamedSharding(strategy.mesh, P())
  return jax.tree.map(lambda x: mesh_lib.put(x, sharding), tree)


def jit_train_step(config: Any, strategy: Strategy, carried: Any) -> Any:
  """Returns the train step, jitted: for all replicas together, or for each.

  Args:
    config: A checked config.
    strategy: Its strategy.
    carried: The state and progress, which are donated and come back.

  Raises:
    ValueError: Groups of replicas differ, and `config.mesh.rules` splits over
      all of them.
  """
  if config.mesh.per_replica:
    plain = jax.tree.leaves(carried[0].without_wrappers())
    split = any(map(replica_groups.is_split, plain))
    note = replica_groups.note(carried[0])
    if split and note:
      raise ValueError(
        "config.mesh.rules: nothing can be split over 'replica' here. "
        f"config.wrappers: {note}"
      )
    if split:
      _log.warning(
        "config.mesh.per_replica: each replica sees the whole state. What "
        "config.mesh.rules split over 'replica' is gathered for every step."
      )
    return strategy.jit(steps.train_step, donate_argnums=(0, 1))
  jitted = jax.jit(
    steps.train_step,
    donate_argnums=(0, 1),
    # They come back as they lay, whatever XLA would like better.
    out_shardings=jax.tree.map(lambda x: x.sharding, carried),
  )
  return block_if_virtual_cpu(strategy, jitted)


def block_if_virtual_cpu(strategy: Strategy, jitted: Any) -> Any:
  """Returns a jitted function, waited for where calls would deadlock."""
  if not strategy.waits:
    return jitted

  def call(*args: Any) -> Any:
    return jax.block_until_ready(jitted(*args))

  call.lower = jitted.lower  # type: ignore[attr-defined]
  return call
