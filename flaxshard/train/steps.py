"""The train step and the eval step of the training loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from clu import metrics as clu_metrics
import jax
import jax.numpy as jnp
import numpy as np

from flaxshard.core import trees
from flaxshard.replicas import values
from flaxshard.state.train_state import TrainState
from flaxshard.tasks import apply
from flaxshard.tasks.adapted import AdaptedTask
from flaxshard.wrappers import stack

Batch = Mapping[str, jax.Array]


class Progress(NamedTuple):
  """Results of the steps since the last row of metrics.

  Attributes:
    step: int32 scalar, number of batches consumed. It is counted on the
      devices, where no step waits for it.
    metrics: Metrics of the applied steps. A skipped step has no finite loss.
    bad_step: int32 scalar, the first applied step with a non-finite loss, or 0.
    bad_leaves: bool `[number of leaves of params]`, whether each parameter is
      not finite after that step. With AGN these are the local parameters.
  """

  step: jax.Array
  metrics: clu_metrics.Collection
  bad_step: jax.Array
  bad_leaves: jax.Array


def init_progress(
  task: AdaptedTask, state: TrainState, step: int = 0
) -> Progress:
  """Returns the progress before the steps that follow a step.

  Args:
    task: The task.
    state: The state, arrays or `jax.ShapeDtypeStruct`s.
    step: Number of batches consumed.
  """
  return Progress(
    step=jnp.int32(step),
    metrics=task.metrics.empty(),
    bad_step=jnp.zeros((), jnp.int32),
    bad_leaves=jnp.zeros(len(jax.tree.leaves(state.params)), bool),
  )


def train_step(
  task: AdaptedTask,
  state: TrainState,
  progress: Progress,
  batch: Batch,
  rng: jax.Array,
) -> tuple[TrainState, Progress]:
  """Takes one step on a batch.

  Args:
    task: The task.
    state: The train state.
    progress: The progress so far.
    batch: Arrays `[batch, ...]` by name.
    rng: The PRNG key of the run. The step and the replica are folded into it.

  Returns:
    The next state and progress.
  """
  step = progress.step + 1

  def loss_fn(params: Any) -> tuple[jax.Array, Any]:
    return task(state, params, batch, apply.train_rngs(rng, step), True)

  (loss, aux), grads = state.value_and_grad(loss_fn, has_aux=True)
  new_state = state.apply_gradients(grads=grads, **aux.collections)

  applied = new_state.step != state.step
  before = state.wrapper_states.get("accumulate")
  if before is not None:
    # A batch whose gradients are only accumulated is used, too.
    after = new_state.wrapper_states["accumulate"]
    applied |= after.num_batches != before.num_batches
  # A skipped step has no finite loss.
  metrics = jax.tree.map(
    lambda new, old: jnp.where(applied, new, old),
    task.update_metrics(progress.metrics, aux.metrics),
    progress.metrics,
  )
  # Only the first bad step: later ones have parameters broken by it.
  bad = applied & ~jnp.isfinite(loss) & (progress.bad_step == 0)
  # A conditional: reading all parameters at every step would cost time.
  bad_leaves = jax.lax.cond(
    bad,
    lambda params, _: jnp.stack(
      [~jnp.all(jnp.isfinite(p)) for p in jax.tree.leaves(params)]
    ),
    lambda _, leaves: leaves,
    _working_params(new_state),
    progress.bad_leaves,
  )
  return new_state, Progress(
    step=step,
    metrics=metrics,
    bad_step=jnp.where(bad, step, progress.bad_step),
    bad_leaves=bad_leaves,
  )


def eval_step(
  task: AdaptedTask,
  state: TrainState,
  metrics: Any,
  batch: Batch,
  rng: jax.Array,
  index: Any,
) -> Any:
  """Merges the metrics of one evaluation batch into `metrics`.

  Args:
    task: The task.
    state: The train state.
    metrics: The metrics so far, of the task or of another collection.
    batch: As in `train_step`, with a bool `mask` `[batch]` that is False for
      padding.
    rng: The PRNG key of evaluations.
    index: The number of the batch, which is folded into the key.

  Returns:
    The merged metrics.
  """
  rngs = apply.Rngs(jax.random.fold_in(rng, index))
  _, aux = task(state, state.params, batch, rngs, False)
  return task.update_metrics(metrics, aux.metrics, mask=batch["mask"])


def combine_replicas(progress: Progress) -> Progress:
  """Combines the progress of all replicas.

  Args:
    progress: Arrays, or `PerReplica` of them.

  Returns:
    The summed metrics, the first bad step of any replica, and the leaves that
    are bad after it.
  """
  if not values.is_per_replica(progress.bad_step):
    return progress
  # Takes the arrays `[replicas, ...]` out of the `PerReplica`s.
  rows: Progress = jax.tree.map(
    lambda x: jnp.asarray(x.value), progress, is_leaf=values.is_per_replica
  )
  is_bad = rows.bad_step > 0  # 0 means no bad step
  largest = np.iinfo(np.int32).max
  first = jnp.min(rows.bad_step, initial=largest, where=is_bad)
  is_first = (rows.bad_step == first)[:, None]
  return Progress(
    step=rows.step[0],
    metrics=rows.metrics.reduce(),
    bad_step=jnp.where(is_bad.any(), first, 0),
    bad_leaves=jnp.any(rows.bad_leaves, axis=0, where=is_first),
  )


def bad_paths(state: TrainState, progress: Progress) -> list[str]:
  """Returns the paths of the parameters marked in `progress.bad_leaves`."""
  paths = jax.tree_util.tree_leaves_with_path(state.params)
  return [
    trees.path_string(path)
    for (path, _), bad in zip(paths, progress.bad_leaves, strict=True)
    if bad
  ]


def _working_params(state: TrainState) -> Any:
  """Returns the parameters at which the next loss is computed."""
  states = stack.local_states(state.wrappers, state.wrapper_states)
  return stack.params(state.wrappers, states, state.params, "train")
