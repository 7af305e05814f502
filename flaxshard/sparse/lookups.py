"""Gradients of tables as rows, by tapping their lookups.

The loss is traced. Where its program looks up rows of a table, the program goes
on with these rows plus a tap: an input that is zero, and whose gradient is the
gradient of the rows. The table itself is a constant, so that nothing of its
size is made.

What a program does with each row of a table before it looks rows up, such as a
cast or a mask, is done with the rows instead. A table that is used in another
way has a whole gradient, with a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend import core as jax_core
import jax.numpy as jnp
import numpy as np

from flaxshard.core import checks
from flaxshard.core import jaxprs
from flaxshard.core import source_lines
from flaxshard.core import trees
from flaxshard.core.indexed_slices import IndexedSlices

PyTree = Any

# The equations whose programs are looked into.
_CALLS = frozenset("jit pjit closed_call eval_jaxpr".split())


def value_and_grad(
  fn: Callable[[PyTree], tuple[jax.Array, Any]],
  params: PyTree,
  tables: Container[trees.Path],
  differentiate: Callable[..., Any],
) -> tuple[tuple[jax.Array, Any], PyTree]:
  """Differentiates a function; the gradients of tables are `IndexedSlices`.

  Args:
    fn: Returns a real scalar and a tree of arrays. It is traced once.
    params: The argument of `fn`.
    tables: The paths of those whose gradients shall be `IndexedSlices`.
    differentiate: `jax.value_and_grad` of a function that returns a scalar and
      auxiliary output, called with the function and its argument.

  Returns:
    What `differentiate(fn, params)` returns, but for gradients that are
    `IndexedSlices`. Their row numbers are int32, may occur several times, and
    may be padding.

  Example:
    >>> params = {"table": jnp.ones((1000, 2)), "bias": jnp.ones(2)}
    >>> def fn(params):
    ...   rows = params["table"][jnp.array([7, 3])]
    ...   return (rows * params["bias"]).sum(), None
    >>> tables = [(jax.tree_util.DictKey("table"),)]
    >>> (loss, _), grads = value_and_grad(
    ...     fn, params, tables,
    ...     lambda fn, x: jax.value_and_grad(fn, has_aux=True)(x))
    >>> grads["table"].indices.tolist(), grads["bias"].tolist()
    ([7, 3], [2.0, 2.0])
  """
  flat, treedef = jax.tree_util.tree_flatten_with_path(params)
  leaves = [x for _, x in flat]
  program, shapes = jax.make_jaxpr(fn, return_shape=True)(params)
  wanted = [i for i, (path, _) in enumerate(flat) if path in tables]
  trial = _Evaluation(None)
  jax.eval_shape(lambda x: trial.run(program, x, wanted), leaves)
  for leaf, eqn in trial.dense.items():
    checks.warn(_describe_dense(trees.path_string(flat[leaf][0]), eqn))
  wanted = [i for i in wanted if i not in trial.dense]
  found = [(i, shape) for i, shape in trial.found if i in wanted]

  def tapped(trained: tuple[dict[int, Any], list[jax.Array]]) -> Any:
    others, taps = trained
    evaluation = _Evaluation(iter(taps))
    outputs = evaluation.run(
      program, [others.get(i, x) for i, x in enumerate(leaves)], wanted
    )
    value, aux = jax.tree.unflatten(jax.tree.structure(shapes), outputs)
    return value, (aux, evaluation.used)

  others = {i: x for i, x in enumerate(leaves) if i not in wanted}
  taps = [jnp.zeros(shape, leaves[i].dtype) for i, shape in found]
  (value, (aux, used)), (grads, rows) = differentiate(tapped, (others, taps))
  for i in wanted:
    x = leaves[i]
    no_rows = jnp.zeros(0, _index_dtype(x.shape[0]))
    grads[i] = IndexedSlices(no_rows, x[:0], x.shape)
  # As a backward pass has them: the last lookup first.
  for (i, _), indices, g in reversed([*zip(found, used, rows, strict=True)]):
    x = leaves[i]
    grads[i] += IndexedSlices(indices, g.astype(x.dtype), x.shape)
  new = [grads[i] for i in range(len(leaves))]
  return (value, aux), jax.tree.unflatten(treedef, new)


def _describe_dense(path: str, eqn: Any) -> str:
  """Returns the warning for a sparse parameter whose gradient is an array."""
  line = source_lines.equation_line(eqn)
  cause = f"{eqn.primitive.name}{f' ({line})' if line else ''}"
  return (
    f"value_and_grad: gradient and update of the sparse parameter {path!r} are "
    f"dense, not rows: {cause} contributes to all rows, or Explicit axes split "
    "the table. Look rows up outside of loops, conditionals and jax.checkpoint "
    "and with Auto axes; or remove the parameter from the sparse patterns."
  )


class _Lookup(NamedTuple):
  """The rows that a lookup takes.

  Attributes:
    read: Numbers `[n]` of rows that exist.
    used: The same, but the number of rows of the table where the gradient of a
      row is dropped.
  """

  read: jax.Array
  used: jax.Array


@dataclasses.dataclass(frozen=True)
class _Table:
  """A table, or what a program makes of each of its rows.

  Attributes:
    leaf: The parameter.
    rows: Returns the rows of a lookup, `[n, ...]`, or all rows for None.
  """

  leaf: int
  rows: Callable[[_Lookup | None], jax.Array]


class _Evaluation:
  """Evaluates a program with taps behind the lookups of its tables.

  Attributes:
    taps: The taps in the order of the lookups; None for a trial, which keeps no
      arrays: JAX would report a leaked tracer.
    found: The lookups of a trial: their tables, and the shapes of their rows.
    used: With taps, the row numbers of the lookups.
    dense: The tables that were used in another way, and the equation.
  """

  def __init__(self, taps: Iterator[jax.Array] | None):
    self.taps = taps
    self.found: list[tuple[int, tuple[int, ...]]] = []
    self.used: list[jax.Array] = []
    self.dense: dict[int, Any] = {}

  def run(
    self, program: Any, leaves: Sequence[Any], tables: Sequence[int]
  ) -> list[Any]:
    """Returns the outputs of a `ClosedJaxpr`, of which the first is a loss."""
    inputs = [
      self._table(i, x) if i in tables else x for i, x in enumerate(leaves)
    ]
    outputs = self._evaluate(program.jaxpr, program.consts, inputs, [0])
    return [_take(x, None) for x in outputs]

  def _table(self, leaf: int, array: jax.Array) -> _Table:

    def rows(lookup: _Lookup | None) -> jax.Array:
      if lookup is None:
        return array
      values = _take(array, lookup)
      if self.taps is None:
        self.found.append((leaf, values.shape))
        return values
      self.used.append(lookup.used)
      return _attach(values, next(self.taps))

    return _Table(leaf, rows)

  def _evaluate(
    self,
    program: Any,
    consts: Sequence[Any],
    inputs: Sequence[Any],
    wanted: Sequence[int],
  ) -> list[Any]:
    """Returns the outputs of a program, some of which may be tables.

    Args:
      program: A `jax.extend.core.Jaxpr`.
      consts: Its constants.
      inputs: Its inputs: arrays and tables.
      wanted: Positions of the outputs on which the loss depends.
    """
    values = dict(zip(program.constvars, consts, strict=True))
    values |= zip(program.invars, inputs, strict=True)
    contributing = _ancestors(program, [program.outvars[i] for i in wanted])

    def read(atom: Any) -> Any:
      return atom.val if _is_literal(atom) else values[atom]

    used = {x for eqn in program.eqns for x in _variables(eqn)}
    used.update(x for x in program.outvars if not _is_literal(x))

    def run_plain(eqns: list[Any]) -> None:
      made = {x: None for eqn in eqns for x in eqn.outvars}
      needed = {x: None for eqn in eqns for x in _variables(eqn)}
      piece = jax_core.Jaxpr(
        (),
        [x for x in needed if x not in made],
        [x for x in made if x in used],
        eqns,
        program.effects,
        program.debug_info,
      )
      args = [_take(read(x), None) for x in piece.invars]
      run = jax_core.jaxpr_as_fun(jax_core.ClosedJaxpr(piece, ()))
      values.update(zip(piece.outvars, run(*args), strict=True))

    plain: list[Any] = []
    for eqn in program.eqns:
      if not any(isinstance(values.get(x), _Table) for x in _variables(eqn)):
        plain.append(eqn)
        continue
      # Many at once: each keeps its line and its scope in the model.
      run_plain(plain)
      plain = []
      args = [read(x) for x in eqn.invars]
      positions = [i for i, x in enumerate(eqn.outvars) if x in contributing]
      if not positions or not _has_derivative(eqn):
        run_plain([eqn])
      elif eqn.primitive.name in _CALLS:
        inner = jaxprs.called(eqn)
        outputs = self._evaluate(
          jaxprs.open_program(inner),
          getattr(inner, "consts", ()),
          args,
          positions,
        )
        values.update(zip(eqn.outvars, outputs, strict=True))
      elif (output := _follow(eqn, args)) is not None:
        values[eqn.outvars[0]] = output
      else:
        for x in args:
          if isinstance(x, _Table):
            self.dense.setdefault(x.leaf, eqn)
        run_plain([eqn])
    run_plain(plain)
    return [read(x) for x in program.outvars]


def _variables(eqn: Any) -> list[Any]:
  """Returns the variables that an equation reads."""
  return [x for x in eqn.invars if not _is_literal(x)]


def _is_literal(atom: Any) -> bool:
  return isinstance(atom, jax_core.Literal)


def _ancestors(program: Any, outputs: Iterable[Any]) -> set[Any]:
  """Returns the variables on which outputs of a program depend."""
  found = {x for x in outputs if not _is_literal(x)}
  for eqn in reversed(program.eqns):
    if not found.isdisjoint(eqn.outvars):
      found.update(_variables(eqn))
  return found


def _has_derivative(eqn: Any) -> bool:
  return eqn.primitive.name != "stop_gradient" and any(
    jnp.issubdtype(x.aval.dtype, jnp.inexact) for x in eqn.outvars
  )


@jax.custom_jvp
def _attach(rows: jax.Array, tap: jax.Array) -> jax.Array:
  """Returns rows of a constant table, whose derivative is that of a tap."""
  # Not `rows + tap`, which would make 0.0 of -0.0.
  del tap
  return rows


@_attach.defjvp
def _attach_tangent(primals: Any, tangents: Any) -> Any:
  return primals[0], tangents[1]


# -- Operations on tables. They return rows or another table, or None where the
# gradient is that of the whole table.


def _follow(eqn: Any, args: Sequence[Any]) -> Any:
  name = eqn.primitive.name
  if name in jaxprs.ELEMENTWISE:
    return _elementwise(eqn, args)
  is_table = [isinstance(x, _Table) for x in args]
  if name not in _OPERATIONS or not is_table[0] or any(is_table[1:]):
    return None
  return _OPERATIONS[name](eqn, *args)


def _take(x: Any, lookup: _Lookup | None) -> Any:
  """Returns rows, of all for None, of a table or of an array beside it."""
  if isinstance(x, _Table):
    return x.rows(lookup)
  if lookup is None or not np.ndim(x):
    return x
  return x.at[lookup.read].get(mode="clip")


def _drop_unused(rows: jax.Array, lookup: _Lookup) -> jax.Array:
  """Stops the gradients of rows where JAX drops that of the table's row."""
  is_used = lookup.used == lookup.read
  is_used = is_used.reshape(-1, *[1] * (rows.ndim - 1))
  return jnp.where(is_used, rows, lax.stop_gradient(rows))


