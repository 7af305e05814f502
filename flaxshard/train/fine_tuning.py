"""Reads the fields `init_from` and `lora` of a config."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import math
from typing import Any

import jax

from flaxshard import checkpoint
from flaxshard.checkpoint import matching
from flaxshard.core import parameter_groups
from flaxshard.state import lora as lora_lib
from flaxshard.state.train_state import TrainState

_PATTERNS = tuple(f.name for f in dataclasses.fields(matching.Patterns))


def check(config: Mapping[str, Any]) -> None:
  """Raises a ValueError if the patterns are wrong.

  Args:
    config: A config in which each field has been checked by itself.
  """
  init_from = config["init_from"]
  try:
    matching.Patterns(**{name: init_from[name] for name in _PATTERNS})
  except (TypeError, ValueError) as e:
    raise ValueError(f"config.init_from.{e}") from e
  create_lora(config["lora"])


def create_lora(lora: Mapping[str, Any]) -> lora_lib.LoRA | None:
  """Returns the `LoRA` of `config.lora`, or None if its rank is 0.

  Raises:
    ValueError: A pattern is no regular expression.
  """
  if not lora["rank"]:
    return None
  try:
    return lora_lib.LoRA(**lora)
  except (TypeError, ValueError) as e:
    # The message begins with the name of the class.
    raise ValueError(f"config.lora: {str(e).removeprefix('LoRA: ')}") from e


def initialize(config: Any, state: TrainState) -> TrainState:
  """Returns a new state with the parameters of `config.init_from`, if any.

  Args:
    config: A checked config.
    state: The state at the start of a run.

  Raises:
    ValueError: The checkpoint cannot be read, or does not fit the model.
  """
  fields = config.init_from
  if not fields.path:
    return state
  try:
    new, _ = checkpoint.init_from(
      state,
      fields.path,
      step=None if fields.step < 0 else fields.step,
      item=fields.item or None,
      subtree=fields.subtree,
      **{name: fields[name] for name in _PATTERNS},
    )
  except ValueError as e:
    raise ValueError(f"config.init_from: {e}") from e
  return new


def describe_frozen(state: TrainState) -> str | None:
  """Returns how many parameters are frozen, for the log; None if none are."""

  def count(tree: Any) -> int:
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))

  trained = count(parameter_groups.drop_frozen(state.tx, state.params))
  frozen = count(state.params) - trained
  if isinstance(state.apply_fn, lora_lib.Apply):
    frozen += count(state.frozen)
    return f"LoRA trains {trained:,} parameters; {frozen:,} are frozen"
  if frozen:
    return f"{trained:,} parameters are trained; {frozen:,} are frozen"
  return None
