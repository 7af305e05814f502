"""The facts of a run, the same for all workers: the object `run`."""

from __future__ import annotations

from collections.abc import Mapping
import hashlib
import json
from typing import Any
import zlib

import jax
import numpy as np

from flaxshard.center import encoding
from flaxshard.center import store
from flaxshard.center import train_states
from flaxshard.center.train_states import Layout
from flaxshard.core import checks
from flaxshard.core import extra_arguments
from flaxshard.core import opt_state as opt_state_lib
from flaxshard.state import fields as fields_lib
from flaxshard.state.train_state import TrainState
from flaxshard.wrappers import stack

_KEY = "run"


def read(objects: store.Objects) -> dict[str, Any]:
  """Returns the facts of the run in a store, which its first worker writes."""
  content, _ = objects.read(_KEY)
  return encoding.unpack(_KEY, content or b"")


def agree(
  objects: store.Objects,
  layout: Layout,
  state: TrainState,
  facts: Mapping[str, Any],
) -> None:
  """Writes the facts of a run, or compares them with those that are there.

  Args:
    objects: The store.
    layout: The fragments of the center.
    state: The train state of a worker.
    facts: Further facts, such as the config.

  Raises:
    ValueError: They differ; the message has the path and both values.
  """
  # First: a field of a config says more than what follows from it.
  own = {**json.loads(json.dumps(facts)), **_describe(layout, state)}
  content, generation = objects.read(_KEY)
  if content is None and objects.write(_KEY, encoding.pack(own), generation):
    return
  for path, here, there in checks.differences(own, read(objects)):
    raise ValueError(
      f"Worker: {path} is {here!r} here, and {there!r} in the run in "
      f"{objects.url}. All workers need the same. For another run use another "
      "directory, or remove this center."
    )


def _describe(layout: Layout, state: TrainState) -> dict[str, Any]:
  """Returns what a train state says of its run, as values for JSON."""
  agn, _ = train_states.find(state)
  arrays = train_states.leaves(fields_lib.variables(state))
  fields = ("communication_period", "commit", "commit_delta")
  # The other options may change, as the number of workers may.
  options = ("fragments", "delay", "blend", "commit_dtype")
  return {
    "AGN": {
      **{name: getattr(agn, name) for name in fields},
      "outer_tx": agn.outer_tx is not None,
      "transport": {name: getattr(agn.transport, name) for name in options},
    },
    "arrays": {p: f"{x.dtype}{list(x.shape)}" for p, x in arrays.items()},
    "parameters that do not change": {
      path: zlib.crc32(np.asarray(x).tobytes())
      for path, x in arrays.items()
      if path.split("/")[0] in ("params", stack.FROZEN)
      and path not in layout.sums
    },
    # Another one may make another program of the same update.
    "version of JAX": jax.__version__,
    "digest of an update by": {
      name: _digest(tx, layout.shapes)
      for name, tx in {"tx": state.tx, "outer_tx": agn.outer_tx}.items()
      if tx is not None and not extra_arguments.objective_of(tx)
    },
  }


def _digest(tx: Any, shapes: TrainState) -> str:
  """Returns a digest of an optimizer's update as a program.

  Hyper-parameters are constants of the program.
  """

  def update(params: Any, grads: Any) -> tuple[Any, Any]:
    opt_state = opt_state_lib.init(tx, params)
    return opt_state_lib.update(tx, params, opt_state, grads)

  _, own = train_states.find(shapes)
  traced = jax.jit(update).trace(shapes.params, own.grad_accum)
  # The same on machines with other accelerators.
  program = traced.lower(lowering_platforms=("cpu",)).as_text()
  return hashlib.sha256(program.encode()).hexdigest()[:16]
