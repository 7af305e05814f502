"""The train step and the eval step of the training loop."""

# No `from __future__ import annotations`: clu's Collection needs the types of
# its fields, not strings.
from collections.abc import Mapping
from typing import Any, NamedTuple

from clu import metrics as clu_metrics
import flax
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
import jax
import jax.numpy as jnp
import numpy as np
import optax

from flaxshard.core import trees
from flaxshard.replicas import context as replica_context
from flaxshard.replicas import values
from flaxshard.state import fields as fields_lib
from flaxshard.state import nnx_adapter
from flaxshard.state.train_state import TrainState
from flaxshard.wrappers import stack

Batch = Mapping[str, jax.Array]


@flax.struct.dataclass
class Metrics(clu_metrics.Collection):
  """Means over labels, without those where `mask` is False."""

  loss: clu_metrics.Average.from_output("loss")  # type: ignore[valid-type]
  accuracy: clu_metrics.Average.from_output("correct")  # type: ignore[valid-type]


@flax.struct.dataclass
class EvalMetrics(clu_metrics.Collection):
  """`Metrics`, and how many of the model's outputs are probabilities."""

  # Not derived from Metrics: clu reads the fields of the class itself alone.
  loss: clu_metrics.Average.from_output("loss")  # type: ignore[valid-type]
  accuracy: clu_metrics.Average.from_output("correct")  # type: ignore[valid-type]
  probabilities: clu_metrics.Average.from_output("sums_to_one")  # type: ignore[valid-type]


class Progress(NamedTuple):
  """Results of the steps since the last row of metrics.

  Attributes:
    metrics: Metrics of the applied steps. A skipped step has no finite loss.
    bad_step: int32 scalar, the first applied step with a non-finite loss, or 0.
    bad_leaves: bool `[number of leaves of params]`, whether each parameter is
      not finite after that step. With AGN these are the local parameters.
  """

  metrics: Metrics
  bad_step: jax.Array
  bad_leaves: jax.Array


def init_progress(state: TrainState) -> Progress:
  """Returns the progress before any step.

  Args:
    state: The state, arrays or `jax.ShapeDtypeStruct`s.
  """
  return Progress(
    metrics=Metrics.empty(),
    bad_step=jnp.zeros((), jnp.int32),
    bad_leaves=jnp.zeros(len(jax.tree.leaves(state.params)), bool),
  )


def train_step(
  state: TrainState,
  progress: Progress,
  batch: Batch,
  rng: jax.Array,
  step: jax.Array,
) -> tuple[TrainState, Progress]:
  """Takes one step on a batch.

  Args:
    state: The train state.
    progress: The progress so far.
    batch: `inputs` and integer `labels`, `[batch, ...]`. The model returns
      logits of the shape of the labels and one more dimension, the classes.
    rng: The PRNG key of the run. The step and the replica are folded into it.
    step: int32 scalar, number of batches consumed, including this one.

  Returns:
    The next state and progress.
  """

  def loss_fn(params: Any) -> tuple[jax.Array, Any]:
    rngs = {"dropout": jax.random.fold_in(_fold_in_replica(rng), step)}
    logits, collections = _apply(state, params, batch, rngs)
    losses = _losses(logits, batch)
    return losses.mean(), (losses, logits, collections)

  (loss, aux), grads = state.value_and_grad(loss_fn, has_aux=True)
  losses, logits, collections = aux
  new_state = state.apply_gradients(grads=grads, **collections)

  applied = new_state.step != state.step
  metrics = Metrics.single_from_model_output(
    loss=losses,
    correct=_correct(logits, batch),
    mask=jnp.broadcast_to(applied, losses.shape[:1]),
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
    metrics=progress.metrics.merge(metrics),
    bad_step=jnp.where(bad, step, progress.bad_step),
    bad_leaves=bad_leaves,
  )


def counted_train_step(
  state: TrainState,
  progress: Progress,
  batch: Batch,
  rng: jax.Array,
  step: jax.Array,
) -> tuple[TrainState, Progress, jax.Array]:
  """Takes one step like `train_step`, and returns the number of the next one.

  So the number stays on the devices, where no step waits for it.
  """
  new_state, new_progress = train_step(state, progress, batch, rng, step)
  return new_state, new_progress, step + 1


