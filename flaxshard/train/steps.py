"""The train step and the eval step of the training loop."""

from __future__ import annotations

from typing import Any, NamedTuple

from clu import metrics as clu_metrics
import jax
import jax.numpy as jnp
import numpy as np

from flaxshard.core import checks
from flaxshard.replicas import values
from flaxshard.state.train_state import TrainState
from flaxshard.tasks import apply
from flaxshard.tasks.task import AdaptedTask
from flaxshard.tasks.task import Batch


class Progress(NamedTuple):
  """Results of the steps since the last row of metrics.

  Attributes:
    step: int32 scalar, number of batches consumed. It is counted on the
      devices, where no step waits for it.
    metrics: Metrics of the applied steps. A skipped step has no finite loss.
    bad_step: int32 scalar, the first applied step with a non-finite loss, or 0.
  """

  step: jax.Array
  metrics: clu_metrics.Collection
  bad_step: jax.Array


def init_progress(task: AdaptedTask, step: int = 0) -> Progress:
  """Returns the progress before the steps that follow a step.

  Args:
    task: The task.
    step: Number of batches consumed.
  """
  return Progress(
    step=jnp.int32(step),
    metrics=task.metrics.empty(),
    bad_step=jnp.zeros((), jnp.int32),
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
    rngs = apply.Rngs(jax.random.fold_in(apply.fold_in_replica(rng), step))
    return task(state, params, batch, rngs, True)

  (loss, aux), grads = state.value_and_grad(loss_fn, has_aux=True)
  new_state = state.apply_gradients(grads=grads, **aux.collections)

  applied = new_state.step != state.step
  before = state.wrapper_states.get("accumulate")
  if before is not None:
    # A batch whose gradients are only accumulated is used, too.
    after = new_state.wrapper_states["accumulate"]
    applied |= after.num_batches != before.num_batches
  # A skipped step has no finite loss.
  of_batch = task.metrics.single_from_model_output(**aux.metrics)
  metrics = jax.tree.map(
    lambda new, old: jnp.where(applied, new, old),
    progress.metrics.merge(of_batch),
    progress.metrics,
  )
  # Only the first bad step: later ones have parameters broken by it.
  is_bad = applied & ~jnp.isfinite(loss) & (progress.bad_step == 0)
  bad_step = jnp.where(is_bad, step, progress.bad_step)
  return new_state, Progress(step, metrics, bad_step)


def eval_step(
  task: AdaptedTask,
  state: TrainState,
  metrics: Any,
  batch: Batch,
  rng: jax.Array,
  index: Any,
  *,
  is_padded: bool = False,
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
    is_padded: Whether the last batch has padding; then means over a batch are
      warned of.

  Returns:
    The merged metrics.
  """
  rngs = apply.Rngs(jax.random.fold_in(rng, index))
  _, aux = task(state, state.params, batch, rngs, False)
  scalars = [name for name, x in aux.metrics.items() if not jnp.shape(x)]
  if is_padded and scalars:
    checks.warn(
      f"{task.name}.loss: Aux.metrics has scalars: {', '.join(scalars)}. The "
      "evaluation examples are no multiple of config.batch_size="
      f"{batch['mask'].size}, and the padding of the last batch counts in "
      "them. Return arrays [batch]: the metrics take their mean."
    )
  # The task may have a mask of its own, say of tokens.
  values = {"mask": batch["mask"], **aux.metrics}
  return metrics.merge(type(metrics).single_from_model_output(**values))


def combine_replicas(progress: Progress) -> Progress:
  """Combines the progress of all replicas.

  Args:
    progress: `PerReplica` of arrays.

  Returns:
    The summed metrics, and the first bad step of any replica.
  """
  # Takes the arrays `[replicas, ...]` out of the `PerReplica`s.
  rows: Progress = jax.tree.map(
    lambda x: jnp.asarray(x.value), progress, is_leaf=values.is_per_replica
  )
  is_bad = rows.bad_step > 0  # 0 means no bad step
  largest = np.iinfo(np.int32).max
  first = jnp.min(rows.bad_step, initial=largest, where=is_bad)
  return Progress(
    step=rows.step[0],
    metrics=rows.metrics.reduce(),
    bad_step=jnp.where(is_bad.any(), first, 0),
  )
