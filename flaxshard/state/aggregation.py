"""`aggregation`: how a step reduces gradients over the replicas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from flaxshard.core import checks
from flaxshard.replicas import context as replica_context
from flaxshard.wrappers import base


def check(
  aggregation: Any, is_skipped: bool, wrappers: Sequence[base.Wrapper]
) -> str:
  """Returns "mean" or "sum"; the mean for None.

  Args:
    aggregation: "mean", "sum" or None.
    is_skipped: Whether gradients are not reduced at all.
    wrappers: The wrappers of the state.

  Raises:
    ValueError: It is none of these, or something else decides already.
  """
  if aggregation is None:
    return "mean"
  replica_context.check_reduce_op(aggregation, "aggregation")
  given = f"aggregation={aggregation!r}"
  if is_skipped:
    raise ValueError(
      f"{given} reduces gradients, and skip_gradients_aggregation=True says "
      "that they are reduced already: give one of the two."
    )
  for wrapper in wrappers:
    if base.adapt(wrapper).reduces_gradients:
      raise ValueError(
        f"{given}: {base.name_of(wrapper)!r} reduces the gradients of this "
        "state; choose the reduction in that wrapper, and leave aggregation "
        "out."
      )
  if aggregation == "sum" and replica_context.get_replica_context() is None:
    checks.warn(
      f"{given} has no effect outside of Strategy.run: there is one replica. "
      "Under jax.jit the gradient is that of the loss over the whole batch."
    )
  return aggregation


def check_extra_arguments(reduction: str, names: Iterable[str]) -> None:
  """Raises a ValueError if a sum contradicts arguments of the optimizer."""
  # They are means over the replicas, and must be those of the gradients.
  means = sorted({"grad", "value_fn"} & set(names))
  if reduction == "sum" and means:
    raise ValueError(
      f"aggregation='sum': the optimizer uses {' and '.join(means)}, the mean "
      "over the replicas; use aggregation='mean'."
    )
