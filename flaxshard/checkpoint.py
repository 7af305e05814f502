"""Checkpoints: a plain Flax one, and the wrappers' states beside it.

    checkpoints/1200/default/         step, params, opt_state, collections
                     wrappers/        the wrappers' states; absent when empty
                     input_iterator/  where the data stands; absent without data

The item `default` is what a plain Flax program writes, so that one reads it
with its usual strict call, and ours reads a plain one.
"""

from __future__ import annotations

from collections.abc import Sequence
import json
import logging
import os
import types
from typing import Any, Protocol

import grain
import jax
import numpy as np
import orbax.checkpoint as ocp

from flaxshard import divergence
from flaxshard import fields
from flaxshard import templates
from flaxshard import trees
from flaxshard import values
from flaxshard import wrapper_checkpoint
from flaxshard.train_state import TrainState

_log = logging.getLogger(__name__)

_PLAIN = "default"
_WRAPPERS = wrapper_checkpoint.ITEM
_DATA = "input_iterator"


class Positioned(Protocol):
  """An iterator that knows where it stands: Grain's, a `DistributedIterator`.

  States are bytes, or what JSON can hold.
  """

  def get_state(self) -> Any:
    """Returns where it stands."""
    ...

  def set_state(self, state: Any) -> None:
    """Goes on from a state."""
    ...

  def start_prefetch(self) -> None:
    """Begins to read ahead."""
    ...


