"""Initializes the parameters of a state from a checkpoint, for fine-tuning.

The arrays of a file are matched to those of a model by their paths. Then each
is read, and brought to the shape and the dtype that the model has.
"""

from __future__ import annotations

import collections as collections_lib
from collections.abc import Collection, Iterable, Mapping, Sequence
import dataclasses
import functools
import logging
import math
import os
import re
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from flaxshard.checkpoint import reader
from flaxshard.checkpoint import steps
from flaxshard.checkpoint.reader import Path
from flaxshard.checkpoint.reader import WRAPPER_STATES
from flaxshard.core import checks
from flaxshard.core import multihost
from flaxshard.core import patterns as patterns_lib
from flaxshard.core import trees
from flaxshard.state import fields as fields_lib
from flaxshard.state import lora
from flaxshard.state.train_state import TrainState
from flaxshard.wrappers import stack

_log = logging.getLogger(__name__)

_State = TypeVar("_State")
_T = TypeVar("_T")

# What a file of a whole training state has beside the model's variables.
_TRAINING_STATE = ("step", "opt_state", WRAPPER_STATES, "dynamic_scale", "rngs")
# A run with LoRA has the parameters that it does not train in `frozen`.
_PARAMS = (("params",), ("frozen",))


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
    state: A new `TrainState`, or a tree of parameters: of JAX or NumPy, or
      described by `jax.ShapeDtypeStruct`s if all of them are read.
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
      such as float32 to bfloat16. Wider dtypes need no permission. Numbers are
      rounded to floating-point ones; one that would become infinite or another
      integer is an error, and so are complex numbers for a real dtype.

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
  wanted = _by_name(trees.leaves_by_path(fields))
  where, saved = _open(steps.as_path(path), step, item, subtree)
  axes, asked = {}, {}
  try:
    names = _names_in_file(saved, ignore, rename)
    if not _has_collections(saved):
      _name_collections(names, wanted, collections)
    kept = _select("keep", keep, wanted, "the model")
    sources = _match(saved, names, wanted, kept, factors)
    reshaped = _select("reshape", reshape, sources, "the model")
    _select("transpose", [p for p, _ in transpose], sources, "the model")
    for name, source in sources.items():
      have, want = saved[source], wanted[name]
      axes[name] = _axes(name, have, want, transpose, name in reshaped, cast)
      asked[name] = have, _asked(have, axes[name], want)
  except ValueError as e:
    raise ValueError(f"{where}: {e}") from e
  arrays = {}
  for name, x in reader.read(where, asked).items():
    in_file, want = asked[name][0].dtype, wanted[name]
    # What JAX holds in fewer bits than the file was cast as it was read.
    is_cast = x.dtype != in_file
    if in_file != want.dtype and _has_lost(x, want.dtype, is_cast):
      raise ValueError(
        f"{where}: {name} has values that {want.dtype} cannot hold."
      )
    arrays[name] = _finish(x, axes[name], want)
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
  of_model = lora.model_leaves(state.params, getattr(state, stack.FROZEN))
  paths = trees.leaves_by_path(state.params)
  return {"/".join(path) for path in paths if path not in of_model}


def _open(
  path: Any, step: int | None, item: str | None, subtree: str
) -> tuple[Any, reader.Leaves]:
  """Returns the file or the step at a path, and its leaves below `subtree`."""
  with multihost.raise_on_all_processes(ValueError, ImportError):
    file = reader.find_safetensors(path)
    if file is not None:
      # There are no digests; the package checks the sizes.
      where, leaves = file, reader.open_safetensors(file)
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


# -- The arrays by their paths.


def _by_name(leaves: Mapping[Path, _T]) -> dict[str, _T]:
  """Returns leaves by the names that a model and a file are compared by.

  Args:
    leaves: The leaves by path: of a tree of parameters, or of collections, one
      of which is `params`.

  Returns:
    The leaves in the same order. Names of parameters begin with no collection.

  Raises:
    ValueError: Two leaves have the same name, as keys may have slashes.
  """
  has_collections = _has_collections(leaves)
  siblings = collections_lib.Counter(path[:-1] for path in leaves)
  named = {}
  for path, leaf in leaves.items():
    rest = path[1:] if has_collections and path[:1] in _PARAMS else path
    if siblings[path[:-1]] == 1:  # it may be in a box
      rest = reader.in_train_state(rest, reader.BOXES)
    name = "/".join(rest)
    if name in named:
      raise ValueError(f"two arrays have the same path {name!r}.")
    named[name] = leaf
  return named


def _has_collections(paths: Iterable[Path]) -> bool:
  return any(path[:1] == ("params",) and len(path) > 1 for path in paths)


def _names_in_file(
  saved: reader.Leaves,
  ignore: Sequence[str],
  rename: Sequence[tuple[str, str]],
) -> dict[str, Path]:
  """Returns the paths of a file's arrays by name, without those to ignore.

  Raises:
    ValueError: A pattern matches nothing, or gives two arrays one name.
  """
  has_collections, variables = _has_collections(saved), {}
  for path, leaf in saved.items():
    # Programs save numbers of their own beside the state, such as an epoch.
    is_number = len(path) == 1 and leaf.is_number
    is_of_training = path[0] in _TRAINING_STATE or is_number
    if not (has_collections and is_of_training):
      variables[path] = path
  names = _by_name(variables)
  for name in _select("ignore", ignore, names, "the file"):
    del names[name]
  for i, (pattern, text) in enumerate(rename):
    where = f"rename[{i}]={(pattern, text)!r}"
    patterns_lib.find(where, pattern, "the file", list(names))
    renamed: dict[str, Path] = {}
    for name, path in names.items():
      new = re.sub(pattern, text, name)
      if new in renamed:
        raise ValueError(
          f"{where} makes {'/'.join(renamed[new])!r} and {'/'.join(path)!r} of "
          f"the file the same path {new!r}."
        )
      renamed[new] = path
    names = renamed
  return names


