"""Row-sparse gradients, and optimizers that update rows of tables."""

from flaxshard.core.gradients import SparseRows
from flaxshard.core.indexed_slices import global_norm
from flaxshard.core.indexed_slices import IndexedSlices
from flaxshard.core.indexed_slices import is_indexed_slices
from flaxshard.core.indexed_slices import to_dense
from flaxshard.sparse.optimizer import sparse_rows

__all__ = [
  "IndexedSlices",
  "SparseRows",
  "global_norm",
  "is_indexed_slices",
  "sparse_rows",
  "to_dense",
]
