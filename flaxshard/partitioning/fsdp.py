"""FSDP: splits every large parameter over the replicas' mesh axis."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import logging
import math
from typing import NamedTuple

from flaxshard.core import checks
from flaxshard.partitioning import specs
from flaxshard.partitioning.specs import Mesh

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class FSDP:
  """Splits every large parameter over a mesh axis: fully sharded data parallel.

  For each parameter it splits the largest dimension that no other rule splits
  and that the size of the axis divides; of equal dimensions the first one. It
  leaves a parameter as it is if another rule already splits it over the axis.
  The log lists the parameters that stay whole.

  Source: stage 3 of ZeRO (Rajbhandari et al., 2020, arXiv:1910.02054). The
  choice of the dimension and the smallest size follow big_vision's `fsdp`.

  Attributes:
    axis: Name of the mesh axis, or a tuple of several names.
    min_size: Number of elements below which a parameter stays whole.

  Raises:
    TypeError: A field has the wrong type, or `axis` is empty.
    ValueError: `min_size` is out of range, or `axis` repeats an axis.

  Example:
    >>> import flaxshard as fs, jax
    >>> from flaxshard.partitioning import rules
    >>> mesh = jax.sharding.AbstractMesh((4, 2), ("replica", "model"))
    >>> kernel = jax.ShapeDtypeStruct((512, 2048), "float32")
    >>> rules.resolve(fs.FSDP(min_size=1024), mesh, {"kernel": kernel})
    {'kernel': P(None, 'replica')}
  """

  axis: str | tuple[str, ...] = "replica"
  min_size: int = 2**14

  def __post_init__(self) -> None:
    axes = specs.axes_of(self.axis)
    is_valid = isinstance(self.axis, (str, tuple)) and self.axis
    if not is_valid or not all(isinstance(axis, str) for axis in axes):
      raise checks.ArgumentTypeError(
        "FSDP: axis must be a mesh axis or a non-empty tuple of them, got "
        f"{self.axis!r}."
      )
    if len(set(axes)) < len(axes):
      raise ValueError(
        f"FSDP: axis must not repeat an axis, got {self.axis!r}."
      )
    checks.integer("FSDP: min_size", self.min_size, minimum=0)


class Leaf(NamedTuple):
  """A parameter and the axes that split it.

  Attributes:
    path: The path of the parameter, such as `block0/mlp_in/kernel`.
    shape: Its shape.
    dims: For each dimension, the mesh axes that split it.
    keep_whole: Whether a rule excludes the parameter from FSDP.
  """

  path: str
  shape: tuple[int, ...]
  dims: specs.Dims
  keep_whole: bool


def split_leaves(fsdp: FSDP, mesh: Mesh, leaves: Sequence[Leaf]) -> list[Leaf]:
  """Splits one more dimension of each large leaf over the axis of `fsdp`.

  Args:
    fsdp: The rule.
    mesh: The mesh; it has the axes of `fsdp`.
    leaves: The parameters as the other rules split them.

  Returns:
    The leaves with their new `dims`.

  Raises:
    RuleError: No leaf is split, although the axis has more than one device.
  """
  axes = specs.axes_of(fsdp.axis)
  axis_size = math.prod(mesh.shape[axis] for axis in axes)
  new_leaves = list(leaves)
  split, small, indivisible = [], [], []
  for i, leaf in enumerate(leaves):
    if leaf.keep_whole:
      continue
    free_dims = [
      dim
      for dim, size in enumerate(leaf.shape)
      if not leaf.dims[dim] and size % axis_size == 0
    ]
    # A mesh axis can split an array only once.
    if any(axis in axes for dim in leaf.dims for axis in dim):
      split.append(leaf.path)
    elif math.prod(leaf.shape) < fsdp.min_size:
      small.append(leaf.path)
    elif not free_dims:
      indivisible.append(leaf.path)
    else:
      split.append(leaf.path)
      # Of equal dimensions `max` returns the first.
      largest = max(free_dims, key=lambda dim: leaf.shape[dim])
      dims = (*leaf.dims[:largest], axes, *leaf.dims[largest + 1 :])
      new_leaves[i] = leaf._replace(dims=dims)
  # An axis of size 1, as on a single device, is not a mistake in the rules.
  if not split and axis_size > 1:
    raise specs.RuleError(
      f"rules: {fsdp!r} splits no parameter: {len(small)} of {len(leaves)} "
      f"parameters are smaller than min_size ({_first_paths(small)}), and "
      f"{len(indivisible)} have no unsplit dimension that the axis, of size "
      f"{axis_size}, divides ({_first_paths(indivisible)}); allowed: a smaller "
      "min_size, another axis, or other rules."
    )
  _log.info(
    "FSDP: %d of %d parameters are split over %r; %d with fewer than %d "
    "elements are not: %s",
    len(split),
    len(leaves),
    fsdp.axis,
    len(small),
    fsdp.min_size,
    _first_paths(small),
  )
  # A large parameter that stays whole takes its memory on every device.
  if indivisible:
    _log.warning(
      "FSDP: %d large parameters are not split, because %r, of size %d, "
      "divides no dimension that is still unsplit: %s",
      len(indivisible),
      fsdp.axis,
      axis_size,
      _first_paths(indivisible),
    )
  return new_leaves


def _first_paths(paths: Sequence[str]) -> str:
  """Returns up to three paths, for a message."""
  return ", ".join((*paths[:3], *(["…"] if len(paths) > 3 else []))) or "none"
