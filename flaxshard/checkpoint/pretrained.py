"""Initializes the parameters of a state from a checkpoint, for fine-tuning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import logging
import os
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from flaxshard.checkpoint import digests
from flaxshard.checkpoint import locate
from flaxshard.checkpoint import match_parameters
from flaxshard.checkpoint import reader
from flaxshard.checkpoint import restore_plan
from flaxshard.checkpoint import safetensors_files
from flaxshard.checkpoint import step as step_lib
from flaxshard.checkpoint import step_names
from flaxshard.core import checks
from flaxshard.core import files
from flaxshard.core import multihost
from flaxshard.core import trees
from flaxshard.state import create
from flaxshard.state import fields as fields_lib
from flaxshard.state import lora
from flaxshard.state.train_state import TrainState

_log = logging.getLogger(__name__)

PyTree = Any
_State = TypeVar("_State")
_Result = TypeVar("_Result")


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
      names = {
        f"{group}/..." if group in match_parameters.TRAINING_STATE else path: 0
        for path in self.unused
        for group in [path.partition("/")[0]]
      }
      lines.append(f"  not used of the file: {', '.join(names)}")
    return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class _ModelArrays:
  """The arrays of a state, or of a tree of parameters, that may be read.

  Attributes:
    state: The state, or the tree.
    fields: The trees of arrays, by field; a tree of parameters is `params`.
    paths: The field and the path in it of each array, by its path in the model.
    leaves: The arrays, by the same paths.
    factors: Paths of the factors of LoRA, which most files lack.
  """

  state: Any
  fields: Mapping[str, PyTree]
  paths: Mapping[str, tuple[str, tuple[str, ...]]]
  leaves: Mapping[str, jax.Array]
  factors: frozenset[str]

  @classmethod
  def of(cls, state: Any) -> _ModelArrays:
    """Returns the arrays of a state or a tree of parameters."""
    if isinstance(state, TrainState):
      fields = fields_lib.variables(state)
      # Random streams begin with the new run.
      fields.pop("rngs", None)
    else:
      fields = {"params": state}
    has_lora = isinstance(getattr(state, "apply_fn", None), lora.Apply)
    frozen = lora.FROZEN if has_lora else None
    paths, leaves = {}, {}
    for field, tree in fields.items():
      # The frozen parameters are parameters of the model.
      prefix = () if field in ("params", frozen) else (field,)
      for path, leaf in trees.leaves_by_path(tree).items():
        name = "/".join((*prefix, *path))
        if not isinstance(leaf, jax.Array):
          raise TypeError(
            f"state must hold JAX arrays, got {checks.describe(leaf)} at "
            f"{name}. Give the state of create_train_state without abstract."
          )
        paths[name] = field, path
        leaves[name] = leaf
    factors: list[str] = []
    if has_lora:
      of_model = lora.model_leaves(fields["params"], fields[lora.FROZEN])
      factors = [
        name
        for name, (field, path) in paths.items()
        if field == "params" and path not in of_model
      ]
    return cls(state, fields, paths, leaves, frozenset(factors))

  def replace(self, arrays: Mapping[str, jax.Array]) -> Any:
    """Returns the state or the tree with other arrays, by their paths."""
    by_field = {
      self.paths[path]: x for path, x in {**self.leaves, **arrays}.items()
    }
    fields = {
      field: jax.tree.unflatten(
        jax.tree.structure(tree),
        [by_field[field, path] for path in trees.leaves_by_path(tree)],
      )
      for field, tree in self.fields.items()
    }
    if not isinstance(self.state, TrainState):
      return fields["params"]
    return create.reinitialize(self.state, fields)


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
  patterns = match_parameters.Patterns(
    rename, keep, ignore, transpose, reshape, cast
  )
  path = checks.path("path", path)
  if not isinstance(subtree, str):
    raise TypeError(f"subtree must be a string, got {subtree!r}.")
  model = _ModelArrays.of(state)
  directory = step_names.as_path(files.absolute(path))
  opened = _open_safetensors(directory)
  if opened is None:
    arrays, report = _open_steps(
      directory, step, item, lambda step: _read(step, model, patterns, subtree)
    )
  elif step is not None or item is not None:
    raise ValueError(
      f"step={step!r} and item={item!r} must be None for the safetensors file "
      f"{opened.directory}."
    )
  else:
    arrays, report = _read(opened, model, patterns, subtree)
  _log.info("%s", report)
  return model.replace(arrays), report


def _open_steps(
  directory: step_names.Directory,
  step: int | None,
  item: str | None,
  read: Callable[[restore_plan.CheckpointStep], _Result],
) -> _Result:
  """Returns what `read` returns for the step at a path, or the newest there."""

  def read_step(where: step_names.Directory) -> _Result:
    return read(restore_plan.open_step(where, item))

  if reader.is_step(directory) and step in (None, locate.step_of(directory)):
    return read_step(directory)
  directory = locate.directory_of_steps(directory)
  return step_lib.read_newest(
    directory,
    lambda: step_names.steps(directory),
    step,
    lambda _, where: read_step(where),
  )[1]


def _open_safetensors(
  path: step_names.Directory,
) -> restore_plan.CheckpointStep | None:
  """Returns the safetensors files at a path, or None if there are none."""
  with multihost.raise_on_all_processes(ValueError, ImportError):
    file = safetensors_files.find(path)
    if file is None:
      return None
    tree = safetensors_files.open_tree(file)
    # There are no digests; the package checks the sizes.
    return restore_plan.CheckpointStep(file, (tree,))


def _read(
  opened: restore_plan.CheckpointStep,
  model: _ModelArrays,
  patterns: match_parameters.Patterns,
  subtree: str,
) -> tuple[dict[str, jax.Array], InitReport]:
  """Returns the arrays of a file by their paths in the model, and a report."""
  saved = _leaves_of(opened, subtree)
  try:
    match = match_parameters.match(
      {name: leaf for name, (_, _, leaf) in saved.items()},
      model.leaves,
      patterns,
      collections=model.fields.keys() - {"params"},
      optional=model.factors,
    )
  except ValueError as e:
    raise ValueError(f"{opened.directory}: {e}") from e

  def read_leaves() -> dict[str, jax.Array]:
    arrays: dict[str, jax.Array] = {}
    for tree in opened.saved_trees:
      sources = {
        path: (source, saved[source.path][1])
        for path, source in match.sources.items()
        if saved[source.path][0] is tree
      }
      found = tree.read(
        {
          key: _asked(tree.leaves[key], source, model.leaves[path])
          for path, (source, key) in sources.items()
        }
      )
      arrays |= {
        path: _finish(found[key], source, model.leaves[path])
        for path, (source, key) in sources.items()
      }
    return arrays

  with multihost.raise_on_all_processes(digests.Damaged, ValueError):
    arrays = read_leaves()
  report = InitReport(
    str(opened.directory),
    {path: source.path for path, source in match.sources.items()},
    match.kept,
    match.unused,
  )
  return arrays, report


def _leaves_of(
  opened: restore_plan.CheckpointStep, subtree: str
) -> dict[str, tuple[reader.SavedTree, tuple[str, ...], Any]]:
  """Returns the leaves below a path of a file, with their tree and full path.

  Raises:
    ValueError: There is no leaf below the path.
  """
  prefix = f"{subtree.strip('/')}/" if subtree.strip("/") else ""
  leaves = {
    "/".join(path): (tree, path, leaf)
    for tree in opened.saved_trees
    for path, leaf in tree.leaves.items()
  }
  below = {
    name.removeprefix(prefix): leaf
    for name, leaf in leaves.items()
    if name.startswith(prefix)
  }
  if not below:
    names = ", ".join({name.partition("/")[0]: None for name in leaves})
    raise ValueError(
      f"{opened.directory}: subtree={subtree!r} has no arrays; the file has "
      f"{names or 'no arrays'}."
    )
  return below


def _asked(
  leaf: Any, source: match_parameters.Source, wanted: jax.Array
) -> jax.ShapeDtypeStruct:
  """Returns the shape, dtype and sharding with which to read a leaf."""
  sharding = wanted.sharding
  if isinstance(sharding, jax.sharding.NamedSharding):
    spec: Sequence[Any] = tuple(sharding.spec)
    if source.reshape:
      spec = ()  # not split before it has the model's dimensions
    elif source.axes is not None:
      # Dimension i after the transposition is dimension axes[i] of the file.
      padded = (*spec, *[None] * (wanted.ndim - len(spec)))
      by_file = dict(zip(source.axes, padded, strict=True))
      spec = [by_file[i] for i in range(wanted.ndim)]
    sharding = jax.sharding.NamedSharding(sharding.mesh, jax.P(*spec))
  return jax.ShapeDtypeStruct(
    leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype), sharding=sharding
  )


def _finish(
  x: jax.Array, source: match_parameters.Source, wanted: jax.Array
) -> jax.Array:
  """Returns an array that was read with the model's dimensions and dtype."""
  unchanged = source.axes is None and not source.reshape
  if unchanged and x.dtype == wanted.dtype:
    return x

  def convert(x: jax.Array) -> jax.Array:
    x = jnp.transpose(x, source.axes or range(x.ndim))
    return x.reshape(wanted.shape).astype(wanted.dtype)

  converted: jax.Array = jax.jit(convert, out_shardings=wanted.sharding)(x)
  return converted
