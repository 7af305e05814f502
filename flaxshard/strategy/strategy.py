"""Strategy: replicas, each on its logical devices, as one JAX mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
import functools
from typing import Any

import jax

from flaxshard.data import distribute
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.partitioning.device_assignment import DeviceAssignment
from flaxshard.replicas import values
from flaxshard.replicas.values import ValueContext
from flaxshard.state import describe
from flaxshard.strategy import logical_devices
from flaxshard.strategy import run as run_lib
from flaxshard.strategy import run_steps as run_steps_lib

PyTree = Any

P = jax.sharding.PartitionSpec


class Strategy:
  """TPUStrategy's model of the world, on one `jax.sharding.Mesh`.

  A strategy has replicas, which each see a part of every batch, and each
  replica has logical devices, over which tensors can be split. `Strategy()` is
  one replica per device.

  Args:
    device_assignment: Which devices make which replica; the mesh has exactly
      its order.
    devices: The devices to use, in this order; None: all of them, those of a
      replica next to each other, slices outermost.
    mesh_shape: Names and sizes of the mesh's axes, such as `{"replica": 4,
      "model": 2}`; one may be -1, what is left. Without it the logical devices
      of an assignment have an axis for each prime factor of their number:
      `m0`, `m1`, ...
    axis_type: The type of the mesh's axes.

  Attributes:
    mesh: The mesh, the axis `"replica"` first.
    device_assignment: As it was given.

  Raises:
    ValueError, TypeError: The arguments do not fit each other or the devices.

  Example:
    >>> strategy = Strategy(mesh_shape={"replica": -1, "model": 1})
    >>> strategy.num_replicas_in_sync == jax.device_count()
    True
    >>> losses = strategy.run(lambda x: x * 2, args=(1.5,))
    >>> float(strategy.reduce("mean", losses))
    3.0

  References:
    `tf.distribute.TPUStrategy`.
  """

  def __init__(
    self,
    device_assignment: DeviceAssignment | None = None,
    *,
    devices: Sequence[Any] | None = None,
    mesh_shape: Mapping[str, int] | None = None,
    axis_type: jax.sharding.AxisType = jax.sharding.AxisType.Auto,
  ):
    self.device_assignment = device_assignment
    self.mesh = mesh_lib.create(
      device_assignment, devices, mesh_shape, axis_type
    )

  def __repr__(self) -> str:
    return (
      f"Strategy({', '.join(f'{k}={v}' for k, v in self.mesh.shape.items())})"
    )

  @property
  def num_replicas_in_sync(self) -> int:
    """The number of replicas."""
    return self.mesh.shape[mesh_lib.REPLICA]

  @property
  def num_logical_devices(self) -> int:
    """The number of logical devices of each replica."""
    return mesh_lib.num_logical_devices(self.mesh)

  @property
  def num_hosts(self) -> int:
    """The number of processes whose devices are in the mesh."""
    return len({d.process_index for d in self.mesh.devices.flat})

  @property
  def num_replicas_per_host(self) -> int:
    """The number of replicas of a host; 1 where a replica spans several."""
    return max(self.num_replicas_in_sync // self.num_hosts, 1)

  @property
  def waits(self) -> bool:
    """Whether each step is waited for: on several virtual CPU devices.

    With many steps in flight XLA's CPU runtime deadlocks (JAX 0.10.2), so that
    a loop around `jax.jit` should wait too.
    """
    devices = self.mesh.devices
    return devices.size > 1 and devices.flat[0].platform == "cpu"

  def run(
    self,
    fn: Callable[..., PyTree],
    args: Sequence[PyTree] = (),
    kwargs: Mapping[str, PyTree] | None = None,
  ) -> PyTree:
    """Runs a function once on each replica, all in one compiled program.

    A TrainState is mirrored: every replica sees all of it, but for the leaves
    that are a replica's own (`PerReplica` fields, leaves of wrapper states that
    say so). A `PerReplica`, and an array that is sharded over the mesh axis
    `"replica"`, such as a batch from `distribute_dataset`, arrive as this
    replica's part. Anything else is mirrored, NumPy arrays too.

    Inside, `get_replica_context()` has collectives, and
    `TrainState.apply_gradients` averages gradients over the replicas. Over its
    logical devices a replica is a program for `jax.jit`: annotations hold, XLA
    does the rest.

    Args:
      fn: The function; compiled once, and again for other structures, shapes
        or shardings of the arguments.
      args: Its positional arguments, trees of arrays.
      kwargs: Its keyword arguments, trees of arrays.

    Returns:
      What `fn` returns: a TrainState as one, which must come out the same on
      all replicas; every other array as a `PerReplica`.

    Raises:
      TypeError: An argument or a result is not an array, or an argument is
        traced: `run` is called outside of `jax.jit` and of `run`.
      ValueError: An argument is sharded on another mesh, or was donated; a
        `PerReplica` has another number of replicas; a TrainState would not
        come out the same on all replicas.

    Example:
      >>> strategy = Strategy()
      >>> out = strategy.run(lambda x: {"twice": 2 * x}, args=(3.0,))
      >>> len(out["twice"]) == strategy.num_replicas_in_sync
      True
    """
    if isinstance(args, (str, Mapping)) or not isinstance(args, Sequence):
      raise TypeError(f"run: args must be a tuple of arguments, got {args!r}.")
    if not isinstance(kwargs, (Mapping, type(None))):
      raise TypeError(
        f"run: kwargs must be a dict of arguments, got {kwargs!r}"
      )
    return self._compiled(fn)(*args, **(kwargs or {}))

  def jit(
    self,
    fn: Callable[..., PyTree],
    *,
    donate_argnums: int | Sequence[int] = (),
  ) -> Callable[..., PyTree]:
    """Returns what `run` compiles, to be called many times.

    Args:
      fn: As in `run`.
      donate_argnums: Which positional arguments, such as the state, may be
        overwritten.

    Returns:
      A function of the arguments of `fn`. Its `lower(*args)` gives the program,
      as that of `jax.jit` does, also for `jax.ShapeDtypeStruct`s.

    Raises:
      ValueError: `donate_argnums` are no positions of arguments; in a call, an
        argument that was donated to an earlier one.
    """
    if isinstance(donate_argnums, int):
      donate_argnums = (donate_argnums,)
    if any(type(i) is not int or i < 0 for i in donate_argnums):
      raise ValueError(
        "jit: donate_argnums must be positions of arguments, 0 or more, got "
        f"{donate_argnums!r}."
      )
    return self._compiled(fn, tuple(donate_argnums))

  def run_steps(
    self,
    step_fn: Callable[..., PyTree],
    state: PyTree,
    batches: PyTree,
    *,
    reduce: PyTree = None,
    donate_state: bool = False,
  ) -> tuple[PyTree, PyTree]:
    """Runs several steps in one program, a loop on the device.

    Args:
      step_fn: `step_fn(state, batch)` returns the next state, or `(state,
        outputs)`; it is run on each replica as in `run`.
      state: The TrainState.
      batches: A list of batches, or one tree of arrays `[steps, ...]`; sharded
        over replicas as in `run`. A `PerReplica` is `[replicas, steps, ...]`.
      reduce: What is done with the outputs of the last step: `"sum"`, `"mean"`
        over the replicas, or None, which returns them as `PerReplica`; or a
        dict of these by output.
      donate_state: Whether the state may be overwritten.

    Returns:
      `(state, outputs)`; outputs is None if `step_fn` returns only a state.

    Raises:
      ValueError: No batches, or batches whose number of steps differs; a step
        that changes the shape, dtype or structure of the state; an unknown
        reduction.

    Example:
      >>> import flaxshard as fs, numpy as np, optax
      >>> strategy = fs.Strategy()
      >>> state = fs.TrainState.create(
      ...     apply_fn=None, params={"w": np.ones(())}, tx=optax.sgd(0.1),
      ...     strategy=strategy)
      >>> step = lambda state, x: state.minimize(lambda p: p["w"] * x)
      >>> state, loss = strategy.run_steps(
      ...     step, state, np.ones(5), reduce="mean")
      >>> round(float(state.params["w"]), 6), round(float(loss), 6)
      (0.5, 0.6)
    """
    _check_function("step_fn", step_fn)
    batches = run_steps_lib.stack(batches)
    loop = run_steps_lib.create(step_fn, reduce)
    donate_argnums = (0,) if donate_state else ()
    return self._compiled(loop, donate_argnums)(state, batches)

  def reduce(
    self, reduce_op: str, value: PyTree, axis: int | None = None
  ) -> PyTree:
    """Combines the replicas' values into one.

    Args:
      reduce_op: `"sum"` or `"mean"`. The mean of integers is float32.
      value: A tree of `PerReplica`; under `"mean"` also of arrays, which are
        the same on all replicas and stay as they are.
      axis: A dimension of a replica's value that is reduced too, such as the
        batch; None: none is.

    Returns:
      A tree of arrays.

    Raises:
      ValueError: Another `reduce_op`, the sum of a value that is not
        `PerReplica`, or no such axis.

    Example:
      >>> strategy = Strategy(devices=jax.devices()[:1])
      >>> ids = strategy.distribute_values_from_function(
      ...     lambda context: context.replica_id_in_sync_group + 1)
      >>> int(strategy.reduce("sum", ids))
      1
    """
    return values.reduce(self.mesh, reduce_op, value, axis)

  def gather(self, value: PyTree, axis: int) -> PyTree:
    """Concatenates the replicas' values along one of their dimensions.

    Args:
      value: A tree of `PerReplica`.
      axis: The dimension of a replica's value.

    Returns:
      A tree of arrays.

    Raises:
      ValueError: A value is not `PerReplica`, or has no such axis.
    """
    return values.gather(self.mesh, value, axis)

  def local_results(self, value: PyTree) -> tuple[PyTree, ...]:
    """Returns the values of this process's replicas, in order.

    Args:
      value: A tree of `PerReplica`, or of arrays, which are the same on all.

    Returns:
      A tree like `value` for each replica that has a device in this process;
      the arrays are on the devices of their replica.
    """
    return values.local_results(self.mesh, value)

  def distribute_values_from_function(
    self, value_fn: Callable[[ValueContext], PyTree]
  ) -> PyTree:
    """Makes a value of its own for each replica.

    Args:
      value_fn: Returns a tree of arrays, for a context that has
        `replica_id_in_sync_group` and `num_replicas_in_sync`. It is called for
        the replicas of this process.

    Returns:
      A tree of `PerReplica`.

    Raises:
      ValueError: The trees differ between replicas.

    Example:
      >>> import numpy as np
      >>> strategy = Strategy()
      >>> ids = strategy.distribute_values_from_function(
      ...     lambda context: np.int32(context.replica_id_in_sync_group))
      >>> int(ids[0])
      0
    """
    return values.from_function(self.mesh, value_fn)

  def distribute_dataset(
    self, dataset: Iterable[PyTree], **options: Any
  ) -> distribute.DistributedDataset:
    """Feeds batches to the replicas, while a thread reads ahead.

    Args:
      dataset: Global batches: trees of arrays `[batch, ...]`; of several
        processes each gives its own part.
      **options: `prefetch`, `batch_size`, `mask`, `drop_remainder`, `bucket`,
        `bucket_dims`, `spec`, as `data.distribute.distribute_dataset` has
        them.

    Returns:
      An iterable of batches, split over the replicas. A short batch is padded,
      and `batch["mask"]` says which examples are real.

    Raises:
      ValueError, TypeError: An option that cannot be.

    Example:
      >>> import numpy as np
      >>> strategy = Strategy()
      >>> n = strategy.num_replicas_in_sync
      >>> batches = [{"x": np.ones(2 * n)}, {"x": np.ones(n)}]
      >>> for batch in strategy.distribute_dataset(batches):
      ...   print(float(batch["mask"].mean()))
      1.0
      0.5
    """
    return distribute.distribute_dataset(self.mesh, dataset, **options)

  def distribute_datasets_from_function(
    self,
    dataset_fn: Callable[[distribute.InputContext], Iterable[PyTree]],
    **options: Any,
  ) -> distribute.DistributedDataset:
    """Feeds what a function makes for each process; one replica's batches.

    Args:
      dataset_fn: Gets an `InputContext`, returns the batches of its pipeline,
        `context.get_per_replica_batch_size(global_batch_size)` examples each.
      **options: As for `distribute_dataset`.

    Returns:
      An iterable of batches, as of `distribute_dataset`.
    """
    return distribute.distribute_datasets_from_function(
      self.mesh, dataset_fn, **options
    )

  def shard_batch(self, batch: PyTree, spec: PyTree = None) -> PyTree:
    """Splits one batch over the replicas, as it is.

    Args:
      batch: A tree of arrays `[batch, ...]`; of several processes each gives
        its own part.
      spec: A `PartitionSpec`, or a dict of them by path, to split it over
        logical devices too; None: `PartitionSpec("replica")`.

    Returns:
      A tree of arrays on the mesh.

    Raises:
      ValueError: A leaf cannot be divided so; the message names it.
    """
    spec = P(mesh_lib.REPLICA) if spec is None else spec
    return distribute.shard_batch(self.mesh, batch, spec)

  def describe(self, state: PyTree) -> describe.Description:
    """Prints what lies where, with bytes per device.

    Args:
      state: A TrainState, or any tree of arrays.

    Returns:
      What it printed; a notebook shows it as a coloured grid.
    """
    description = describe.describe(state)
    print(description)
    return description

  split_to_logical_devices = logical_devices.split_to_logical_devices
  replicate_to_logical_devices = logical_devices.replicate_to_logical_devices
  assign_to_logical_device = logical_devices.assign_to_logical_device
  on_logical_device = logical_devices.on_logical_device

  def _compiled(
    self, fn: Callable[..., PyTree], donate_argnums: tuple[int, ...] = ()
  ) -> Callable[..., PyTree]:
    _check_function("fn", fn)
    return _compile(self.mesh, fn, donate_argnums, self.waits)


@functools.lru_cache(maxsize=256)
def _compile(
  mesh: jax.sharding.Mesh,
  fn: Any,
  donate_argnums: tuple[int, ...],
  waits: bool,
) -> Callable[..., PyTree]:
  return run_lib.compile(mesh, fn, donate_argnums, waits)


def _check_function(argument: str, fn: Any) -> None:
  if not callable(fn):
    raise TypeError(f"{argument} must be a function, got {fn!r}.")
  try:
    hash(fn)
  except TypeError as e:
    raise TypeError(
      f"{argument} must be hashable, as functions are: {e}."
    ) from e
