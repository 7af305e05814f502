"""Strategy: replicas and their logical devices as one JAX mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from flaxshard.core import checks
from flaxshard.data import distribute
from flaxshard.partitioning import device_mesh
from flaxshard.partitioning import logical_devices
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.partitioning.device_assignment import DeviceAssignment
from flaxshard.partitioning.topology import Topology
from flaxshard.replicas import context as replica_context
from flaxshard.replicas import operations
from flaxshard.replicas.operations import ValueContext
from flaxshard.state import describe
from flaxshard.strategy import calls
from flaxshard.strategy.program import Options

PyTree = Any


class Strategy:
  """Replicas and their logical devices, on one `jax.sharding.Mesh`.

  As in `TPUStrategy`, a strategy has replicas, each of which sees a part of
  every batch. Each replica has logical devices, over which tensors can be
  split. `Strategy()` is one replica per device.

  Args:
    device_assignment: Which devices make up which replica: the mesh has exactly
      its order. Or a `Topology`, or the name of one, such as `"v5e:2x4"`: its
      devices are ordered as with None. With a name, programs can be compiled
      for TPUs that this machine does not have; see `Topology.named`.
    devices: The devices to use, in this order. None: all devices; the devices
      of a replica are next to each other, and slices are the outermost
      dimension.
    mesh_shape: Names and sizes of the mesh axes, such as `{"replica": 4,
      "model": 2}`. One size may be -1: as many as the devices allow. None: the
      logical devices have one axis, `m0`, `m1`, ..., for each prime factor of
      their number.
    axis_type: The type of the mesh axes.

  Attributes:
    mesh: The mesh. Its first axis is `"replica"`.
    device_assignment: The `DeviceAssignment`, or None.

  Raises:
    ValueError, TypeError: The arguments do not fit each other or the devices.

  Example:
    >>> import flaxshard as fs, jax
    >>> strategy = fs.Strategy(mesh_shape={"replica": -1, "model": 1})
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
    device_assignment: DeviceAssignment | Topology | str | None = None,
    *,
    devices: Sequence[Any] | None = None,
    mesh_shape: Mapping[str, int] | None = None,
    axis_type: jax.sharding.AxisType = jax.sharding.AxisType.Auto,
  ):
    self.device_assignment = (
      device_assignment
      if isinstance(device_assignment, DeviceAssignment)
      else None
    )
    self.mesh = device_mesh.create(
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
    return self.mesh.size // self.num_replicas_in_sync

  @property
  def num_hosts(self) -> int:
    """The number of processes that have a device in the mesh."""
    return len({d.process_index for d in self.mesh.devices.flat})

  @property
  def num_replicas_per_host(self) -> int:
    """The number of replicas on a host; 1 if a replica spans several hosts."""
    # A host with a part of a replica still feeds that replica.
    return max(self.num_replicas_in_sync // self.num_hosts, 1)

  @property
  def waits(self) -> bool:
    """Whether `run` blocks until a step is done: on virtual CPU devices.

    XLA's CPU runtime deadlocks when many steps on several virtual devices are
    in flight (JAX 0.10.2). A loop around `jax.jit` should block too.
    """
    return calls.waits(self.mesh)

  def run(
    self,
    fn: Callable[..., PyTree],
    args: Sequence[PyTree] = (),
    kwargs: Mapping[str, PyTree] | None = None,
  ) -> PyTree:
    """Runs a function once on each replica, all replicas in one program.

    `fn` sees this replica's value of a `PerReplica`, and this replica's part of
    an array that is sharded over the mesh axis `"replica"`, such as a batch of
    `distribute_dataset`. It sees all of a TrainState, except for per-replica
    leaves (a `PerReplica` in a field, and such leaves of wrapper states), of
    which it sees this replica's row. It sees all of any other array.

    Inside `fn`, `get_replica_context()` has collectives over the replicas, and
    `TrainState.apply_gradients` averages gradients over them, on TPU and GPU in
    bfloat16 if the model computes in bfloat16. XLA partitions the program of a
    replica over its logical devices, as under `jax.jit`.

    The compiled program is kept for as long as `fn` exists, as by `jax.jit`: a
    new lambda in each iteration of a loop is compiled each time.

    With several processes, each call compares the Python numbers, NumPy arrays
    and local arrays among the arguments between the processes, with one
    exchange for each of them. Arrays on the mesh, such as those of a TrainState
    or a distributed batch, are not compared and cost nothing.

    When a step with a TrainState is traced, a UserWarning says so if no
    argument is split over the replicas, or if gradients are already reduced
    when `apply_gradients` averages them.

    Args:
      fn: The function. It is compiled once, and again for arguments of another
        structure, shape or sharding.
      args: A tuple of its positional arguments, trees of arrays.
      kwargs: A dict of its keyword arguments, trees of arrays.

    Returns:
      What `fn` returns. A TrainState is one TrainState, which must be the same
      on all replicas; every other array is a `PerReplica`.

    Raises:
      TypeError: An argument or a result is not an array; an argument is traced,
        because `run` is called inside `jax.jit` or `run`; or it is an NNX
        module or optimizer, whose changes would be lost.
      ValueError: An argument is sharded on another mesh, was donated, or has
        integers that do not fit int32, or differs between processes; a
        `PerReplica` has another number of replicas; `fn` uses an axis name that
        is not in the mesh; a TrainState may differ between replicas. The check
        of the last case cannot follow every primitive:
        `ReplicaContext.assume_replicated` marks what it cannot see.

    Example:
      >>> import flaxshard as fs
      >>> strategy = fs.Strategy()
      >>> out = strategy.run(lambda x: {"twice": 2 * x}, args=(3.0,))
      >>> len(out["twice"]) == strategy.num_replicas_in_sync
      True
    """
    if not isinstance(args, (tuple, list)):
      raise TypeError(
        "run: args must be a tuple of arguments, such as args=(state, batch), "
        f"got {checks.describe(args)}."
      )
    forms = calls.compiled_forms(fn, Options(self.mesh))
    return forms.call(tuple(args), dict(kwargs or {}))

  def jit(
    self,
    fn: Callable[..., PyTree],
    *,
    donate_argnums: int | Sequence[int] = (),
  ) -> Callable[..., PyTree]:
    """Compiles a function that runs once on each replica.

    Args:
      fn: The function, as in `run`.
      donate_argnums: The positions of arguments, such as the state, whose
        memory may be overwritten.

    Returns:
      A function of the arguments of `fn`, which returns what `run` does. Its
      method `lower(*args)` lowers the program, as that of `jax.jit` does; the
      arguments may be `jax.ShapeDtypeStruct`s.

    Raises:
      ValueError: `donate_argnums` are not positions of arguments; in a call, an
        argument was donated to an earlier call.
    """
    if isinstance(donate_argnums, int):
      donate_argnums = (donate_argnums,)
    return calls.CompiledFunction(fn, Options(self.mesh, tuple(donate_argnums)))

  def run_steps(
    self,
    step_fn: Callable[..., PyTree],
    state: PyTree,
    batches: PyTree,
    *,
    reduce: PyTree = None,
    donate_state: bool = False,
  ) -> tuple[PyTree, PyTree]:
    """Runs several steps in one program, as a loop on the devices.

    Args:
      step_fn: `step_fn(state, batch)` returns the next state, or `(state,
        outputs)`. It runs on each replica as in `run`.
      state: The TrainState.
      batches: A list of batches, or one tree of arrays `[steps, ...]`, sharded
        over the replicas as in `run`. A `PerReplica` is `[replicas, steps,
        ...]`.
      reduce: How to reduce the outputs of the last step over the replicas:
        `"sum"`, `"mean"`, or None, which returns them as `PerReplica`; or a
        tree of these that matches the outputs.
      donate_state: Whether the memory of `state` may be overwritten.

    Returns:
      The new state, and the outputs of the last step; the outputs are None if
      `step_fn` returns only a state.

    Raises:
      ValueError: There are no batches, or the leaves have different numbers of
        steps; `batches` is a single batch, split along its first dimension;
        `step_fn` changes the shape, dtype or structure of the state; `reduce`
        is no reduction.

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
    compiled = self.jit_steps(step_fn, reduce=reduce, donate_state=donate_state)
    return compiled(state, batches)

  def jit_steps(
    self,
    step_fn: Callable[..., PyTree],
    *,
    reduce: PyTree = None,
    donate_state: bool = False,
  ) -> Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]:
    """Compiles a loop over several steps, as `run_steps` runs it.

    Args:
      step_fn: The step, as in `run_steps`.
      reduce: How to reduce the outputs of the last step, as in `run_steps`.
      donate_state: Whether the memory of the state may be overwritten.

    Returns:
      A function of `state` and `batches`, which returns what `run_steps` does.
      Its method `lower(state, batches)` lowers the loop; the arguments may be
      `jax.ShapeDtypeStruct`s.

    Raises:
      ValueError: `reduce` is no reduction.
    """
    ops, structure = jax.tree.flatten(reduce, is_leaf=lambda x: x is None)
    for op in ops:
      if op is not None:
        checks.one_of("run_steps: reduce", op, replica_context.REDUCE_OPS)
    donated = (0,) if donate_state else ()
    return calls.CompiledFunction(
      step_fn,
      Options(self.mesh, donated, (structure, tuple(ops))),
      lambda state, batches: ((state, batches), {}),
    )

  def reduce(
    self, reduce_op: str, value: PyTree, axis: int | None = None
  ) -> PyTree:
    """Reduces per-replica values over the replicas.

    Args:
      reduce_op: `"sum"` or `"mean"`. The mean of integers is float32.
      value: A tree of `PerReplica`. For `"mean"` also of arrays, which are the
        same on all replicas and are returned unchanged.
      axis: A dimension of a replica's value to reduce as well, such as the
        batch dimension; None: no other dimension.

    Returns:
      A tree of arrays, one for all replicas.

    Raises:
      ValueError: `reduce_op` is unknown, a value to sum is not a `PerReplica`,
        or there is no such axis.

    Example:
      >>> import flaxshard as fs, jax
      >>> strategy = fs.Strategy(devices=jax.devices()[:1])
      >>> ids = strategy.distribute_values_from_function(
      ...     lambda context: context.replica_id_in_sync_group + 1)
      >>> int(strategy.reduce("sum", ids))
      1
    """
    return operations.reduce(self.mesh, reduce_op, value, axis)

  def gather(self, value: PyTree, axis: int) -> PyTree:
    """Concatenates the replicas' values along one of their dimensions.

    Args:
      value: A tree of `PerReplica`.
      axis: The dimension of a replica's value.

    Returns:
      A tree of arrays, one for all replicas.

    Raises:
      ValueError: A value is not a `PerReplica`, or has no such axis.
    """
    return operations.gather(self.mesh, value, axis)

  def local_results(self, value: PyTree) -> tuple[PyTree, ...]:
    """Returns the values of this process's replicas, in replica order.

    Args:
      value: A tree of `PerReplica`, or of arrays, which are the same on all
        replicas.

    Returns:
      A tree like `value` for each replica that has a device in this process.
      The arrays are on the devices of their replica.
    """
    return operations.local_results(self.mesh, value)

  def distribute_values_from_function(
    self, value_fn: Callable[[ValueContext], PyTree]
  ) -> PyTree:
    """Creates per-replica values, one call for each replica.

    Args:
      value_fn: Takes a `ValueContext`, with `replica_id_in_sync_group` and
        `num_replicas_in_sync`, and returns a tree of arrays. It is called for
        the replicas of this process.

    Returns:
      A tree of `PerReplica`.

    Raises:
      ValueError: The trees of two replicas differ in structure, shape or dtype,
        or an integer does not fit int32.

    Example:
      >>> import flaxshard as fs, numpy as np
      >>> strategy = fs.Strategy()
      >>> ids = strategy.distribute_values_from_function(
      ...     lambda context: np.int32(context.replica_id_in_sync_group))
      >>> int(ids[0])
      0
    """
    return operations.from_function(self.mesh, value_fn)

  def distribute_dataset(
    self, dataset: Iterable[PyTree], **options: Any
  ) -> distribute.DistributedDataset:
    """Shards batches over the replicas, and prefetches them in a thread.

    Args:
      dataset: Global batches, trees of arrays `[batch, ...]`. With several
        processes, each process yields its part of every batch.
      **options: `prefetch`, `batch_size`, `mask`, `drop_remainder`, `bucket`,
        `bucket_dims`, `spec`: see `data.distribute.DistributedDataset`.

    Returns:
      An iterable of batches, sharded over the replicas. A short batch is
      padded, and `batch["mask"]` is 1 for real examples, 0 for padding.

    Raises:
      ValueError, TypeError: An option is invalid.

    Example:
      >>> import flaxshard as fs, numpy as np
      >>> strategy = fs.Strategy()
      >>> n = strategy.num_replicas_in_sync
      >>> batches = [{"x": np.ones(2 * n)}, {"x": np.ones(n)}]
      >>> for batch in strategy.distribute_dataset(batches):
      ...   print(float(batch["mask"].mean()))
      1.0
      0.5
    """
    return distribute.DistributedDataset(self.mesh, dataset, **options)

  def distribute_datasets_from_function(
    self,
    dataset_fn: Callable[[distribute.InputContext], Iterable[PyTree]],
    **options: Any,
  ) -> distribute.DistributedDataset:
    """Shards the batches that a function returns for each input pipeline.

    Args:
      dataset_fn: Takes an `InputContext` and returns the batches of its
        pipeline. Each has
        `context.get_per_replica_batch_size(global_batch_size)` examples.
      **options: See `distribute_dataset`.

    Returns:
      An iterable of batches: see `distribute_dataset`.
    """
    return distribute.distribute_datasets_from_function(
      self.mesh, dataset_fn, **options
    )

  def shard_batch(self, batch: PyTree, spec: PyTree = None) -> PyTree:
    """Shards one batch over the replicas, without padding.

    Args:
      batch: A tree of arrays `[batch, ...]`. With several processes, each
        process passes its part of the batch. A tree of `jax.ShapeDtypeStruct`s
        gives an abstract batch, for `lower`; on devices for compiling alone
        that is the global batch.
      spec: A `PartitionSpec`, or a dict of them by path, which may split the
        batch over logical devices too. None: `PartitionSpec("replica")`.

    Returns:
      A tree of arrays on the mesh.

    Raises:
      ValueError: The spec does not divide a leaf; the message names it.
    """
    spec = jax.P(mesh_lib.REPLICA) if spec is None else spec
    return distribute.shard_batch(self.mesh, batch, spec)

  def describe(self, state: PyTree) -> describe.Description:
    """Prints how arrays are sharded, with bytes per device.

    Args:
      state: A TrainState, or any tree of arrays.

    Returns:
      The description.
    """
    description = describe.describe(state)
    print(description)
    return description

  def split_to_logical_devices(
    self, tensor: Any, partition_dimensions: Sequence[int]
  ) -> jax.Array:
    """Splits a tensor over the logical devices of a replica.

    In `run` the tensor is this replica's, in `jax.jit` the global one. Outside
    of a trace the array is moved.

    Args:
      tensor: An array.
      partition_dimensions: The number of pieces of each dimension. The product
        is the number of logical devices. The pieces go to the logical devices
        in row-major order where the mesh axes allow it: axes of different prime
        sizes stay in the order of the mesh.

    Returns:
      The same values.

    Raises:
      ValueError: The numbers do not fit the tensor or the logical devices; in a
        trace on another mesh, or within a function on one logical device.
      TypeError: `tensor` is not an array, or a number is not an integer.

    Example:
      >>> import flaxshard as fs, numpy as np
      >>> strategy = fs.Strategy()
      >>> strategy.split_to_logical_devices(np.ones((4, 2)), [1, 1]).shape
      (4, 2)

    References:
      `tf.distribute.TPUStrategy.experimental_split_to_logical_devices`.
    """
    return logical_devices.split(self.mesh, tensor, partition_dimensions)

  def replicate_to_logical_devices(self, tensor: Any) -> jax.Array:
    """Puts a whole copy of a tensor on each logical device of a replica.

    Args:
      tensor: An array.

    Returns:
      The same values.

    References:
      `tf.distribute.TPUStrategy.experimental_replicate_to_logical_devices`.
    """
    return logical_devices.replicate(self.mesh, tensor)

  def assign_to_logical_device(
    self, tensor: Any, logical_device_id: int
  ) -> jax.Array:
    """Puts a tensor on one logical device of each replica.

    Outside of a trace the array is moved there. Operations on it run there, and
    gradients flow back. In a trace, and within `jax.set_mesh`, JAX has no
    sharding on one of several devices: the value is taken from that device, and
    all devices receive it.
    `on_logical_device` runs a function on that device alone in both cases.

    One program cannot update parameters on different devices: eagerly, give
    each device an optimizer with `optax.partition`. `LossScale` cannot span
    devices.

    Args:
      tensor: An array.
      logical_device_id: The number of the logical device.

    Returns:
      The same values.

    Raises:
      ValueError: There is no such logical device; in a trace on another mesh,
        within a function on one logical device, or in `jax.jit` where the axes
        are Explicit.
      TypeError: `tensor` is not an array, or the number is not an integer.

    References:
      `tf.distribute.TPUStrategy.experimental_assign_to_logical_device`.
    """
    return self.on_logical_device(logical_device_id, lambda x: x, tensor)

  def on_logical_device(
    self, logical_device_id: int, fn: Callable[..., PyTree], *args: PyTree
  ) -> PyTree:
    """Computes `fn(*args)` on one logical device of each replica.

    In a trace, and within `jax.set_mesh(strategy.mesh)`, that is a conditional,
    and all logical devices receive the result. Elsewhere the arguments are
    moved there, and the result stays there.

    Args:
      logical_device_id: The number of the logical device.
      fn: A function of arrays. In a trace it must not close over traced values.
      *args: Trees of arrays.

    Returns:
      What `fn` returns.

    Raises:
      ValueError: As `assign_to_logical_device`.
      TypeError: An argument or a result is not an array, or the number is not
        an integer.

    Example:
      >>> import flaxshard as fs, numpy as np
      >>> strategy = fs.Strategy()
      >>> strategy.on_logical_device(0, lambda x: 2 * x, np.ones(2)).tolist()
      [2.0, 2.0]
    """
    return logical_devices.on_device(self.mesh, logical_device_id, fn, *args)
