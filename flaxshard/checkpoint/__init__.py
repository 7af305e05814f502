"""Checkpoints of plain Flax, with the wrappers' states beside them.

Each step has a directory::

    checkpoints/1200/default/         step, params, opt_state, collections
                     wrappers/        states of the wrappers, if they have any
                     flaxshard/       versions, config, digests of all files
                     input_iterator/  position in the data, if it was given
                     metrics/         metrics, if they were given

The item `default` is what a plain Flax program writes. A plain program reads it
with its usual strict call, and flaxshard reads the checkpoints of plain Flax.
"""

from flaxshard.checkpoint.checkpointer import Checkpointer
from flaxshard.checkpoint.checkpointer import SaveError
from flaxshard.checkpoint.items import item_handlers
from flaxshard.checkpoint.items import save_args
from flaxshard.checkpoint.pretrained import init_from
from flaxshard.checkpoint.pretrained import InitReport
from flaxshard.checkpoint.restoring import restore

__all__ = [
  "Checkpointer",
  "InitReport",
  "SaveError",
  "init_from",
  "item_handlers",
  "restore",
  "save_args",
]
