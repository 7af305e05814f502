"""Checkpoints: a plain Flax one, and the wrappers' states beside it.

    checkpoints/1200/default/         step, params, opt_state, collections
                     wrappers/        the wrappers' states; absent when empty
                     flaxshard/       who wrote it, and a crc32 of every file
                     input_iterator/  where the data stands; absent without data
                     metrics/         what was measured; absent without metrics

The item `default` is what a plain Flax program writes, so that one reads it
with its usual strict call, and ours reads a plain one.
"""

from flaxshard.checkpoint.checkpointer import check_writable
from flaxshard.checkpoint.checkpointer import Checkpointer
from flaxshard.checkpoint.pending_saves import SaveError
from flaxshard.checkpoint.step import item_handlers
from flaxshard.checkpoint.step import restore
from flaxshard.checkpoint.step import save_args

__all__ = [
  "Checkpointer",
  "SaveError",
  "check_writable",
  "item_handlers",
  "restore",
  "save_args",
]
