"""`IndexedSlices`: the gradient of a table of which a step used some rows."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
import copy
import math
import operator
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from flaxshard.core import trees

PyTree = Any


@jax.tree_util.register_pytree_with_keys_class
class IndexedSlices:
  """An array of which only some rows are given; all other rows are zero.

  The gradient of an embedding table is zero except for the rows that a step
  looked up. An `IndexedSlices` holds these rows and their numbers. A row number
  may occur several times: its rows are summed. A row number outside of the
  table is padding, and its row is dropped.

  It is a pytree with two leaves, the row numbers and the rows. A function that
  `jax.tree.map` applies to all leaves, such as `jnp.clip`, changes the row
  numbers too: give `is_leaf=flaxshard.is_indexed_slices`, or use `map_values`.

  Attributes:
    indices: Row numbers, int `[n]`. Negative numbers are padding: they do not
      count from the end.
    values: The rows, `[n, *dense_shape[1:]]`.
    dense_shape: The shape of the whole array.
    is_unique: Whether `indices` are sorted and no row number but the padding
      `dense_shape[0]` occurs twice, as `deduplicated` returns them.
    parts: Number of blocks of equal size that `indices` consist of; 1 unless
      `split` has made them. The i-th block has rows of the i-th part of the
      array alone, and padding. Only each block is then without equal numbers.

  Example:
    >>> import flaxshard as fs, jax.numpy as jnp
    >>> slices = fs.IndexedSlices([2, 0, 2], jnp.ones((3, 1)), (4, 1))
    >>> slices.to_dense().ravel().tolist()
    [1.0, 0.0, 2.0, 0.0]

  References:
    `tf.IndexedSlices`.
  """

  # NumPy arrays then leave `array + slices` to this class, as JAX arrays do.
  __array_ufunc__ = None

  indices: jax.Array
  values: jax.Array
  dense_shape: tuple[int, ...]
  is_unique: bool
  parts: int

  def __init__(
    self,
    indices: Any,
    values: Any,
    dense_shape: Sequence[int],
    *,
    is_unique: bool = False,
    parts: int = 1,
  ):
    """Checks shapes and dtypes.

    Args:
      indices: Row numbers, `[n]`, of an integer dtype.
      values: The rows, `[n, *dense_shape[1:]]`.
      dense_shape: The shape of the whole array, of at least one dimension.
      is_unique: Whether the row numbers are sorted and distinct. It is not
        checked.
      parts: Number of blocks that the row numbers consist of, see `split`.

    Raises:
      TypeError: The row numbers are not integers.
      ValueError: A shape does not fit, or a row number does not fit int32.
    """
    if isinstance(indices, np.ndarray):
      # A number that wraps around would be that of another row.
      trees.check_integers("IndexedSlices: indices", indices)
    self.indices = jnp.asarray(indices)
    self.values = jnp.asarray(values)
    self.dense_shape = tuple(operator.index(size) for size in dense_shape)
    self.is_unique = is_unique
    self.parts = parts
    self.check()

  def check(self, argument: str = "IndexedSlices") -> None:
    """Raises unless the row numbers are integers and all shapes fit.

    `jax.tree.map` can make an object that does not pass.

    Args:
      argument: The name of the object, for errors.
    """
    if not jnp.issubdtype(self.indices.dtype, jnp.integer):
      raise TypeError(
        f"{argument}: indices must be integers, got "
        f"{self.indices.dtype}{list(self.indices.shape)}. jax.tree.map and "
        "arithmetic on a whole tree of gradients change the row numbers too: "
        "use slices.map_values, or is_leaf=flaxshard.is_indexed_slices."
      )
    wanted = (self.indices.size, *self.dense_shape[1:])
    is_vector = self.indices.ndim == 1
    if not (self.dense_shape and is_vector and self.values.shape == wanted):
      raise ValueError(
        f"{argument}: indices must be [n] and values [n, *dense_shape[1:]] "
        f"for a dense_shape of at least one dimension, got {self.dense_shape} "
        f"with {list(self.indices.shape)} and {list(self.values.shape)}."
      )

  def tree_flatten_with_keys(self) -> Any:
    """Returns row numbers and rows, and what is static."""
    key = jax.tree_util.GetAttrKey
    children = (key("indices"), self.indices), (key("values"), self.values)
    return children, (self.dense_shape, self.is_unique, self.parts)

  @classmethod
  def tree_unflatten(cls, static: Any, children: Any) -> IndexedSlices:
    """Returns the object; JAX also puts other things than arrays in it."""
    new = object.__new__(cls)
    new.indices, new.values = children
    new.dense_shape, new.is_unique, new.parts = static
    return new

  def __repr__(self) -> str:
    rows = f"{len(self.indices)} rows" if np.shape(self.indices) else "rows"
    return f"IndexedSlices({rows} of {self.dense_shape}, {self.values!r})"

  # -- As the array that it stands for.

  @property
  def shape(self) -> tuple[int, ...]:
    """The shape of the whole array."""
    return self.dense_shape

  @property
  def ndim(self) -> int:
    """The number of dimensions of the whole array."""
    return len(self.dense_shape)

  @property
  def size(self) -> int:
    """The number of elements of the whole array."""
    return math.prod(self.dense_shape)

  @property
  def dtype(self) -> Any:
    """The dtype of the rows."""
    return self.values.dtype

  def astype(self, dtype: Any) -> IndexedSlices:
    """Returns the rows in another dtype."""
    return self.map_values(lambda values: values.astype(dtype))

  def to_dense(self) -> jax.Array:
    """Returns the whole array, with zeros in the rows that are not given.

    Rows of equal numbers are summed as by `deduplicated`.
    """
    values = self.values.astype(accumulator_dtype(self.dtype))
    sums = jnp.zeros(self.dense_shape, values.dtype).at[self._in_range()]
    is_sorted = self.is_unique and self.parts == 1
    dense = sums.add(values, mode="drop", indices_are_sorted=is_sorted)
    return dense.astype(self.dtype)

  def deduplicated(self) -> IndexedSlices:
    """Sums the rows of equal numbers, those of 16 bits in float32.

    Returns:
      Sorted, distinct row numbers, then padding: the number `dense_shape[0]`
      with rows of zeros. There are as many rows as before, but not more than
      the whole array has.

    Example:
      >>> import flaxshard as fs, jax.numpy as jnp
      >>> slices = fs.IndexedSlices([2, 0, 2], jnp.ones((3, 1)), (4, 1))
      >>> slices.deduplicated().indices.tolist()
      [0, 2, 4]
    """
    rows = self.dense_shape[0]
    if self.is_unique:
      return self
    size = min(self.indices.size, rows)
    indices = self._in_range()
    # A stable sort: rows of one number are added in the order that they have.
    order = jnp.argsort(indices, stable=True)
    indices = indices[order]
    position = jnp.cumsum(jnp.diff(indices, prepend=indices[:1]) != 0)
    is_row = (indices < rows).reshape(-1, *[1] * (self.ndim - 1))
    values = jnp.where(is_row, self.values[order], 0)
    values = values.astype(accumulator_dtype(self.dtype))
    sums = jax.ops.segment_sum(values, position, size, indices_are_sorted=True)
    return IndexedSlices(
      jnp.full(size, rows, indices.dtype)
      .at[position]
      .set(indices, mode="drop", indices_are_sorted=True),
      sums.astype(self.dtype),
      self.dense_shape,
      is_unique=True,
    )

  def split(self, parts: int) -> IndexedSlices:
    """Sorts distinct rows into blocks, one for each part of the array.

    For an array whose rows are split over devices: each device then reads and
    writes the rows of its own part alone. A block has a place for every row, so
    that `parts` devices together store each row `parts` times, and one device
    once.

    Args:
      parts: Number of parts of equal size. The rows stay as `deduplicated`
        returns them if it is 1, or does not divide the rows of the array.

    Example:
      >>> import flaxshard as fs, jax.numpy as jnp
      >>> slices = fs.IndexedSlices([3, 0], jnp.ones((2, 1)), (4, 1)).split(2)
      >>> slices.indices.tolist()
      [0, 4, 4, 3]
    """
    rows = self.deduplicated()
    num_rows = self.dense_shape[0]
    if parts == 1 or num_rows % parts or rows.parts == parts:
      return rows
    part = jnp.arange(parts, dtype=rows.indices.dtype)[:, None]
    # Padding is in no part.
    is_own = rows.indices // (num_rows // parts) == part
    indices = jnp.where(is_own, rows.indices, num_rows)
    is_own = is_own.reshape(*is_own.shape, *[1] * (self.ndim - 1))
    values = jnp.where(is_own, rows.values, 0)
    return IndexedSlices(
      indices.reshape(-1),
      values.reshape(-1, *self.dense_shape[1:]),
      self.dense_shape,
      is_unique=True,
      parts=parts,
    )

  def take_rows(self, x: jax.Array) -> jax.Array:
    """Returns the rows of another array at these row numbers, `[n, ...]`.

    Args:
      x: An array with as many rows as `dense_shape[0]`. Padding takes the last
        row of it, or of a part of it.
    """
    # Padding takes values that occur: zeros could give NaNs.
    return self._by_part(lambda x, indices: x.at[indices].get(mode="clip"), x)

  def put_rows(self, x: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns another array with new rows, in place if XLA may.

    Args:
      x: An array with as many rows as `dense_shape[0]`.
      rows: The new rows, `[n, ...]`. The row numbers of this object must be
        distinct: see `deduplicated`. Rows of padding are dropped.
    """

    def put(x: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
      return x.at[indices].set(
        rows.astype(x.dtype),
        mode="drop",
        # A block has padding before its rows too.
        indices_are_sorted=self.parts == 1,
        unique_indices=True,
      )

    return self._by_part(put, x, rows)

  def map_values(self, fn: Callable[[jax.Array], jax.Array]) -> IndexedSlices:
    """Applies a function to the rows.

    Args:
      fn: Takes the rows `[n, ...]`, and returns an array of that shape. It must
        map zeros to zeros, as a product does: the rows that are not given stay
        zero.
    """
    new = copy.copy(self)
    new.values = jnp.asarray(fn(self.values))
    new.check()
    return new

  # -- Arithmetic.

  def __mul__(self, factor: Any) -> IndexedSlices:
    if np.ndim(factor):
      return NotImplemented
    return self.map_values(lambda values: values * factor)

  __rmul__ = __mul__

  def __truediv__(self, divisor: Any) -> IndexedSlices:
    if np.ndim(divisor):
      return NotImplemented
    return self.map_values(lambda values: values / divisor)

  def __neg__(self) -> IndexedSlices:
    return self.map_values(operator.neg)

  def __add__(self, other: Any) -> Any:
    """Returns the sum: with an array, an array; with slices, slices."""
    if isinstance(other, IndexedSlices):
      if other.dense_shape != self.dense_shape:
        raise ValueError(
          f"IndexedSlices: shapes {self.dense_shape} and {other.dense_shape} "
          "cannot be added."
        )
      return IndexedSlices(
        jnp.concatenate([self.indices, other.indices]),
        jnp.concatenate([self.values, other.values]),
        self.dense_shape,
      )
    if np.shape(other) != self.dense_shape:
      return NotImplemented
    x, rows = jnp.asarray(other), self.deduplicated()
    # The sum of each row is rounded once, to the dtype of the whole array.
    return rows.put_rows(x, rows.take_rows(x) + rows.values)

  __radd__ = __add__

  def _by_part(self, fn: Any, x: jax.Array, *rows: jax.Array) -> jax.Array:
    """Calls `fn(part, row numbers in it, *rows)` for each part of an array.

    A compiler that sees `x[indices]` for an array whose rows are split over
    devices does not know which device has which row: it sums over the devices
    what each of them finds. With a block of row numbers for each part, each
    device reads and writes its own part, without communication.
    """
    indices, num_rows = self._in_range(), x.shape[0]
    if self.parts == 1:
      return fn(x, indices, *rows)
    size = num_rows // self.parts
    split = lambda x: x.reshape(self.parts, -1, *x.shape[1:])
    part = jnp.arange(self.parts, dtype=indices.dtype)[:, None]
    blocks = split(indices)
    local = jnp.where(blocks < num_rows, blocks - part * size, size)
    new = jax.vmap(fn)(split(x), local, *map(split, rows))
    return new.reshape(-1, *x.shape[1:])

  def _in_range(self) -> jax.Array:
    """Returns the row numbers, with padding beyond the last row."""
    rows, indices = self.dense_shape[0], self.indices
    if jnp.iinfo(indices.dtype).max < rows:
      indices = indices.astype(jnp.int32)
    is_row = (indices >= 0) & (indices < rows)
    return jnp.where(is_row, indices, rows)


def accumulator_dtype(dtype: Any) -> Any:
  """Returns the dtype that values of a dtype are summed or averaged in."""
  # A sum in float16 or bfloat16 rounds away small gradients. Integers stay:
  # float32 would not wrap around.
  is_narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
  return jnp.dtype(jnp.float32) if is_narrow else dtype


def is_indexed_slices(x: Any) -> TypeGuard[IndexedSlices]:
  """Returns whether a value is an `IndexedSlices`; for `is_leaf`.

  Example:
    >>> import flaxshard as fs, jax, jax.numpy as jnp
    >>> slices = fs.IndexedSlices([0], jnp.ones((1, 2)), (3, 2))
    >>> grads = {"table": slices, "bias": jnp.ones(2)}
    >>> halves = jax.tree.map(
    ...     lambda g: g * 0.5, grads, is_leaf=fs.is_indexed_slices)
    >>> halves["table"].values.tolist()
    [[0.5, 0.5]]
  """
  return isinstance(x, IndexedSlices)


def to_dense(tree: PyTree, *, keep: Container[Any] = ()) -> PyTree:
  """Returns a tree with whole arrays in place of its `IndexedSlices`.

  Args:
    tree: The tree.
    keep: The paths of those that stay.
  """
  return jax.tree_util.tree_map_with_path(
    lambda path, x: (
      x.to_dense() if is_indexed_slices(x) and path not in keep else x
    ),
    tree,
    is_leaf=is_indexed_slices,
  )


def global_norm(tree: PyTree) -> jax.Array:
  """Returns the Euclidean norm of all arrays of a tree, as one vector.

  `optax.global_norm` takes row numbers for values, and does not sum the rows of
  equal numbers.

  Args:
    tree: A tree of arrays and `IndexedSlices`, such as gradients.

  Example:
    >>> import flaxshard as fs, jax.numpy as jnp
    >>> from flaxshard import sparse
    >>> slices = fs.IndexedSlices([1, 1], jnp.ones((2, 1)), (3, 1))
    >>> float(sparse.global_norm({"table": slices}))
    2.0
  """

  def sum_of_squares(x: Any) -> jax.Array:
    x = x.deduplicated().values if is_indexed_slices(x) else jnp.asarray(x)
    # The square of 300 overflows in float16.
    return jnp.sum(jnp.square(jnp.abs(x.astype(accumulator_dtype(x.dtype)))))

  leaves = jax.tree.leaves(tree, is_leaf=is_indexed_slices)
  return jnp.sqrt(sum(map(sum_of_squares, leaves), start=jnp.zeros(())))
