"""The replica context: the number of a replica, and collectives over replicas.

`Strategy.run` traces a function once for all replicas. While it does,
`get_replica_context` returns the context of that trace, as
`tf.distribute.get_replica_context` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import contextlib
import contextvars
import dataclasses
import functools
from typing import Any, Literal

from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from numpy.lib.array_utils import normalize_axis_index

from flaxshard.core import checks
from flaxshard.core import gradients
from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import trees
from flaxshard.core.indexed_slices import IndexedSlices
from flaxshard.core.indexed_slices import is_indexed_slices
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.replicas import rows

PyTree = Any
# How values are reduced over the replicas.
REDUCE_OPS = "sum", "mean"
# The name that marks values in a jaxpr as replicated.
ASSUMED_REPLICATED = "flaxshard.assume_replicated"
# The names that mark, for the warnings of `Strategy.run`, gradients that are
# about to be reduced, and replica numbers that are folded into PRNG keys.
GRADIENTS = "flaxshard.gradients"
REPLICA_OF_KEY = "flaxshard.replica_of_key"


@dataclasses.dataclass(frozen=True)
class ReplicaContext:
  """The replicas, and collectives over them, inside `Strategy.run`.

  Attributes:
    num_replicas_in_sync: The number of replicas.
    gradients_reduced: True while gradients are applied that are the same on
      all replicas, because they have been reduced.
    aggregation_skipped: True while gradients are applied that the user does not
      want to be reduced.
    first_replica: The number of replica 0 among those of all workers. Workers
      are programs of their own, and draw other random numbers.
    params: The parameters of each TrainState that `run` received, as
      `jax.ShapeDtypeStruct`s with shardings.

  Example:
    >>> import flaxshard as fs
    >>> strategy = fs.Strategy()
    >>> def average_number(x):
    ...   context = fs.get_replica_context()
    ...   y = x + context.replica_id_in_sync_group
    ...   return context.all_reduce("sum", y) / context.num_replicas_in_sync
    >>> n = strategy.num_replicas_in_sync
    >>> float(strategy.run(average_number, args=(1.0,))[0]) == 1 + (n - 1) / 2
    True
  """

  num_replicas_in_sync: int
  gradients_reduced: bool = False
  aggregation_skipped: bool = False
  first_replica: int = 0
  params: tuple[PyTree, ...] = ()

  @property
  def replica_id_in_sync_group(self) -> jax.Array:
    """The number of this replica, an int32 scalar that differs per replica."""
    return jax.lax.axis_index(mesh_lib.REPLICA)

  def all_reduce(self, reduce_op: str, value: PyTree) -> PyTree:
    """Returns the sum or the mean of arrays over the replicas.

    Args:
      reduce_op: `"sum"` or `"mean"`. The mean of integers is float32; the sum
        of those of 8 and 16 bits has 32 bits or more, as that of `jnp.sum`.
      value: A tree of arrays `[...]`, the values of this replica. float16 is
        sent and reduced in float32, so that no sum overflows on the way. Of an
        `IndexedSlices` row numbers and rows are gathered, or the whole array is
        reduced, whichever takes fewer bytes.

    Returns:
      A tree of arrays `[...]`, the same on all replicas. An `IndexedSlices` has
      the rows of all replicas, with distinct row numbers.

    Raises:
      ValueError: `reduce_op` is neither `"sum"` nor `"mean"`.
    """
    checks.one_of("reduce_op", reduce_op, REDUCE_OPS)

    def as_summand(x: Any) -> Any:
      x = _as_number(x)
      # The sum of integers may wrap around though their mean does not.
      return x / 1 if reduce_op == "mean" else x

    value = jax.tree.map(as_summand, value, is_leaf=is_indexed_slices)
    # Of a context that is used outside of `run`, JAX then reports the axis.
    with activate(self):
      return reduce_over_replicas(reduce_op, value)

  def all_gather(self, value: PyTree, axis: int) -> PyTree:
    """Concatenates the arrays of all replicas along an axis.

    Args:
      value: A tree of arrays, the values of this replica.
      axis: The axis of every array to concatenate along.

    Returns:
      A tree of arrays, the same on all replicas.

    Raises:
      ValueError: An array has no such axis.
    """

    def gather_array(x: Any) -> Any:
      if is_indexed_slices(x):
        # Two replicas may have the same row.
        return IndexedSlices(
          gather_array(x.indices), gather_array(x.values), x.dense_shape
        )
      x = jnp.asarray(x)
      dim = normalize_axis_index(axis, x.ndim, "all_gather")
      # XLA fails on a collective over one device: see `reduce_over_replicas`.
      if self.num_replicas_in_sync == 1:
        return x
      return jax.lax.all_gather(x, mesh_lib.REPLICA, axis=dim, tiled=True)

    return jax.tree.map(gather_array, value, is_leaf=is_indexed_slices)

  def fold_in(self, key: PyTree) -> PyTree:
    """Returns a PRNG key of this replica: another one on each replica.

    A key among the arguments of `run` is the same on all replicas. Dropout
    with that key would drop the same units of every replica's examples.

    Args:
      key: A PRNG key, typed or raw uint32, or an array or a tree of keys.

    Returns:
      Keys like `key`, into which `replica_id_in_sync_group` is folded with
      `jax.random.fold_in`; with several workers, the number among the replicas
      of all.

    Example:
      >>> import flaxshard as fs, jax
      >>> strategy = fs.Strategy()
      >>> def sample(key):
      ...   key = fs.get_replica_context().fold_in(key)
      ...   return jax.random.uniform(key)
      >>> samples = strategy.run(sample, args=(jax.random.key(0),))
      >>> len(set(map(float, samples))) == strategy.num_replicas_in_sync
      True
    """
    number = checkpoint_name(self.replica_id_in_sync_group, REPLICA_OF_KEY)
    if self.first_replica:
      number += self.first_replica
    return jax.tree.map(lambda x: _fold_in(x, number), key)

  def assume_replicated(self, value: PyTree) -> PyTree:
    """Marks arrays as the same on all replicas, for `Strategy.run`'s check.

    `Strategy.run` returns one TrainState for all replicas. Before it compiles,
    it checks that no leaf differs between them, and raises an error where it
    cannot show that. This method makes the check accept a value that is the
    same for a reason the program does not show, such as a kernel that reduces
    over the replicas by itself.

    Nothing verifies the mark. If the values do differ, if only in their last
    bit, each device silently keeps its own parameters. An all-reduce written as
    a ring of `ppermute` is such a case: every replica adds in another order.
    Use `all_reduce` where you can.

    The mark covers this value alone, not its gradient: mark gradients after
    they are computed.

    Args:
      value: A tree of arrays, `[...]`.

    Returns:
      The same values; no code is compiled for the mark.

    Example:
      >>> import flaxshard as fs, jax, numpy as np, optax
      >>> strategy = fs.Strategy()
      >>> state = fs.TrainState.create(
      ...     apply_fn=None, params={"w": np.ones(())}, tx=optax.sgd(0.1))
      >>> def step(state):
      ...   context = fs.get_replica_context()
      ...   # io_callback may return something else on each replica.
      ...   lr = jax.experimental.io_callback(
      ...       lambda: np.float32(0.5), jax.ShapeDtypeStruct((), "float32"))
      ...   lr = context.assume_replicated(lr)
      ...   return state.replace(params={"w": state.params["w"] - lr})
      >>> float(strategy.run(step, args=(state,)).params["w"])
      0.5
    """
    # An identity whose name stays visible in the jaxpr.
    return checkpoint_name(value, ASSUMED_REPLICATED)


class OutsideOfRun:
  """The result of `get_replica_context` outside of `Strategy.run`: false."""

  def __bool__(self) -> Literal[False]:
    return False

  def __getattr__(self, name: str) -> Any:
    raise AttributeError(
      f"get_replica_context().{name} is known inside of Strategy.run alone. A "
      "step that also runs outside of it asks first: `if context:`."
    )


# The context of the replica whose program is traced; None outside.
current: contextvars.ContextVar[ReplicaContext | None] = contextvars.ContextVar(
  "replica_context", default=None
)


def get_replica_context() -> ReplicaContext | OutsideOfRun:
  """Returns the context of the current replica.

  Outside of `Strategy.run` the result is false, and has no attributes: a step
  that runs there too asks `if context:` before it uses one.
  `Strategy.run_steps` and `Strategy.jit` have a context too; `jax.jit` has
  none.

  Example:
    >>> import flaxshard as fs
    >>> bool(fs.get_replica_context())
    False
    >>> def count_replicas():
    ...   context = fs.get_replica_context()
    ...   return context.num_replicas_in_sync if context else 1
    >>> count_replicas()
    1

  References:
    `tf.distribute.get_replica_context`.
  """
  return current.get() or OutsideOfRun()


@contextlib.contextmanager
def activate(context: ReplicaContext | None) -> Iterator[None]:
  """Makes `context` the current one within the `with` block."""
  token = current.set(context)
  try:
    yield
  finally:
    current.reset(token)


def marked(**changed: Any) -> contextlib.AbstractContextManager[None]:
  """Sets attributes of the context, such as `gradients_reduced`, in a block.

  Outside of `Strategy.run` it does nothing.
  """
  context = current.get()
  return activate(context and dataclasses.replace(context, **changed))


def num_replicas() -> int:
  """Returns the number of replicas; 1 outside of `Strategy.run`."""
  context = current.get()
  return 1 if context is None else context.num_replicas_in_sync


def specs_within(params: PyTree) -> PyTree:
  """Returns the PartitionSpecs of parameters over the logical devices.

  Args:
    params: The parameters of a TrainState that `Strategy.run` received.

  Returns:
    A tree of PartitionSpecs, those of the first TrainState that has parameters
    of these shapes.
  """

  def logical_spec(x: Any) -> jax.P:
    axes = mesh_lib.logical_axes(x.sharding.mesh)
    return mesh_lib.only(x.sharding.spec, axes)

  context, shapes = current.get(), jax.tree.map(jnp.shape, params)
  for arrived in context.params if context else ():
    if jax.tree.map(jnp.shape, arrived) == shapes:
      return jax.tree.map(logical_spec, arrived)
  return jax.tree.map(lambda _: jax.P(), params)


def reduce_over_replicas(
  op: str, tree: PyTree, groups: rows.Groups = None
) -> PyTree:
  """Reduces arrays over the replicas, in one collective.

  float16 and float8 are sent and reduced in float32, and cast back. For an
  `IndexedSlices` see `rows.reduce`.

  Args:
    op: `"sum"`, `"mean"` or `"max"`.
    tree: A tree of arrays, the values of this replica; for `"sum"` and `"mean"`
      also of `IndexedSlices`.
    groups: Groups of equal size to reduce within; None for all replicas.

  Returns:
    A tree of arrays of the same shapes and dtypes.
  """
  if num_replicas() == 1:
    # XLA fails to reduce over an axis of one device if the array is sharded
    # over other axes.
    return tree
  leaves, treedef = jax.tree.flatten(tree, is_leaf=is_indexed_slices)
  count = len(groups[0]) if groups else num_replicas()
  collective = getattr(jax.lax, f"p{op}")
  sent = [None if is_indexed_slices(x) else _widen(x) for x in leaves]
  reduced = collective(sent, mesh_lib.REPLICA, axis_index_groups=groups)
  for i, x in enumerate(leaves):
    if sent[i] is None:
      reduced[i] = rows.reduce(op, x, count, groups)
    elif sent[i] is not x:
      reduced[i] = reduced[i].astype(x.dtype)
  return jax.tree.unflatten(treedef, reduced)


def _widen(x: Any) -> Any:
  """Casts float16 and float8 to float32, and on CPU devices bfloat16."""
  if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize >= 4:
    return x
  # A sum of float16 values may overflow though their mean does not, and to
  # divide first would round small values away. So float16 takes the traffic of
  # float32. bfloat16 has the exponents of float32.
  device = jax.sharding.get_abstract_mesh().abstract_device
  # XLA's CPU compiler aborts the process when it sums bfloat16 over the
  # replicas and shards it over logical devices at once.
  on_cpu = bool(device) and device.platform == "cpu"
  return x.astype(jnp.float32) if x.dtype != jnp.bfloat16 or on_cpu else x


def reduce_gradients(
  op: str, grads: PyTree, groups: rows.Groups = None
) -> PyTree:
  """Sums or averages gradients over the replicas.

  The statistics among them, the leaves of Flax's overwrite-with-gradient
  collection, are the largest values seen: their maximum is taken.

  Args:
    op: `"sum"` or `"mean"`.
    grads: This replica's gradients, from `gradients.conform`.
    groups: As in `reduce_over_replicas`.
  """
  # The warnings of `Strategy.run` look for these that are the same already.
  mark = functools.partial(checkpoint_name, name=GRADIENTS)
  marked = gradients.map_gradients(mark, grads)
  # One collective for all gradients, and one for all statistics.
  if opt_state_lib.optimized_params(marked) is marked:
    return reduce_over_replicas(op, marked, groups)
  return type(marked)(
    {
      name: reduce_over_replicas(
        "max" if name == OVERWRITE_WITH_GRADIENT else op, tree, groups
      )
      for name, tree in marked.items()
    }
  )


def mean_collection(tree: PyTree, groups: rows.Groups = None) -> PyTree:
  """Averages a collection over the replicas, or over those of a group.

  Floating-point leaves are averaged, as TensorFlow averages the moving
  statistics of BatchNorm. Others (counters, PRNG keys) take the value of the
  first replica of the group.

  Args:
    tree: A tree of arrays, the values of this replica.
    groups: Groups of equal size; None for all replicas.
  """

  def mean_or_first(x: Any) -> Any:
    if jnp.issubdtype(x.dtype, jnp.inexact):
      return reduce_over_replicas("mean", x, groups)
    return bits_of_first(x, groups)

  if num_replicas() == 1:
    return tree
  return jax.tree.map(mean_or_first, tree)


def bits_of_first(x: jax.Array, groups: rows.Groups = None) -> jax.Array:
  """Returns what the first replica of each group has, to the last bit.

  Args:
    x: An array of any dtype, the values of this replica.
    groups: Groups of equal size; None for all replicas.
  """
  # `psum` takes neither keys nor booleans.
  if trees.is_prng_key(x):
    data = bits_of_first(jax.random.key_data(x), groups)
    return trees.with_key_data(x, data)
  if jnp.iscomplexobj(x):
    return jax.lax.complex(
      bits_of_first(x.real, groups), bits_of_first(x.imag, groups)
    )
  if jnp.issubdtype(x.dtype, jnp.floating):
    # The sum of integers keeps every bit; -0.0 + 0.0 would be 0.0.
    same_size = jnp.dtype(f"uint{jnp.finfo(x.dtype).bits}")
    bits = bits_of_first(jax.lax.bitcast_convert_type(x, same_size), groups)
    return jax.lax.bitcast_convert_type(bits, x.dtype)
  firsts = jnp.array([min(group) for group in groups or [[0]]])
  is_first = jnp.isin(jax.lax.axis_index(mesh_lib.REPLICA), firsts)
  # The sum of the first replica's value and of zeros from the others.
  summand = jnp.where(is_first, _as_number(x), 0)
  total = jax.lax.psum(summand, mesh_lib.REPLICA, axis_index_groups=groups)
  return total.astype(x.dtype)


def mean_extra_args(
  extra: Mapping[str, Any], groups: rows.Groups = None
) -> dict[str, Any]:
  """Averages the loss and its gradients over the replicas.

  Args:
    extra: Extra arguments by name: `value`, `grad`, and others, which stay as
      they are.
    groups: Groups of equal size; None for all replicas.

  Raises:
    ValueError: There is a `value_fn`, and several replicas: it has the loss of
      one of them, whose line search would take another step.
  """
  reduced = dict(extra)
  if "value" in extra:
    reduced["value"] = mean_collection(jnp.asarray(extra["value"]), groups)
  if "grad" in extra:
    reduced["grad"] = reduce_gradients("mean", extra["grad"], groups)
  if "value_fn" in extra and num_replicas() > 1:
    raise ValueError(
      "value_fn: a line search needs the loss of the whole batch, which no "
      "replica has. Call the step under jax.jit, without Strategy.run."
    )
  return reduced


def _fold_in(key: jax.Array, number: jax.Array) -> jax.Array:
  """Folds a number into a key or an array of keys, typed or raw."""
  if not trees.is_prng_key(key):
    typed = jax.random.wrap_key_data(key)
    return jax.random.key_data(_fold_in(typed, number))
  # jax.random.fold_in takes one key.
  fold_in = jax.vmap(lambda k: jax.random.fold_in(k, number))
  return fold_in(key.reshape(-1)).reshape(key.shape)


def _as_number(x: Any) -> Any:
  """Returns an array or rows, booleans and small integers as `jnp.sum` does."""
  x = x if is_indexed_slices(x) else jnp.asarray(x)
  is_small = x.dtype.itemsize < 4 and not jnp.issubdtype(x.dtype, jnp.inexact)
  return x.astype(jnp.sum(jnp.zeros((), x.dtype)).dtype) if is_small else x
