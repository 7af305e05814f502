"""Checks the arguments of AGN."""

from __future__ import annotations

import inspect
from typing import Any

from flaxshard.core import block_quantization
from flaxshard.core import checks

# The arguments of transport="host", and their defaults.
HOST_DEFAULTS = {"quorum": 1, "deadline": 60.0, "heartbeat": 10.0}

# Sequential commits are stable if the period is at least this number times the
# number of replicas (measured with `tf.contrib.opt.AGNOptimizer`).
_STABLE_PERIOD = 0.64


def check(agn: Any) -> dict[str, Any]:
  """Checks the arguments of an `AGN`.

  Args:
    agn: The wrapper.

  Returns:
    The numbers among its arguments as plain Python numbers: configs hold these.

  Raises:
    TypeError, ValueError: See `AGN`.
  """
  integer, number = checks.integer, checks.number
  period = integer(
    "AGN: communication_period", agn.communication_period, minimum=1
  )
  checks.one_of("AGN: commit", agn.commit, ("sequential", "mean", "sum"))
  checks.boolean("AGN: share_step_count", agn.share_step_count)
  checks.boolean("AGN: commit_delta", agn.commit_delta)
  checks.one_of("AGN: transport", agn.transport, ("compiled", "host"))
  plain = {
    "communication_period": period,
    "fragments": integer("AGN: fragments", agn.fragments, minimum=1),
    "delay": integer("AGN: delay", agn.delay, minimum=0),
    "blend": number("AGN: blend", agn.blend, minimum=0, below=1),
    "quorum": integer("AGN: quorum", agn.quorum, minimum=1),
    "deadline": number("AGN: deadline", agn.deadline, above=0),
    "heartbeat": number("AGN: heartbeat", agn.heartbeat, above=0),
  }
  if agn.fragment_offset is not None:
    plain["fragment_offset"] = integer(
      "AGN: fragment_offset", agn.fragment_offset, minimum=0
    )
  _check_schedule(period, plain)
  _check_commit_dtype(agn)
  _check_outer_tx(agn)
  _check_host_arguments(agn, plain)
  return plain


def warn_of_short_period(agn: Any, count: int, noun: str) -> None:
  """Warns if sequential commits are too frequent to be stable.

  Args:
    agn: The wrapper.
    count: The number of those that commit.
    noun: What they are: "replicas" or "workers".
  """
  least = _STABLE_PERIOD * count
  if agn.commit == "sequential" and agn.communication_period < least:
    checks.warn(
      f"AGN: communication_period={agn.communication_period} is short for "
      f"sequential commits of {count} {noun}: before a commit is applied, the "
      f"center changes by {count - 1} other commits, and below about "
      f"{_STABLE_PERIOD} * {count} = {least:.1f} local steps training may "
      "diverge. Use a longer period, a lower learning rate, or commit='mean'.",
    )


def _check_schedule(period: int, plain: dict[str, Any]) -> None:
  """Checks that every fragment is committed once in a period, in order."""
  fragments, delay = plain["fragments"], plain["delay"]
  offset = plain.get("fragment_offset")
  if offset is None:
    if fragments > period:
      raise ValueError(
        f"AGN: fragments={fragments} must be at most communication_period="
        f"{period}, as each is committed at a step of its own. "
        "fragment_offset=0 commits all at the same step."
      )
  elif offset * (fragments - 1) >= period:
    raise ValueError(
      f"AGN: fragment_offset={offset} is too large: fragments={fragments} are "
      f"all committed within communication_period={period} steps, so it must "
      f"be at most {(period - 1) // (fragments - 1)}."
    )
  if delay >= period:
    raise ValueError(
      f"AGN: delay must be below communication_period={period}, got {delay}: "
      "a commit is applied before the next one is sent."
    )


def _check_commit_dtype(agn: Any) -> None:
  if agn.commit_dtype is None:
    return
  checks.one_of(
    "AGN: commit_dtype",
    agn.commit_dtype,
    (None, *block_quantization.FORMATS),
  )
  if agn.commit == "sequential" and agn.transport == "compiled":
    raise ValueError(
      "AGN: commit_dtype must be None with commit='sequential', got "
      f"{agn.commit_dtype!r}: replicas receive parameters then, which are "
      "not quantized. Use commit='mean' or 'sum', or transport='host'."
    )


def _check_outer_tx(agn: Any) -> None:
  if agn.outer_tx is None:
    return
  # Not by isinstance: optax.MultiSteps is no GradientTransformation.
  if not {"init", "update"} <= set(dir(agn.outer_tx)):
    hint = ""
    if inspect.isfunction(agn.outer_tx):
      hint = f" Call it, as in {agn.outer_tx.__name__}(1.0)."
    raise TypeError(
      "AGN: outer_tx must be an optax GradientTransformation or None, got "
      f"{checks.describe(agn.outer_tx)}.{hint}"
    )
  if agn.share_step_count:
    raise ValueError(
      "AGN: share_step_count=True needs one optimizer for local steps and "
      f"commits, got outer_tx={agn.outer_tx!r} as well."
    )


def _check_host_arguments(agn: Any, plain: dict[str, Any]) -> None:
  if agn.transport == "host":
    return
  for name, default in HOST_DEFAULTS.items():
    if plain[name] != default:
      raise ValueError(
        f"AGN: {name} must be {default} with transport='compiled', got "
        f"{plain[name]!r}: all replicas take part in every commit of one "
        "program. Use transport='host'."
      )
