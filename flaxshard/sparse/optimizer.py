"""`sparse_rows`: an optimizer that updates the rows that a gradient has."""

from __future__ import annotations

from collections.abc import Sequence
import functools
from typing import Any, get_args, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from flaxshard.core import checks
from flaxshard.core import gradients
from flaxshard.core import indexed_slices
from flaxshard.core import patterns as patterns_lib
from flaxshard.core import tf_optimizers
from flaxshard.core import trees
from flaxshard.core.gradients import SparseRows
from flaxshard.sparse import row_update

PyTree = Any

# What happens to the rows that a step did not use; see `sparse_rows`.
Semantics = Literal["lazy", "tf"]

# The states of transformations that update each row of a table by itself, or
# with sums to which a gradient of zero adds nothing. These have no slots.
_SLOTLESS = (
  optax.ApplyIfFiniteState,
  optax.EmptyState,
  optax.InjectHyperparamsState,
  optax.MaskedState,
  optax.PartitionState,
  optax.ScaleByScheduleState,
  optax.ZeroNansState,
  optax.contrib.ReduceLROnPlateauState,
)
# Of these TensorFlow's kernels for sparse gradients update rows alone.
_TF_SLOTS = (
  optax.ScaleByAdaDeltaState,
  optax.ScaleByRmsState,
  optax.ScaleByRStdDevState,
  optax.ScaleByRssState,
  optax.TraceState,
  tf_optimizers.AdagradDAState,
  tf_optimizers.FtrlState,
  tf_optimizers.ProximalAdagradState,
  tf_optimizers.ProximalGradientDescentState,
)
_OTHER_SLOTS = (
  optax.EmaState,
  optax.ScaleByAdamState,
  optax.ScaleByAdanState,
  optax.ScaleByAmsgradState,
  optax.ScaleByBeliefState,
  optax.ScaleByLionState,
  optax.ScaleByRpropState,
)
_KNOWN = (*_SLOTLESS, *_TF_SLOTS, *_OTHER_SLOTS, optax.MaskedNode)


def sparse_rows(
  tx: Any,
  patterns: Sequence[str],
  semantics: str = "lazy",
  *,
  argument: str = "sparse_rows: patterns",
) -> SparseRows:
  """Returns an optimizer that updates the rows of tables that a step used.

  A `TrainState` with this optimizer computes an `IndexedSlices` as the gradient
  of a table. The update takes the rows of the parameter and of its slots,
  passes them to `tx` in place of the whole arrays, and puts the results back in
  place. Other parameters are updated by `tx` as usual. Step counts and
  schedules count steps, not uses of a row.

  Of `tx`, the transformations of optax that are known to work row by row are
  those of SGD, momentum, Adagrad, RMSProp, Adadelta, Adam and its relatives,
  Lion, Rprop and `fs.optimizers`, with masks, groups, schedules and clipping.
  Those without a state of their own are tried on small arrays. With others,
  such as Adafactor, LAMB and LARS, gradients become whole arrays, and a warning
  says why.

  Call it last, around the whole optimizer.

  Args:
    tx: The optax optimizer.
    patterns: Regular expressions. A parameter is a table if one of them is
      found in its path, such as `embed/embedding`.
    semantics: What happens to the rows that a step did not use:

      * `"lazy"`: they and their slots stay as they are.
      * `"tf"`: what TensorFlow's kernels do. With Adam the moments of all rows
        decay, and all rows move: the update is that of a whole gradient, at the
        costs of one. With SGD, momentum, Adagrad, RMSProp, Adadelta and
        `fs.optimizers` it is `"lazy"`. TensorFlow has no kernel for other
        optimizers: their gradients become whole arrays, with a warning.

    argument: Name of `patterns` for errors.

  Returns:
    An optax optimizer. Its state is that of `tx`. Its updates have an
    `IndexedSlices` where the gradients have one, which `optax.apply_updates`
    adds in place.

  Raises:
    TypeError: `patterns` is not a sequence of strings.
    ValueError: There is no pattern, one is not a regular expression, or
      `semantics` does not exist. From `init`: a pattern matches no parameter,
      or one that is not a table, a floating-point array with two dimensions.

  Example:
    >>> import flaxshard as fs, jax.numpy as jnp, optax
    >>> params = {"table": jnp.ones((4, 1)), "bias": jnp.ones(1)}
    >>> tx = fs.sparse_rows(optax.sgd(0.5), ["table"])
    >>> slices = fs.IndexedSlices([2, 2], jnp.ones((2, 1)), (4, 1))
    >>> grads = {"table": slices, "bias": jnp.ones(1)}
    >>> updates, _ = tx.update(grads, tx.init(params), params)
    >>> optax.apply_updates(params, updates)["table"].ravel().tolist()
    [1.0, 1.0, 0.0, 1.0]

  References:
    `tf.train.Optimizer`, whose sparse kernels update rows.
  """
  if isinstance(tx, SparseRows):
    raise ValueError(
      "sparse_rows: tx updates tables by rows already; give all patterns in "
      "one call."
    )
  patterns = patterns_lib.check(argument, patterns)
  if not patterns:
    raise ValueError(f"{argument} must have at least one pattern.")
  is_sparse = argument.endswith("sparse")
  name = f"{argument}_semantics" if is_sparse else "semantics"
  checks.one_of(name, semantics, get_args(Semantics))
  return _create(tx, patterns, semantics, argument)


