"""States with wrappers, functions that save them, and what is compared."""

import functools
import logging
from typing import Any

import jax
import numpy as np
import plain_states

import flaxshard as fs

AGN = fs.AGN(4, commit="mean")
SCALED = fs.LossScale("dynamic")
STACKS = {
  "none": (),
  "loss_scale": (SCALED,),
  "agn": (AGN,),
  "both": (SCALED, AGN),
}


@functools.cache
def our_state(stack, tx=plain_states.TX):
  """Returns the state of `plain_states` with the wrappers of a stack."""
  strategy = None
  if AGN in STACKS[stack]:
    strategy = fs.Strategy(devices=jax.devices()[:2])
  return fs.TrainState.create(
    apply_fn=None,
    tx=tx,
    wrappers=STACKS[stack],
    strategy=strategy,
    **plain_states.variables(),
  )


def weights(
  value=1.0, tx=plain_states.TX, wrappers=(SCALED,), size=3, **fields
):
  """Returns a state of a single parameter, all of one value."""
  return fs.TrainState.create(
    apply_fn=None,
    params={"w": np.full(size, value, np.float32)},
    tx=tx,
    wrappers=wrappers,
    **fields,
  )


class Counter:
  """An iterator that has only a position; that of each process, or global."""

  def __init__(self, position: Any, position_is_global: bool = False):
    self.position = position
    self.position_is_global = position_is_global

  def get_state(self) -> Any:
    return self.position

  def set_state(self, position: Any) -> None:
    if position == "invalid":
      raise LookupError("no such position")
    self.position = position


def abstract(state):
  """Returns the shapes, dtypes and shardings of a state."""
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
  )


def assert_lies_like(given, wanted):
  for (path, x), y in zip(
    jax.tree_util.tree_leaves_with_path(given),
    jax.tree.leaves(wanted),
    strict=True,
  ):
    assert x.sharding == y.sharding, jax.tree_util.keystr(path)
    assert x.dtype == y.dtype and not jax.typeof(x).weak_type


def flip(file, place=None):
  """Changes a bit of a file: in the middle, or of the byte at a place."""
  content = bytearray(file.read_bytes())
  content[len(content) // 2 if place is None else place] ^= 1
  file.write_bytes(content)


def messages(caplog, level=logging.WARNING):
  """Returns what flaxshard has logged, but for steps without digests."""
  return [
    r.getMessage()
    for r in caplog.records
    if r.name.startswith("flaxshard")
    and r.levelno >= level
    and "no digests" not in r.getMessage()
  ]


def write_ours(path, *states, step=plain_states.STEP, **kwargs):
  """Saves states under a step and the steps after it."""
  with fs.Checkpointer(path, **kwargs) as checkpointer:
    for i, state in enumerate(states):
      checkpointer.save(step + i, state)
