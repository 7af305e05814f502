"""Counts the bytes of commits from host to host, which no program shows."""

from __future__ import annotations

import math

import jax

from flaxshard.analysis import memory
from flaxshard.core import block_quantization
from flaxshard.state import host_commits
from flaxshard.state.train_state import TrainState
from flaxshard.wrappers import agn_schedule


def count(state: TrainState) -> list[int]:
  """Returns the bytes of each commit of a period.

  Args:
    state: A state with `AGN(transport="host")`; its arrays may be
      `jax.ShapeDtypeStruct`s.
  """
  agn = host_commits.find(state.wrappers)
  assert agn is not None
  counts = []
  for fragments in agn_schedule.groups_of(agn):
    _, commit = jax.eval_shape(
      lambda s, fragments=fragments: host_commits.take(s, fragments), state
    )
    quantized: frozenset[str] = frozenset()
    if agn.commit_dtype is not None:
      quantized = host_commits.quantized_keys(state, fragments)
    counts.append(
      sum(
        _num_bytes(x, agn.commit_dtype if key in quantized else None)
        for key, x in commit.items()
      )
    )
  return counts


def describe(state: TrainState) -> str:
  """Returns a sentence on the bytes of a worker's commits.

  Args:
    state: As for `count`.
  """
  agn = host_commits.find(state.wrappers)
  assert agn is not None
  counts = count(state)
  total = memory.format_bytes(sum(counts))
  parts = ""
  if len(counts) > 1:
    largest = memory.format_bytes(max(counts))
    parts = f", in {len(counts)} commits of at most {largest}"
  return (
    "This is the step of one worker. Its commits go from host to host, and are "
    f"not in the program: {total} per {agn.communication_period} local steps"
    f"{parts}. The answers have as many values."
  )


def _num_bytes(x: jax.ShapeDtypeStruct, fmt: str | None) -> int:
  size = math.prod(x.shape)
  if fmt is None:
    return size * x.dtype.itemsize
  return block_quantization.num_bytes(size, fmt)
