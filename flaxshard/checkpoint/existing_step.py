"""Compares a state with a step that has been saved already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp

from flaxshard.checkpoint import metadata_item
from flaxshard.checkpoint import reader
from flaxshard.checkpoint import validation
from flaxshard.core import trees
from flaxshard.state.train_state import TrainState


def check_same(
  step_dir: str, state: TrainState, items: ocp.args.Composite
) -> None:
  """Raises an error if a step was saved from another state.

  Compares the trees with their shapes and dtypes, and `state.step`. No array is
  read. A step that another program saved is not compared.

  Args:
    step_dir: Path of the directory of the step.
    state: The state.
    items: What `save_args` returned for the state.

  Raises:
    ValueError: The states differ; the message names the first difference.
  """
  metadata = metadata_item.read_metadata(step_dir)
  if metadata is None:
    return
  difference = None
  # Steps of older versions do not have it.
  saved_step = metadata.get("state_step")
  if saved_step not in (None, int(state.step)):
    difference = f"state.step is {int(state.step)}, {saved_step} was saved"
  item_dirs = reader.items(step_dir)
  current_items = dict(items.items())
  # A wrapper's state may be on one side only, and with it the whole item.
  for name in sorted({*current_items, *item_dirs}):
    saved: Mapping[tuple[str, ...], Any] = {}
    current: Mapping[tuple[str, ...], Any] = {}
    if name in item_dirs:
      saved = reader.orbax_tree(item_dirs[name], name).leaves
    if name in current_items:
      types = jax.tree.map(validation.as_saved, current_items[name].item)
      current = trees.leaves_by_path(types)
    difference = difference or trees.difference_by_path(saved, current)
  if difference:
    raise ValueError(
      f"{step_dir} was saved from another state: {difference}. Save under "
      "another step, or in another directory."
    )