def eval_step(state: TrainState, metrics: Any, batch: Batch) -> Any:
  """Merges the metrics of one evaluation batch into `metrics`.

  Args:
    state: The train state.
    metrics: The `Metrics` or `EvalMetrics` so far.
    batch: As in `train_step`, with a bool `mask` `[batch]` that is False for
      padding.

  Returns:
    The merged metrics.
  """
  logits, _ = _apply(state, state.params, batch, None)
  return metrics.merge(
    type(metrics).single_from_model_output(
      loss=_losses(logits, batch),
      correct=_correct(logits, batch),
      sums_to_one=_sums_to_one(logits),
      mask=batch["mask"],
    )
  )


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
    metrics=jax.tree.map(lambda x: jnp.sum(x, axis=0), rows.metrics),
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
  states = state.wrapper_states
  if replica_context.get_replica_context() is None:
    states = stack.drop_replica_axis(state.wrappers, states)
  return stack.working_params(state.wrappers, states, state.params)


def _apply(
  state: TrainState, params: Any, batch: Batch, rngs: Any
) -> tuple[jax.Array, dict[str, Any]]:
  """Applies the model, in training mode if there are `rngs`.

  Returns:
    The logits, and the new values of the collections.
  """
  fixed = ("step", "params", "opt_state", "wrapper_states")
  names = [n for n in fields_lib.array_field_names(state) if n not in fixed]
  if OVERWRITE_WITH_GRADIENT in params:
    # Flax's fp8 layers: params holds both collections, by name.
    variables = dict(params)
  else:
    variables = {"params": params}
  collections = {name: getattr(state, name) for name in names}
  train = rngs is not None
  variables.update(_fold_in_replica(collections) if train else collections)
  kwargs: dict[str, Any]
  if isinstance(state.apply_fn, nnx_adapter.Apply):
    kwargs = {"mode": "train" if train else "eval"}
  else:
    kwargs = {"train": train, **({"rngs": rngs} if train else {})}
  mutable = names if train else []
  logits, new = state.apply_fn(
    variables, batch["inputs"], mutable=mutable, **kwargs
  )
  return logits, _restore_keys(new, collections)


def _fold_in_replica(tree: Any) -> Any:
  """Folds the replica into the PRNG keys of a tree.

  Otherwise all replicas would drop the same units. NNX modules carry their keys
  in a collection.
  """
  context = replica_context.get_replica_context()
  if context is None:
    return tree

  return jax.tree.map(lambda x: context.fold_in(x) if _is_key(x) else x, tree)


def _restore_keys(new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
  """Undoes `_fold_in_replica`: the state must be the same on all replicas."""
  if replica_context.get_replica_context() is None:
    return new
  return jax.tree.map(
    lambda x, before: before if _is_key(before) else x,
    new,
    {name: old[name] for name in new},
  )


def _is_key(x: jax.Array) -> bool:
  return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _losses(logits: jax.Array, batch: Batch) -> jax.Array:
  if logits.shape[:-1] != batch["labels"].shape or not logits.ndim:
    raise ValueError(
      "the model must return logits with the shape of the labels and one more "
      f"dimension, the classes; got {logits.shape} for labels "
      f"{batch['labels'].shape}."
    )
  # In float32 with every precision policy.
  return optax.softmax_cross_entropy_with_integer_labels(
    logits.astype(jnp.float32), batch["labels"]
  )


def _sums_to_one(logits: jax.Array) -> jax.Array:
  """Returns 1.0 where the outputs are probabilities, as of a softmax."""
  logits = logits.astype(jnp.float32)
  # Wide enough for probabilities in bfloat16.
  is_one = jnp.abs(logits.sum(-1) - 1) < 0.01
  return (is_one & (logits.min(-1) >= 0)).astype(jnp.float32)


def _correct(logits: jax.Array, batch: Batch) -> jax.Array:
  return (logits.argmax(-1) == batch["labels"]).astype(jnp.float32)