def _name_collections(
  names: dict[str, Path], wanted: Iterable[str], collections: Collection[str]
) -> None:
  """Names the collections of a file that has all variables in one tree.

  NNX writes such files.

  Args:
    names: The paths of the file's arrays by name, which are changed.
    wanted: The names of the model's arrays.
    collections: The model's collections other than `params`.
  """
  for name in wanted:
    collection, _, rest = name.partition("/")
    if collection in collections and name not in names and rest in names:
      names[name] = names.pop(rest)


def _match(
  saved: reader.Leaves,
  names: Mapping[str, Path],
  wanted: Mapping[str, Any],
  kept: Collection[str],
  optional: Collection[str],
) -> dict[str, Path]:
  """Returns the path in a file for each array of a model that is read.

  Args:
    saved: The file's leaves by path.
    names: The paths of those that may be read, by name.
    wanted: The model's leaves by name.
    kept: Names of the model that keep their initial values.
    optional: Names of the model that may do so.

  Raises:
    ValueError: An array has no counterpart, in the file or in the model. The
      message lists the paths.
  """
  has = {*names, *kept, *optional}
  missing = {name: x for name, x in wanted.items() if name not in has}
  unmatched = {n: saved[path] for n, path in names.items() if n not in wanted}
  if missing or unmatched:
    raise ValueError(
      f"the file lacks {_list(missing)} of the model, and the model lacks "
      f"{_list(unmatched)} of the file. `subtree` is the path of a part of "
      "the file; `rename` and `ignore` are patterns for its paths, `keep` for "
      "those of the model."
    )
  sources = {n: names[n] for n in wanted if n in names and n not in kept}
  if not sources:
    raise ValueError("keep matches all parameters of the model: none is read.")
  return sources


def _select(
  field: str, patterns: Sequence[str], paths: Collection[str], where: str
) -> set[str]:
  """Returns the paths in which a pattern is found; each must be in some."""
  selected: set[str] = set()
  for i, pattern in enumerate(patterns):
    argument = f"{field}[{i}]={pattern!r}"
    selected.update(patterns_lib.find(argument, pattern, where, list(paths)))
  return selected


def _list(leaves: Mapping[str, Any]) -> str:
  """Returns a number of arrays, and the first of them with their shapes."""
  texts = [f"{path} {tuple(leaf.shape)}" for path, leaf in leaves.items()]
  return (
    f"{len(texts)} arrays ({checks.listed(texts)})" if texts else "no arrays"
  )


# -- One array.


def _axes(
  path: str,
  have: Any,
  want: Any,
  transpose: Sequence[tuple[str, Sequence[int]]],
  may_reshape: bool,
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
    in_order, axes = axes, tuple(transpose[first][1])
    if len(axes) != len(in_order) or {*axes} != {*in_order}:
      raise ValueError(
        f"transpose[{first}]={transpose[first]!r} must have the axes of "
        f"{path}, which has the shape {have.shape} in the file."
      )
  shape = tuple(have.shape[axis] for axis in axes)
  # With as many dimensions, they would be in another order.
  may_reshape = may_reshape and len(shape) != len(want.shape)
  can_reshape = may_reshape and math.prod(shape) == math.prod(want.shape)
  if shape != want.shape and not can_reshape:
    raise ValueError(
      f"{path} has the shape {shape} in the file, and {want.shape} in the "
      "model. `keep` keeps its initial value; `transpose` and `reshape` change "
      "the array."
    )
  may_cast = cast and (np.iscomplexobj(want) or not np.iscomplexobj(have))
  if not (may_cast or np.can_cast(have.dtype, want.dtype)):
    raise ValueError(
      f"{path} is {have.dtype} in the file, and {want.dtype} in the model, "
      "which cannot hold all its values; cast=True rounds real ones."
    )
  return axes


def _asked(have: Any, axes: tuple[int, ...], want: jax.Array) -> reader.Asked:
  """Returns the shape, dtype and sharding with which to read a leaf."""
  # NumPy arrays have none: they go to the default device.
  sharding = getattr(want, "sharding", None) or jax.device_put(0).sharding
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


@functools.partial(jax.jit, static_argnums=(1, 2))
def _has_lost(x: jax.Array, dtype: Any, is_cast: bool) -> jax.Array:
  """Returns whether a cast to a dtype does more than round an array.

  Args:
    x: The array.
    dtype: The dtype.
    is_cast: Whether `x` is the result of a cast itself: infinities are new.
  """
  y = x.astype(dtype)
  if jnp.issubdtype(dtype, jnp.inexact):
    lost = ~jnp.isfinite(y) & (is_cast | jnp.isfinite(x))
  else:
    # A sign may be lost, and come back with the old dtype.
    lost = (y.astype(x.dtype) != x) | ((y < 0) != (x < 0))
  return lost.any()


def _finish(x: jax.Array, axes: tuple[int, ...], want: jax.Array) -> jax.Array:
  """Returns an array that was read with the model's dimensions and dtype."""
  if axes == tuple(range(want.ndim)) and x.dtype == want.dtype:
    return x

  def convert(x: jax.Array) -> jax.Array:
    return x.transpose(axes).reshape(want.shape).astype(want.dtype)

  sharding = getattr(want, "sharding", None)
  converted: jax.Array = jax.jit(convert, out_shardings=sharding)(x)
  return converted