def _elementwise(eqn: Any, args: Sequence[Any]) -> _Table | None:
  """Accepts an operation, unless it repeats the row of a table of one row."""
  num_rows = eqn.outvars[0].aval.shape[0]
  for variable, x in zip(eqn.invars, args, strict=True):
    if isinstance(x, _Table) and variable.aval.shape[0] != num_rows:
      return None
  apply = functools.partial(eqn.primitive.bind, **eqn.params)

  def rows(lookup: _Lookup | None) -> jax.Array:
    values: jax.Array = apply(*(_take(x, lookup) for x in args))
    if lookup is None or not any(isinstance(x, jax.Array) for x in args):
      return values
    return _drop_unused(values, lookup)

  return _Table(next(x.leaf for x in args if isinstance(x, _Table)), rows)


def _reshape(eqn: Any, table: _Table) -> _Table | None:
  """Accepts a `reshape` or `squeeze` that keeps the first dimension."""
  old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
  # A `reshape` with dimensions transposes. A `squeeze` has the dimensions that
  # it removes.
  dims = eqn.params["dimensions"]
  is_squeeze = eqn.primitive.name == "squeeze"
  if not new or old[0] != new[0] or (0 in dims if is_squeeze else dims):
    return None

  def rows(lookup: _Lookup | None) -> jax.Array:
    old_rows = table.rows(lookup)
    return old_rows.reshape(len(old_rows), *new[1:])

  return _Table(table.leaf, rows)