# JAX compares optimizers by their functions: a step is compiled once for all
# states that are made alike.
@functools.lru_cache(maxsize=16)
def _create(
  tx: Any,
  patterns: tuple[str, ...],
  semantics: str,
  argument: str,
  *split: tuple[trees.Path, jax.sharding.NamedSharding],
) -> SparseRows:
  """Returns the optimizer of `sparse_rows`.

  Args:
    tx: The optax optimizer.
    patterns: The checked patterns.
    semantics: What happens to the rows that a step did not use.
    argument: Name of `patterns` for errors.
    *split: The items of `SparseRows.shardings`.
  """
  shardings = dict(split)
  inner = optax.with_extra_args_support(tx)

  def init(params: PyTree) -> PyTree:
    tables = _find_tables(created, params)
    state = inner.init(params)
    whole, reason = _find_whole(tx, state, params, tables, semantics)
    if reason:
      checks.warn(
        f"{argument}={patterns!r}: {reason}. So gradients of "
        f"{', '.join(map(trees.path_string, whole))} become whole arrays, and "
        "a step takes as long as without patterns."
      )
    return state

  def update(
    updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
  ) -> tuple[PyTree, PyTree]:
    tables = gradients.find_rows(updates)
    if not tables:
      extra = indexed_slices.to_dense(extra)
      return inner.update(updates, state, params, **extra)
    if params is None:
      raise ValueError("sparse_rows: update needs params, got None.")
    whole, _ = _find_whole(tx, state, params, tables, semantics)
    updates = indexed_slices.to_dense(updates, keep=tables.keys() - whole)
    return row_update.update(inner, updates, state, params, extra, shardings)

  created = SparseRows(
    init,
    update,
    inner=tx,
    frozen=tx.frozen if isinstance(tx, gradients.Frozen) else (),
    patterns=patterns,
    semantics=semantics,
    argument=argument,
    shardings=shardings,
  )
  return created


def _find_whole(
  tx: Any, state: PyTree, params: PyTree, tables: Any, semantics: str
) -> tuple[list[trees.Path], str]:
  """Finds the tables that an optimizer has to update as whole arrays.

  Args:
    tx: The optimizer.
    state: Its state.
    params: The parameters.
    tables: The paths of the tables.
    semantics: What happens to the rows that a step did not use.

  Returns:
    The paths of these tables, and the reason, which is empty if there is none
    or if TensorFlow updates all of their rows, too.
  """
  nodes: list[Any] = []
  treedef: Any = jax.tree.structure(params)

  def visit(node: Any) -> bool:
    if jax.tree.structure(node) == treedef:
      return True  # slots: parameters may be named tuples
    if isinstance(node, optax.InjectStatefulHyperparamsState):
      # Its other fields are hyperparameters, and counts of their schedules.
      jax.tree.leaves(node.inner_state, is_leaf=visit)
      return True
    if isinstance(node, tuple) and hasattr(node, "_fields"):
      nodes.append(node)
    return False

  def explain(reason: str, nodes: list[Any]) -> str:
    names = sorted({type(node).__name__ for node in nodes})
    return reason.format(", ".join(names)) if names else ""

  jax.tree.leaves(state, is_leaf=visit)
  is_tf = semantics == "tf"
  no_kernel = "TensorFlow has no sparse kernel for {}"
  unknown = [x for x in nodes if not isinstance(x, _KNOWN)]
  if unknown:
    mixing = "{} in the optimizer's state may mix rows"
    return list(tables), explain(no_kernel if is_tf else mixing, unknown)
  others = [x for x in nodes if is_tf and isinstance(x, _OTHER_SLOTS)]
  slots = row_update.slots_of(others, params, tables)
  whole = [path for path in tables if path in slots]
  if len(whole) < len(tables):
    shapes = tuple(
      (path, tuple(min(n, 3) for n in jnp.shape(p)))
      for path, p in jax.tree_util.tree_leaves_with_path(params)
    )
    reason = _try_rows(tx, treedef, shapes, tuple(tables))
    if reason:
      return list(tables), reason
  without = [x for x in others if not isinstance(x, optax.ScaleByAdamState)]
  return whole, explain(no_kernel, without)


