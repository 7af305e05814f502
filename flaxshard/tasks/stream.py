"""Training batches that a task makes as the run goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
import functools
from typing import Any

import jax

from flaxshard.core import checks
from flaxshard.core import registry
from flaxshard.core import trees
from flaxshard.data import sharding
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.state import replica_groups
from flaxshard.state.train_state import TrainState
from flaxshard.tasks.task import AdaptedTask

# Folded into the key of the run: other keys than those of the train step.
_STREAM = 2**31 - 2


class Stream:
  """Argument of `Task.train_batches`: the state, the step and a PRNG key.

  The training loop takes from it the batches that the method makes. Its
  position in a checkpoint is the number of steps. Restored, it calls the method
  again, which begins at that step.

  Args:
    task: The task.
    seed: The seed of the run.
    batch: Shapes and shardings of the arrays of a batch, by key.
    newest_state: Returns the newest train state.
    worker_id: Index of the worker that this process is. Each makes batches of
      its own, of its share of `config.batch_size`.

  Attributes:
    batch_size: Examples in a batch, over all replicas and processes.
    step: The number of steps taken; not 0 in a run that is resumed.
  """

  position_is_global = True

  def __init__(
    self,
    task: AdaptedTask,
    seed: int,
    batch: Mapping[str, jax.ShapeDtypeStruct],
    newest_state: Callable[[], TrainState],
    worker_id: int = 0,
  ):
    self.batch_size = next(iter(batch.values())).shape[0]
    self.step = 0
    self._task = task
    self._batch = batch
    self._batches: Iterator[Any] | None = None
    self._newest_state = newest_state
    self._state: Callable[[], TrainState] | None = None
    self._key = jax.random.fold_in(jax.random.key(seed), _STREAM)
    if worker_id:
      # Other batches than those of worker 0.
      self._key = jax.random.fold_in(self._key, worker_id)

  @property
  def rng(self) -> jax.Array:
    """The PRNG key of the next batch. It depends on the seed and the step."""
    return jax.random.fold_in(self._key, self.step)

  def state(self) -> TrainState:
    """Returns the newest train state; of replicas that differ, the first one.

    Read it anew for each batch: the next train step deletes its arrays. Of
    several processes, all must call it.
    """
    if self._state is None:
      raise RuntimeError("stream.state() is there only while a batch is made.")
    return self._state()

  def __next__(self) -> dict[str, jax.Array]:
    """Returns the next batch, on the devices.

    Raises:
      ValueError: The task made no batch, or one of other shapes than
        those of its examples.
    """
    # Only if it is asked for, and once: this may be a collective.
    self._state = functools.cache(
      lambda: replica_groups.of_first_replica(self._newest_state())
    )
    try:
      if self._batches is None:
        self._batches = iter(self._task.train_batches(self))
      arrays = self._put(next(self._batches, None))
    finally:
      # The train step donates the state.
      self._state = None
    self.step += 1
    return arrays

  def get_state(self) -> dict[str, int]:
    """Returns the position."""
    return {"step": self.step}

  def set_state(self, position: Mapping[str, int]) -> None:
    """Continues from a position."""
    self.step = position["step"]
    self._batches = None

  def skip(self, count: int) -> None:
    """Goes on after the next batches, which are not made."""
    self.set_state({"step": self.step + count})

  def close(self) -> None:
    """Ends the generator of the task, whose `finally` blocks run."""
    close = getattr(self._batches, "close", None)
    if close is not None:
      close()

  def _put(self, batch: Any) -> dict[str, jax.Array]:
    """Returns a batch as global arrays."""
    where = f"{self._task.name}.train_batches, after {self.step} steps"
    if not isinstance(batch, Mapping):
      raise ValueError(
        f"{where}: it must make a dict of arrays at each of "
        f"config.num_train_steps steps, got {checks.describe(batch)}."
      )
    arrays: Any
    with registry.errors_name(where):
      arrays = sharding.flatten(dict(batch)).arrays
    given = {
      key: jax.ShapeDtypeStruct(x.shape, sharding.dtype_of(x))
      for key, x in arrays.items()
    }
    if difference := trees.first_difference(given, self._batch):
      raise ValueError(
        f"{where}: a batch differs from config.batch_size examples in "
        f"{difference}."
      )
    # All processes have made the same batch.
    return {
      key: mesh_lib.put(arrays[key].astype(x.dtype), x.sharding, compare=False)
      for key, x in self._batch.items()
    }