class Checkpointer:
  """Saves and restores train states, over Orbax's `CheckpointManager`.

  Saves are asynchronous; leaving the context waits for the last one.

  Args:
    directory: Where the checkpoints lie; made if it does not exist.
    max_to_keep: How many of the newest to keep; None keeps all.

  Raises:
    ValueError: `directory` cannot be written, or `max_to_keep` is below 1.

  Example:
    >>> import flaxshard as fs, jax.numpy as jnp, optax, tempfile
    >>> state = fs.TrainState.create(
    ...     apply_fn=None, params={"w": jnp.ones(3)}, tx=optax.adam(0.1),
    ...     wrappers=[fs.LossScale("dynamic")])
    >>> with Checkpointer(tempfile.mkdtemp()) as checkpointer:
    ...   checkpointer.save(1, state)
    ...   state = checkpointer.restore(state)
    ...   checkpointer.latest_step()
    1
  """

  def __init__(
    self, directory: str | os.PathLike[str], *, max_to_keep: int | None = None
  ):
    if max_to_keep is not None and max_to_keep < 1:
      raise ValueError(
        f"max_to_keep must be at least 1, or None, got {max_to_keep!r}."
      )
    self.directory = os.path.abspath(os.fspath(directory))
    check_writable("directory", self.directory)
    self._manager = ocp.CheckpointManager(
      self.directory,
      options=ocp.CheckpointManagerOptions(max_to_keep=max_to_keep),
      # Named here, or a fresh process could not restore them.
      item_handlers={
        _PLAIN: ocp.StandardCheckpointHandler(),
        # This one, unlike Standard's, can leave out what is not wanted.
        _WRAPPERS: ocp.PyTreeCheckpointHandler(),
        _DATA: grain.checkpoint.CheckpointHandler(),
      },
    )

  def __enter__(self) -> Checkpointer:
    """Returns itself."""
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    traceback: types.TracebackType | None,
  ) -> None:
    """Waits for the last save, and closes the manager."""
    self._manager.close()

  def latest_step(self) -> int | None:
    """Returns the newest step that was saved, or None."""
    return self._manager.latest_step()

  def all_steps(self) -> Sequence[int]:
    """Returns the steps that were saved, in ascending order."""
    return sorted(self._manager.all_steps())

  def wait(self) -> None:
    """Waits until what was saved is on disk."""
    self._manager.wait_until_finished()

  def save(
    self,
    step: int,
    state: TrainState,
    data: Positioned | None = None,
  ) -> None:
    """Saves a state; a step that is there already is left as it is.

    Args:
      step: The number to save under: usually the batches consumed.
      state: The state. It may be donated as soon as this returns. Of groups of
        replicas that differ, what replica 0 has is saved, and the log says so.
      data: The iterator to save the position of.

    Raises:
      TypeError: A leaf of the state is not an array, or `data` cannot tell
        where it stands.
      ValueError: A leaf of the state has no elements.
    """
    if step in self._manager.all_steps():
      return
    trees.check_arrays("state", state)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
      if 0 in np.shape(leaf):
        # Orbax refuses it too, and then hangs when the process exits.
        raise ValueError(
          f"state[{trees.path_string(path)}] has no elements, shape "
          f"{np.shape(leaf)}: Orbax cannot save that."
        )
    note = divergence.note(state)
    if note:
      _log.info("step %d: %s", step, note)
      state = divergence.of_first_replica(state)
    position = None if data is None else _Position(data)
    items: dict[str, Any] = {
      _PLAIN: ocp.args.StandardSave(state.without_wrappers())
    }
    wrapper_states = wrapper_checkpoint.nonempty(state.wrapper_states)
    if wrapper_states:
      items[_WRAPPERS] = ocp.args.PyTreeSave(wrapper_states)
    if position is not None:
      items[_DATA] = grain.checkpoint.CheckpointSave(position)
    self._manager.save(step, args=ocp.args.Composite(**items))

  def restore(
    self,
    state: TrainState,
    step: int | None = None,
    data: Positioned | None = None,
  ) -> TrainState:
    """Restores a checkpoint into the structure and shardings of `state`.

    A wrapper that the checkpoint does not have keeps its state from `state`;
    one with `restart`, such as `AGN`, begins at the restored parameters. So it
    does where the checkpoint is of another number of replicas: what each of
    those had its own of is dropped, with a warning. A state of a wrapper that
    `state` does not have stays on disk. All of that is told in the log.

    Args:
      state: A state of the same model and optimizer.
      step: The step to restore; None is the latest.
      data: An iterator to set to where it stood.

    Returns:
      The restored state. What each replica has its own of was saved as one,
      `TrainState.without_wrappers`; all replicas get that.

    Raises:
      ValueError: There is no such checkpoint, it has no position of the data,
        or its tree differs from `state`; the message names the first path that
        differs. Nothing on disk is changed.
    """
    self.wait()
    steps = self.all_steps()
    step = self.latest_step() if step is None else step
    if step is None or step not in steps:
      raise ValueError(
        f"no checkpoint of step {step} in {self.directory}; there are {steps}."
      )
    where = os.path.join(self.directory, str(step))
    saved = self._manager.item_metadata(step)
    plain = state.without_wrappers()
    templates.check_same(where, _PLAIN, saved[_PLAIN], plain)
    items: dict[str, Any] = {
      _PLAIN: ocp.args.StandardRestore(templates.abstract(plain))
    }
    plan = wrapper_checkpoint.plan(where, state, saved.get(_WRAPPERS) or {})
    wrapper_args = plan.args()
    if wrapper_args is not None:
      items[_WRAPPERS] = wrapper_args
    if data is not None:
      if not os.path.isdir(os.path.join(where, _DATA)):
        raise ValueError(f"{where} has no {_DATA}: where the data stood.")
      items[_DATA] = grain.checkpoint.CheckpointRestore(_Position(data))

    restored = self._manager.restore(step, args=ocp.args.Composite(**items))
    templates.check_restored(where, restored[_PLAIN], plain)
    new = {
      name: values.spread(getattr(restored[_PLAIN], name), getattr(state, name))
      for name in fields.data_names(plain)
    }
    if state.wrapper_states:
      new["wrapper_states"] = plan.finish(
        restored[_PLAIN], restored.get(_WRAPPERS)
      )
    return state.replace(**new)


def check_writable(argument: str, directory: str) -> None:
  """Raises a ValueError unless `directory` exists, or is made, and is ours."""
  try:
    os.makedirs(directory, exist_ok=True)
    probe = os.path.join(directory, f".write_test_{os.getpid()}")
    with open(probe, "w"):
      pass
    os.remove(probe)
  except OSError as e:
    raise ValueError(
      f"{argument}={directory!r} cannot be written: {e.strerror or e}."
    ) from e


class _Position:
  """A position as the text that Grain's handler writes for its own iterators.

  It is taken when this is made: an error in the middle of a save would leave
  Orbax hanging when the process exits.
  """

  def __init__(self, data: Positioned):
    self._data = data
    state = data.get_state()
    self._is_text = isinstance(state, bytes)
    try:
      self._text = state if self._is_text else _json(state)
    except (TypeError, ValueError) as e:
      raise TypeError(
        f"data.get_state() must be bytes, or what JSON can hold: {e}."
      ) from e

  def get_state(self) -> bytes:
    return self._text

  def set_state(self, text: bytes) -> None:
    self._data.set_state(text if self._is_text else json.loads(text))

  def start_prefetch(self) -> None:
    self._data.start_prefetch()


def _json(state: Any) -> bytes:
  return json.dumps(state, indent=4).encode()