@functools.lru_cache(maxsize=16)
def _try_rows(
  tx: Any,
  treedef: Any,
  shapes: tuple[tuple[trees.Path, tuple[int, ...]], ...],
  tables: tuple[trees.Path, ...],
) -> str:
  """Tries an optimizer on small tables, with and without an unused row.

  The states do not say whether it has transformations such as
  `optax.scale_by_trust_ratio`, whose norms are those of a whole table.

  Args:
    tx: The optimizer.
    treedef: The structure of the parameters.
    shapes: Path and small shape of each parameter.
    tables: The paths of the tables.

  Returns:
    Why it has to update whole tables, or an empty string.
  """
  tx = optax.with_extra_args_support(tx)
  arrays = []
  for path, shape in shapes:
    shape = (3, *shape[1:]) if path in tables else shape
    x = 1 + np.arange(np.prod(shape), dtype=np.float32)
    arrays.append(x.reshape(shape))

  def run(
    arrays: list[jax.Array], rows: int, step: jax.Array, scale: jax.Array
  ) -> list[jax.Array]:
    params, grads = [], []
    for (path, _), x in zip(shapes, map(jnp.asarray, arrays), strict=True):
      is_table = path in tables
      params.append(x[:rows] if is_table else x)
      grads.append(scale * (x.at[2].set(0)[:rows] if is_table else x))
    params, grads = treedef.unflatten(params), treedef.unflatten(grads)
    state = jax.tree.map(
      lambda x: jnp.full_like(x, step) if jnp.result_type(x) == "int32" else x,
      tx.init(params),
    )
    new = tx.update(grads, state, params, value=scale, grad=grads)
    # Slots too: Adam's first update does not depend on the gradient's size.
    slots = row_update.slots_of(new, params, tables)
    found = zip(jax.tree.leaves(new), slots, strict=True)
    return [x[:2] for x, table in found if table is not None]

  # Schedules may begin or end with 0, and some gradients are not clipped.
  trials = map(np.ravel, np.meshgrid([1, 100, 10_000, 1_000_000], [1e-3, 1e3]))
  # XLA drops the updates of other parameters.
  compare = jax.jit(
    lambda arrays, *trials: [
      jax.vmap(functools.partial(run, arrays, rows))(*trials) for rows in (2, 3)
    ]
  )
  try:
    with jax.ensure_compile_time_eval():
      less, more = jax.device_get(compare(arrays, *trials))
  except Exception as e:  # whatever tx raises
    return f"the optimizer fails on small arrays ({type(e).__name__}: {e})"
  # Another norm differs by 20 % or more; bfloat16 rounds by less than 1 %.
  same = functools.partial(np.allclose, rtol=0.05, atol=0, equal_nan=True)
  if all(map(same, less, more)):
    return ""
  return "the optimizer's update of a row depends on other rows"


def with_shardings(tx: Any, params: PyTree) -> Any:
  """Returns an optimizer that knows how the rows of its tables are split.

  Args:
    tx: An optimizer; others than those of `sparse_rows` are returned.
    params: The parameters of a train state with their shardings.
  """
  if not isinstance(tx, SparseRows):
    return tx
  split = row_update.split_over_devices(params).items()
  return _create(tx.inner, tx.patterns, tx.semantics, tx.argument, *split)


def wrap(tx: Any, sparse: Any, semantics: Any) -> Any:
  """Returns `sparse_rows` around an optimizer if there are patterns.

  Args:
    tx: The optax optimizer.
    sparse: Patterns; none leaves `tx` as it is.
    semantics: See `sparse_rows`.
  """
  if sparse:
    return sparse_rows(tx, sparse, semantics, argument="sparse")
  if semantics != "lazy":
    raise ValueError(
      f"sparse_semantics={semantics!r} needs sparse, the patterns of tables."
    )
  return tx


def _find_tables(tx: SparseRows, params: PyTree) -> dict[trees.Path, Any]:
  """Returns the tables that are trained, by path.

  Raises:
    PatternError: A pattern matches no parameter, or one that is no table.
  """
  patterns_lib.check_used(tx.argument, tx.patterns, trees.names(params))
  tables = gradients.tables(tx, params)
  for path, x in tables.items():
    dtype, shape = trees.dtype_of(x), jnp.shape(x)
    if len(shape) != 2 or not jnp.issubdtype(dtype, jnp.floating):
      name = trees.path_string(path)
      pattern: Any = patterns_lib.first_match(tx.patterns, name)
      raise patterns_lib.PatternError(
        f"{tx.argument}[{pattern}]={tx.patterns[pattern]!r} matches {name}, "
        f"{dtype}{list(shape)}, which is not a table: a floating-point array "
        "with two dimensions."
      )
  return tables
