"""Initializes the parameters of a state from a checkpoint, for fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import logging
import os
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from flaxshard.checkpoint import choose
from flaxshard.checkpoint import digests
from flaxshard.checkpoint import matching
from flaxshard.checkpoint import reader
from flaxshard.checkpoint import safetensors_files
from flaxshard.checkpoint import steps
from flaxshard.core import multihost
from flaxshard.core import trees
from flaxshard.state import create
from flaxshard.state import fields as fields_lib
from flaxshard.state import lora
from flaxshard.state.train_state import TrainState

_log = logging.getLogger(__name__)

PyTree = Any
_State = TypeVar("_State")
_Leaves = Mapping[reader.Path, reader.SavedLeaf]


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
      lines.append(f"  not used of the file: {matching.listed(self.unused)}")
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
  patterns = matching.Patterns(rename, keep, ignore, transpose, reshape, cast)
  if not isinstance(subtree, str):
    raise TypeError(f"subtree must be a string, got {subtree!r}.")
  fields = _fields_of(state)
  where, leaves = _open(steps.as_path(path), step, item)
  saved = _below(where, leaves, subtree)
  try:
    sources = matching.match(
      saved,
      fields.leaves,
      patterns,
      collections=fields.trees.keys() - {"params"},
      optional=fields.factors,
    )
  except ValueError as e:
    raise ValueError(f"{where}: {e}") from e
  with multihost.raise_on_all_processes(digests.Damaged, ValueError):
    found = reader.read(
      {
        path: (saved[source.path], _asked(saved[source.path], source, wanted))
        for path, source in sources.items()
        for wanted in [fields.leaves[path]]
      }
    )
    arrays = {
      path: _finish(x, sources[path], fields.leaves[path])
      for path, x in found.items()
    }
  read = {source.path for source in sources.values()}
  report = InitReport(
    str(where),
    {path: source.path for path, source in sources.items()},
    tuple(path for path in fields.leaves if path not in sources),
    tuple(path for path in saved if path not in read),
  )
  _log.info("%s", report)
  new: _State = _replace(state, fields, arrays)
  return new, report


class _Fields(NamedTuple):
  """The arrays of a state, or of a tree of parameters, that may be read.

  Attributes:
    trees: The trees of arrays, by field; a tree of parameters is `params`.
    leaves: The arrays, by their path in the model, in the order of the trees.
    factors: Paths of the factors of LoRA, which most files lack.
  """

  trees: Mapping[str, PyTree]
  leaves: Mapping[str, jax.Array]
  factors: frozenset[str]


def _fields_of(state: Any) -> _Fields:
  """Returns the arrays of a state or a tree of parameters."""
  fields = {"params": state}
  if isinstance(state, TrainState):
    fields = fields_lib.variables(state)
    # Random streams begin with the new run.
    fields.pop("rngs", None)
  has_lora = isinstance(getattr(state, "apply_fn", None), lora.Apply)
  leaves, factors = {}, set()
  of_model: Mapping[Any, Any] = {}
  if has_lora:
    of_model = lora.model_leaves(fields["params"], fields[lora.FROZEN])
  for field, tree in fields.items():
    # The frozen parameters are parameters of the model.
    is_params = field == "params" or (has_lora and field == lora.FROZEN)
    for path, leaf in trees.leaves_by_path(tree).items():
      name = "/".join(path if is_params else (field, *path))
      leaves[name] = leaf
      if has_lora and field == "params" and path not in of_model:
        factors.add(name)
  return _Fields(fields, leaves, frozenset(factors))


def _replace(state: Any, fields: _Fields, arrays: Mapping[str, Any]) -> Any:
  """Returns the state or the tree with other arrays, by their paths."""
  leaves = iter([arrays.get(path, x) for path, x in fields.leaves.items()])
  new = {
    field: jax.tree.map(lambda _: next(leaves), tree)
    for field, tree in fields.trees.items()
  }
  if not isinstance(state, TrainState):
    return new["params"]
  return create.reinitialize(state, new)


def _open(path: Any, step: int | None, item: str | None) -> tuple[Any, _Leaves]:
  """Returns the file or the step at a path, and its leaves by path."""
  with multihost.raise_on_all_processes(ValueError, ImportError):
    file = safetensors_files.find(path)
    if file is not None:
      # There are no digests; the package checks the sizes.
      return file, safetensors_files.open_leaves(file)
  return choose.read(
    path, step, lambda where: (where, reader.open_step(where, item))
  )


def _below(
  where: Any, leaves: _Leaves, subtree: str
) -> dict[str, reader.SavedLeaf]:
  """Returns the leaves below a path of a file, by the rest of their path."""
  prefix = f"{subtree.strip('/')}/".lstrip("/")
  by_name = {"/".join(path): leaf for path, leaf in leaves.items()}
  below = {
    name.removeprefix(prefix): leaf
    for name, leaf in by_name.items()
    if name.startswith(prefix)
  }
  if not below:
    names = ", ".join({name.partition("/")[0]: None for name in by_name})
    raise ValueError(
      f"{where}: subtree={subtree!r} has no arrays; the file has "
      f"{names or 'no arrays'}."
    )
  return below


def _asked(
  leaf: Any, source: matching.Source, wanted: jax.Array
) -> reader.Asked:
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
  x: jax.Array, source: matching.Source, wanted: jax.Array
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
