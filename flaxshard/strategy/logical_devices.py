"""A Strategy's annotations of tensors: its methods, over the mesh's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from flaxshard.partitioning import logical_devices
from flaxshard.state.sharding import HasMesh

PyTree = Any


def split_to_logical_devices(
  strategy: HasMesh, tensor: Any, partition_dimensions: Sequence[int]
) -> jax.Array:
  """Splits a tensor over the logical devices of a replica.

  In `run` the tensor is this replica's, in `jax.jit` the whole. Outside of a
  trace the array is moved.

  Args:
    strategy: The strategy.
    tensor: An array.
    partition_dimensions: The number of pieces of each dimension; their
      product is the number of logical devices. The pieces go to the logical
      devices in row-major order, as far as the mesh axes allow it: where
      different primes are mixed, axes stay in the order of the mesh.

  Returns:
    The same values.

  Raises:
    ValueError: A number for each dimension of the tensor is not given, does
      not divide it, or the product is not the number of logical devices; in a
      trace on another mesh, or within a function on one logical device.
    TypeError: `tensor` is not an array, or the numbers are not integers.

  Example:
    >>> import flaxshard as fs, numpy as np
    >>> strategy = fs.Strategy()
    >>> strategy.split_to_logical_devices(np.ones((4, 2)), [1, 1]).shape
    (4, 2)

  References:
    `tf.distribute.TPUStrategy.experimental_split_to_logical_devices`.
  """
  return logical_devices.split(strategy.mesh, tensor, partition_dimensions)


def replicate_to_logical_devices(strategy: HasMesh, tensor: Any) -> jax.Array:
  """Puts a whole copy of a tensor on each logical device of a replica.

  Args:
    strategy: The strategy.
    tensor: An array.

  Returns:
    The same values.

  References:
    `tf.distribute.TPUStrategy.experimental_replicate_to_logical_devices`.
  """
  return logical_devices.replicate(strategy.mesh, tensor)


def assign_to_logical_device(
  strategy: HasMesh, tensor: Any, logical_device_id: int
) -> jax.Array:
  """Puts a tensor on one logical device of a replica.

  Outside of a trace the array is moved there, what is computed from it stays
  there, and gradients flow back. JAX knows no single device in a traced
  program of several: there the value is taken from that device and all have
  it. `on_logical_device` has work done there alone in both.

  An update over parameters on different devices cannot be one program: eagerly,
  `optax.partition` gives each device an optimizer of its own, which
  `optax.adam` needs, and `LossScale` cannot span them.

  Args:
    strategy: The strategy.
    tensor: An array.
    logical_device_id: The number of the logical device.

  Returns:
    The same values.

  Raises:
    ValueError: There is no such logical device; in a trace on another mesh,
      within a function on one logical device, or in `jax.jit` where the axes
      are Explicit.
    TypeError: What should be an array is none.

  References:
    `tf.distribute.TPUStrategy.experimental_assign_to_logical_device`.
  """
  return logical_devices.assign(strategy.mesh, tensor, logical_device_id)


def on_logical_device(
  strategy: HasMesh,
  logical_device_id: int,
  fn: Callable[..., PyTree],
  *args: PyTree,
) -> PyTree:
  """Has one logical device of each replica compute `fn(*args)`.

  Traced, that is a conditional, and all logical devices get the result; traced
  values are handed in as arguments, where a closure may be refused. Outside of
  a trace the arguments are moved there, and the result stays.

  Args:
    strategy: The strategy.
    logical_device_id: The number of the logical device.
    fn: A function of arrays.
    *args: Trees of arrays.

  Returns:
    What `fn` returns.

  Raises:
    ValueError: There is no such logical device; in a trace on another mesh,
      within a function on one logical device, or in `jax.jit` where the axes
      are Explicit.
    TypeError: What should be an array is none.

  Example:
    >>> import flaxshard as fs, numpy as np
    >>> strategy = fs.Strategy()
    >>> strategy.on_logical_device(0, lambda x: 2 * x, np.ones(2)).tolist()
    [2.0, 2.0]
  """
  return logical_devices.on_device(strategy.mesh, logical_device_id, fn, *args)
