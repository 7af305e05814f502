"""A train step, compiled for its devices, with its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import math
from typing import Any

import jax

from flaxshard.core import trees
from flaxshard.partitioning import compile_only
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.plans import traffic

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Leaf:
  """An array among the arguments or the results of a step.

  Attributes:
    path: Its path in its argument, such as `params/Dense_0/kernel`.
    argnum: The position of its argument.
    shape: Its shape.
    dtype: Its dtype.
    sharding: Its sharding in the program; None if a device has all of it.
    is_weak: Whether its dtype is weak, as that of a Python number is.
    donated: Whether the step may overwrite it.
    is_read: Whether the program reads it.
  """

  path: str
  argnum: int
  shape: tuple[int, ...]
  dtype: Any
  sharding: jax.sharding.Sharding | None
  is_weak: bool = False
  donated: bool = False
  is_read: bool = True

  @property
  def local_shape(self) -> tuple[int, ...]:
    """Its shape on each device."""
    if self.sharding is None:
      return self.shape
    return self.sharding.shard_shape(self.shape)

  @property
  def local_size(self) -> int:
    """Number of elements on each device."""
    return math.prod(self.local_shape)

  @property
  def nbytes(self) -> int:
    """Bytes on each device, without padding."""
    return self.local_size * int(self.dtype.itemsize)

  @property
  def axes_by_dim(self) -> tuple[tuple[str, ...], ...]:
    """Mesh axes along each dimension, also those of one device."""
    if not isinstance(self.sharding, jax.sharding.NamedSharding):
      return ((),) * len(self.shape)
    return mesh_lib.dims_of(self.sharding.spec, len(self.shape))


@dataclasses.dataclass(frozen=True)
class Step:
  """A traced step, and its program.

  Attributes:
    arguments: Its arguments, the state first.
    batch_argnum: The position of the batch.
    traced: The traced step.
    compiled: The compiled program; None if the devices have too little memory.
    error: The compiler's message then; else "".
  """

  arguments: tuple[PyTree, ...]
  batch_argnum: int
  traced: jax.stages.Traced
  compiled: Any
  error: str

  @property
  def state(self) -> PyTree:
    """The state."""
    return self.arguments[0]

  @functools.cached_property
  def collectives(self) -> tuple[traffic.Collective, ...]:
    """The collectives; one device alone has none, nor has what is refused."""
    if self.compiled is None or self.mesh is None:
      return ()
    return traffic.collectives(self.compiled, self.mesh)

  @functools.cached_property
  def leaves(self) -> tuple[Leaf, ...]:
    """The arrays of all arguments."""
    leaves = []
    for path, x in jax.tree.leaves_with_path(self.arguments):
      # A Python number has a shape and a dtype there, too.
      x = mesh_lib.abstract_array(x, getattr(x, "sharding", None))
      name, number = trees.path_string(path[1:]), path[0].idx
      leaves.append(
        Leaf(name, number, x.shape, x.dtype, x.sharding, x.weak_type)
      )
    if self.compiled is None:
      return tuple(leaves)
    # The program may split arguments itself. What it does not read has no
    # sharding.
    infos = jax.tree.leaves(self.compiled.args_info)
    tree: Any = jax.tree.structure(self.compiled.args_info)
    shardings = tree.flatten_up_to(self.compiled.input_shardings)
    return tuple(
      dataclasses.replace(
        leaf,
        sharding=sharding or leaf.sharding,
        donated=info.donated,
        is_read=sharding is not None,
      )
      for leaf, sharding, info in zip(leaves, shardings, infos, strict=True)
    )

  @property
  def state_leaves(self) -> list[Leaf]:
    """The arrays of the state."""
    return [leaf for leaf in self.leaves if leaf.argnum == 0]

  @property
  def batch_leaves(self) -> list[Leaf]:
    """The arrays of the batch."""
    return [x for x in self.leaves if x.argnum == self.batch_argnum]

  @property
  def params(self) -> PyTree:
    """The parameters in the state; all of it if it has no such field."""
    if isinstance(self.state, Mapping):
      return self.state.get("params", self.state)
    return getattr(self.state, "params", self.state)

  @functools.cached_property
  def mesh(self) -> jax.sharding.Mesh | None:
    """The mesh of the arguments; None for one device without a mesh."""
    meshes = (getattr(x.sharding, "mesh", None) for x in self.leaves)
    found = (mesh for mesh in meshes if isinstance(mesh, jax.sharding.Mesh))
    return next(found, None)

  @property
  def device(self) -> jax.Device:
    """One of the devices."""
    if self.mesh is not None:
      return self.mesh.devices.flat[0]
    for leaf in self.leaves:
      if isinstance(leaf.sharding, jax.sharding.SingleDeviceSharding):
        return next(iter(leaf.sharding.device_set))
    return compile_only.all_devices()[0]

  def new_state(self) -> list[Leaf] | None:
    """Returns the new state among the results, or None if there is none."""
    if self.compiled is None:
      return None
    # The compiled program knows the shardings, the traced one the weak types.
    results = self.compiled.out_info, self.traced.out_info
    parts = [results]
    if type(results[0]) in (tuple, list):
      parts += zip(*results, strict=True)
    for part, traced in parts:
      # By its type and paths: static fields may differ from call to call.
      if type(part) is type(self.state) and (
        trees.names(part) == trees.names(self.state)
      ):
        leaves = map(jax.tree.leaves, (part, traced))
        return [
          Leaf(old.path, 0, x.shape, x.dtype, x.sharding, weak.weak_type)
          for old, x, weak in zip(self.state_leaves, *leaves, strict=True)
        ]
    return None


def compile_call(
  step: Callable[..., Any],
  arguments: tuple[PyTree, ...],
  donate_argnums: int | Sequence[int] | None,
) -> Step:
  """Compiles a call of a step; see `fs.plan`.

  Raises:
    TypeError: `step` is not a function, or an argument has leaves that are not
      arrays; this is JAX's error.
    ValueError: `donate_argnums` is out of range, or given for a step that is
      jitted already.
  """
  jitted: Any = step
  if not callable(getattr(step, "trace", None)):
    donated = 0 if donate_argnums is None else donate_argnums
    jitted = jax.jit(step, donate_argnums=donated)
  elif donate_argnums is not None:
    raise ValueError(
      f"donate_argnums={donate_argnums!r} must be None for a step that is "
      "jitted already: give it to jax.jit or Strategy.jit."
    )
  return compile_step(jitted.trace(*arguments), arguments)


def compile_step(
  traced: jax.stages.Traced,
  arguments: tuple[PyTree, ...],
  batch_argnum: int = 1,
) -> Step:
  """Compiles a step.

  Args:
    traced: The traced step.
    arguments: Its arguments.
    batch_argnum: The position of the batch.

  Returns:
    The step; without a program if the devices have too little memory for it.
  """
  # That of nnx.jit holds JAX's.
  traced = getattr(traced, "traced", traced)
  compiled, error = None, ""
  try:
    compiled = traced.lower().compile()
  except jax.errors.JaxRuntimeError as e:
    error = str(e)
    if "RESOURCE_EXHAUSTED" not in error:
      raise
  return Step(arguments, batch_argnum, traced, compiled, error)
