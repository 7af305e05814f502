"""Initializes the parameters of a state from a checkpoint, for fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import logging
import math
import os
from typing import Any, TypeVar

import jax
import numpy as np

from flaxshard.checkpoint import matching
from flaxshard.checkpoint import reader
from flaxshard.checkpoint import safetensors_files
from flaxshard.checkpoint import steps
from flaxshard.core import checks
from flaxshard.core import multihost
from flaxshard.core import patterns as patterns_lib
from flaxshard.core import trees
from flaxshard.state import fields as fields_lib
from flaxshard.state import lora
from flaxshard.state.train_state import TrainState

_log = logging.getLogger(__name__)

_State = TypeVar("_State")


@dataclasses.dataclass(frozen=True)
class InitReport:
  """Report of `init_from`: the arrays that it read, kept and did not use.

  Attributes:
    path: The file or the directory that was read.
    loaded: The path in the file of each array that was read, by its path in the
      model.
    kept: Paths of the model whose arrays keep their initial values.
    unused: Paths of the file that were not used.
  """

  path: str
  loaded: Mapping[str, str]
  kept: tuple[str, ...]
  unused: tuple[str, ...]

  def __str__(self) -> str:
    """Returns the report as lines for a log."""
    lines = [
      f"initialized {len(self.loaded)} of {len(self.loaded) + len(self.kept)} "
      f"arrays from {self.path}"
    ]
    if self.kept:
      lines.append(f"  keep their initial values: {', '.join(self.kept)}")
    if self.unused:
      # The optimizer's state has as many arrays as the model, or more.
      lines.append(f"  not used of the file: {checks.listed(self.unused)}")
    return "\n".join(lines)


def init_from(
  state: _State,
  path: str | os.PathLike[str],
  *,
  step: int | None = None,
  item: str | None = None,
  subtree: str = "",
  rename: Sequence[tuple[str, str]] = (),
  keep: Sequence[str] = (),
  ignore: Sequence[str] = (),
  transpose: Sequence[tuple[str, Sequence[int]]] = (),
  reshape: Sequence[str] = (),
  cast: bool = False,
) -> tuple[_State, InitReport]:
  """Initializes the parameters of a new state from those of a checkpoint.

  Parameters and other collections of the model, such as `batch_stats`, are
  read; the optimizer, the wrappers, random streams and the step start anew.
  Arrays keep the shardings of `state`, and each process reads its parts of the
  arrays that are used. Of a msgpack file, and of a safetensors file in a
  bucket, everything is read.

  Every array of the model must be in the file, and every array of the file in
  the model, unless a pattern says otherwise. Patterns are regular expressions,
  searched in paths such as `encoder/Dense_0/kernel`. Paths in collections other
  than `params` begin with the name of the collection:
  `batch_stats/BatchNorm_0/mean`. In a safetensors file `encoder.0.weight` has
  the path `encoder/0/weight`.

  Args:
    state: A new `TrainState`, or a tree of parameters.
    path: A workdir, a directory of steps, one step or file of flaxshard, of
      Orbax (`StandardCheckpointer`, `CheckpointManager`) or of Flax
      (`flax.training.checkpoints`, `flax.serialization.to_bytes`); or a
      safetensors file, its index, or a directory with one of these. It may be
      in a bucket.
    step: The step to read of a directory of steps; None is the newest.
    item: Name of the item of an Orbax checkpoint; None is the first of
      `default`, `state` and `pytree` that exists.
    subtree: Path of the part of the file to read, such as `params/encoder`.
    rename: `(pattern, replacement)` pairs: each is applied with `re.sub` to the
      file's paths, in this order.
    keep: Patterns of the model's paths that keep their initial values.
    ignore: Patterns of the file's paths, before renaming, that are not used.
    transpose: `(pattern, axes)` pairs, by the model's paths: the dimensions of
      the file's arrays are put in this order, as by `jnp.transpose`. Kernels of
      PyTorch need `(1, 0)`, and those of its convolutions `(2, 3, 1, 0)`.
    reshape: Patterns of the model's paths whose arrays get the shape that they
      have in the model, after `transpose`: `[inputs, heads * features]` becomes
      `[inputs, heads, features]`.
    cast: Whether to cast to dtypes that cannot hold all values of the file's,
      such as float32 to bfloat16. Wider dtypes need no permission.

  Returns:
    The state at step 0, or the tree, and a report. The report is also logged.

  Raises:
    TypeError: An argument has a wrong type.
    ValueError: There is no such checkpoint, it is damaged, an array has no
      counterpart, shapes or dtypes differ, or a pattern matches nothing. The
      message lists paths, with similar ones.
    ImportError: A safetensors file, and the package is not installed.

  Example:
    >>> import flaxshard as fs, jax.numpy as jnp, tempfile, pathlib
    >>> from flax import serialization
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "model.msgpack"
    >>> pretrained = {"body": {"w": jnp.ones(2)}, "head": {"w": jnp.ones(9)}}
    >>> size = file.write_bytes(serialization.to_bytes(pretrained))
    >>> params = {"trunk": {"w": jnp.zeros(2)}, "head": {"w": jnp.zeros(5)}}
    >>> params, report = fs.checkpoint.init_from(
    ...   params, file, rename=[("^body/", "trunk/")], keep=["^head/"])
    >>> params["trunk"]["w"].tolist(), report.kept, report.unused
    ([1.0, 1.0], ('head/w',), ('head/w',))
  """
  for name, patterns in dict(keep=keep, ignore=ignore, reshape=reshape).items():
    patterns_lib.check(name, patterns)
  for name, pairs in dict(rename=rename, transpose=transpose).items():
    patterns_lib.check_pairs(name, pairs)
  fields: Any = state
  collections, factors = set(), set()
  if isinstance(state, TrainState):
    fields = fields_lib.variables(state)
    fields.pop("rngs", None)  # random streams begin with the new run
    collections, factors = fields.keys() - {"params"}, _lora_factors(state)
  wanted = matching.by_name(trees.leaves_by_path(fields))
  where, saved = _open(steps.as_path(path), step, item, subtree)
  try:
    sources = matching.match(
      saved,
      wanted,
      rename=rename,
      keep=keep,
      ignore=ignore,
      collections=collections,
      optional=factors,
    )
    matching.select("reshape", reshape, sources, "the model")
    by_axes = [pattern for pattern, _ in transpose]
    matching.select("transpose", by_axes, sources, "the model")
    axes = {
      name: _axes(name, saved[path], wanted[name], transpose, reshape, cast)
      for name, path in sources.items()
    }
  except ValueError as e:
    raise ValueError(f"{where}: {e}") from e
  asked = {
    name: (saved[path], _asked(saved[path], axes[name], wanted[name]))
    for name, path in sources.items()
  }
  arrays = {
    name: _finish(x, axes[name], wanted[name])
    for name, x in reader.read(where, asked).items()
  }
  used = {*sources.values()}
  report = InitReport(
    str(where),
    {name: "/".join(path) for name, path in sources.items()},
    tuple(name for name in wanted if name not in sources),
    tuple("/".join(path) for path in saved if path not in used),
  )
  _log.info("%s", report)
  new: Any = jax.tree.unflatten(
    jax.tree.structure(fields), list((wanted | arrays).values())
  )
  if isinstance(state, TrainState):
    new = fields_lib.reinitialize(state, new)
  return new, report


def _lora_factors(state: TrainState) -> set[str]:
  """Returns the paths of the factors of LoRA, which most files lack."""
  if not isinstance(state.apply_fn, lora.Apply):
    return set()
  of_model = lora.model_leaves(state.params, getattr(state, lora.FROZEN))
  paths = trees.leaves_by_path(state.params)
  return {"/".join(path) for path in paths if path not in of_model}


def _open(
  path: Any, step: int | None, item: str | None, subtree: str
) -> tuple[Any, dict[reader.Path, reader.SavedLeaf]]:
  """Returns the file or the step at a path, and its leaves below `subtree`."""
  with multihost.raise_on_all_processes(ValueError, ImportError):
    file = safetensors_files.find(path)
    if file is not None:
      # There are no digests; the package checks the sizes.
      where, leaves = file, safetensors_files.open_leaves(file)
  if file is None:
    _, (where, leaves) = steps.read(
      path, step, lambda where: (where, reader.open_step(where, item))
    )
  # Keys may have slashes, as those of Haiku have.
  below = {
    path[n:]: leaf
    for path, leaf in leaves.items()
    for n in range(len(path))
    if "/".join(path[:n]) == subtree.strip("/")
  }
  if not below:
    tops = ", ".join({path[0]: None for path in leaves})
    raise ValueError(
      f"{where}: subtree={subtree!r} has no arrays; the file has "
      f"{tops or 'no arrays'}."
    )
  return where, below


def _axes(
  path: str,
  have: Any,
  want: Any,
  transpose: Sequence[tuple[str, Sequence[int]]],
  reshape: Sequence[str],
  cast: bool,
) -> tuple[int, ...]:
  """Returns the order of a leaf's dimensions in which it fits the model's.

  Raises:
    ValueError: The shape or the dtype does not fit.
  """
  axes = tuple(range(len(have.shape)))
  # The first pattern counts.
  first = patterns_lib.first_match([pattern for pattern, _ in transpose], path)
  if first is not None:
    given = tuple(transpose[first][1])
    if len(given) != len(axes) or {*given} != {*axes}:
      raise ValueError(
        f"transpose[{first}]={transpose[first]!r} must have the axes of "
        f"{path}, which has the shape {have.shape} in the file."
      )
    axes = given
  shape = tuple(have.shape[axis] for axis in axes)
  may_reshape = (
    patterns_lib.first_match(reshape, path) is not None
    # With as many dimensions, they would be in another order.
    and len(shape) != len(want.shape)
    and math.prod(shape) == math.prod(want.shape)
  )
  if shape != want.shape and not may_reshape:
    raise ValueError(
      f"{path} has the shape {shape} in the file, and {want.shape} in the "
      "model. `keep` keeps its initial value; `transpose` and `reshape` change "
      "the array."
    )
  if not (cast or np.can_cast(have.dtype, want.dtype)):
    raise ValueError(
      f"{path} is {have.dtype} in the file, and {want.dtype} in the model, "
      "which cannot hold all its values; cast=True rounds them."
    )
  return axes


def _asked(have: Any, axes: tuple[int, ...], want: jax.Array) -> reader.Asked:
  """Returns the shape, dtype and sharding with which to read a leaf."""
  sharding = want.sharding
  in_order = axes == tuple(range(want.ndim))
  if not in_order and isinstance(sharding, jax.sharding.NamedSharding):
    # An array to reshape is not split before it has the model's dimensions.
    # Otherwise dimension i of the model is dimension axes[i] of the file.
    names = sharding.spec if len(axes) == want.ndim else ()
    by_file = dict(zip(axes, names, strict=False))
    spec = jax.P(*map(by_file.get, range(len(axes))))
    sharding = jax.sharding.NamedSharding(sharding.mesh, spec)
  return jax.ShapeDtypeStruct(
    have.shape, jax.dtypes.canonicalize_dtype(have.dtype), sharding=sharding
  )


def _finish(x: jax.Array, axes: tuple[int, ...], want: jax.Array) -> jax.Array:
  """Returns an array that was read with the model's dimensions and dtype."""
  if axes == tuple(range(want.ndim)) and x.dtype == want.dtype:
    return x

  def convert(x: jax.Array) -> jax.Array:
    return x.transpose(axes).reshape(want.shape).astype(want.dtype)

  converted: jax.Array = jax.jit(convert, out_shardings=want.sharding)(x)
  return converted