def _scatter(
  eqn: Any, table: _Table, indices: jax.Array, updates: jax.Array
) -> _Table | None:
  """Overwrites whole rows, such as that of a padding id."""
  dims = eqn.params["dimension_numbers"]
  shape = eqn.invars[0].aval.shape
  sizes = iter(dims.update_window_dims)
  window = [
    1 if d in dims.inserted_window_dims else updates.shape[next(sizes)]
    for d in range(len(shape))
  ]
  if dims.operand_batching_dims or window != [1, *shape[1:]]:
    return None
  gone = _lookup(
    indices, dims.scatter_dims_to_operand_dims, eqn.params["mode"], shape[0]
  ).used

  def rows(lookup: _Lookup | None) -> jax.Array:
    old = table.rows(None)
    whole: jax.Array = eqn.primitive.bind(old, indices, updates, **eqn.params)
    if lookup is None:
      return whole
    new = table.rows(lookup)
    is_gone = jnp.isin(lookup.read, gone).reshape(-1, *[1] * (new.ndim - 1))
    return jnp.where(is_gone, _drop_unused(_take(whole, lookup), lookup), new)

  return _Table(table.leaf, rows)


def _gather(eqn: Any, table: _Table, indices: jax.Array) -> jax.Array | None:
  dims, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
  table_shape, shape = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
  is_row = tuple(eqn.params["slice_sizes"]) == (1, *table_shape[1:])
  # The type of a table says by which Explicit axes it is split.
  is_split = any(eqn.invars[0].aval.sharding.spec)
  if dims.operand_batching_dims or not is_row or is_split:
    return None
  lookup = _lookup(indices, dims.start_index_map, mode, table_shape[0])
  rows = table.rows(lookup)
  if mode == lax.GatherScatterMode.FILL_OR_DROP:
    fill = eqn.params["fill_value"]
    is_row = (lookup.used < table_shape[0]).reshape(-1, *[1] * (rows.ndim - 1))
    rows = jnp.where(is_row, rows, jnp.nan if fill is None else fill)
  # The dimensions of the result that count rows, and those of a row.
  order = [d for d in range(len(shape)) if d not in dims.offset_dims]
  order += dims.offset_dims
  rows = rows.reshape([shape[d] for d in order])
  return rows.transpose(sorted(range(len(shape)), key=order.__getitem__))


def _slice(eqn: Any, table: _Table, *starts: jax.Array) -> jax.Array | None:
  """Takes a `slice`, or with `starts` a `dynamic_slice`, of whole rows."""
  shape, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
  # A slice of most rows is no lookup.
  if new[1:] != shape[1:] or (not starts and 2 * new[0] > shape[0]):
    return None
  if starts:
    # As JAX does, it moves a slice that would end outside.
    start, step = jnp.clip(_wide(starts[0]), 0, shape[0] - new[0]), 1
  else:
    start = jnp.asarray(eqn.params["start_indices"][0])
    step = (eqn.params["strides"] or [1])[0]
  indices = (start + step * jnp.arange(new[0])).astype(_index_dtype(shape[0]))
  return table.rows(_Lookup(indices, indices))


def _lookup(
  indices: jax.Array, dims: Sequence[int], mode: Any, num_rows: int
) -> _Lookup:
  """Returns the lookup of a gather, or of what a scatter writes.

  Args:
    indices: The indices, with those of a row in the last dimension.
    dims: The dimension of the table that each of these counts.
    mode: What happens to indices out of range.
    num_rows: The number of rows of the table.
  """
  indices = _wide(indices.reshape(-1, indices.shape[-1]))
  row = jnp.zeros(len(indices), _index_dtype(num_rows))
  is_inside = jnp.ones(len(indices), bool)
  for column, d in enumerate(dims):
    given, last = indices[:, column], num_rows - 1 if d == 0 else 0
    is_inside &= (given >= 0) & (given <= last)
    if d == 0:
      row = jnp.clip(given, 0, last).astype(row.dtype)
  if mode == lax.GatherScatterMode.CLIP:
    return _Lookup(row, row)
  return _Lookup(row, jnp.where(is_inside, row, num_rows))


def _wide(indices: jax.Array) -> jax.Array:
  """Returns indices in a dtype into which the number of any row fits."""
  return indices.astype(jnp.int32) if indices.dtype.itemsize < 4 else indices


def _index_dtype(num_rows: int) -> Any:
  """Returns the dtype of row numbers: they and the padding fit into it."""
  return jnp.dtype("int32" if num_rows < 2**31 else "int64")


_OPERATIONS: dict[str, Callable[..., Any]] = {
  "dynamic_slice": _slice,
  "gather": _gather,
  "reshape": _reshape,
  "scatter": _scatter,
  "sharding_constraint": lambda eqn, table: table,
  "slice": _slice,
  "squeeze": _reshape,
}
