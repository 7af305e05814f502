"""The train and the eval step of the training loop."""

# No deferred annotations here: clu reads the fields of a Collection as types.
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
  """Means over labels; those under a False `mask` do not count."""

  loss: clu_metrics.Average.from_output("loss")  # type: ignore[valid-type]
  accuracy: clu_metrics.Average.from_output("correct")  # type: ignore[valid-type]


class Progress(NamedTuple):
  """What the loop wants to know of the steps since it last looked.

  Attributes:
    metrics: Of the applied steps; skipped ones have no loss worth averaging.
    bad_step: int32 scalar, the first applied step with a non-finite loss; 0 if
      there was none.
    bad_leaves: bool `[leaves of params]`, those non-finite after that step, of
      what the next loss would be taken at.
  """

  metrics: Metrics
  bad_step: jax.Array
  bad_leaves: jax.Array


def init_progress(state: TrainState) -> Progress:
  """Returns the progress of no step."""
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
    batch: `inputs` and int `labels`, `[batch, ...]`; logits have one more
      dimension than labels, the classes.
    rng: A key for the whole run; each step folds its number into it, and each
      replica its own.
    step: int32 scalar, the batches consumed, this one included.

  Returns:
    The next state and progress.
  """

  def loss_fn(params: Any) -> tuple[jax.Array, Any]:
    rngs = {"dropout": jax.random.fold_in(_own_keys(rng), step)}
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
  # A loss that is not finite and a step that no wrapper has skipped.
  bad = applied & ~jnp.isfinite(loss) & (progress.bad_step == 0)
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


def eval_step(state: TrainState, metrics: Metrics, batch: Batch) -> Metrics:
  """Merges a held-out batch, with a bool `mask` `[batch]`, into metrics."""
  logits, _ = _apply(state, state.params, batch, None)
  return metrics.merge(
    Metrics.single_from_model_output(
      loss=_losses(logits, batch),
      correct=_correct(logits, batch),
      mask=batch["mask"],
    )
  )


def over_replicas(progress: Progress) -> Progress:
  """Returns the progress of all replicas together, on the host."""
  if not values.is_per_replica(progress.bad_step):
    return progress
  bad_steps: Any = np.asarray(progress.bad_step)
  first = min(bad_steps[bad_steps > 0], default=bad_steps[0])  # 0 is none
  return Progress(
    metrics=jax.tree.map(
      lambda x: np.sum(x, axis=0),
      progress.metrics,
      is_leaf=values.is_per_replica,
    ),
    bad_step=first,
    bad_leaves=np.any(np.asarray(progress.bad_leaves)[bad_steps == first], 0),
  )


def bad_paths(state: TrainState, progress: Progress) -> list[str]:
  """Returns the paths that `progress.bad_leaves` marks."""
  paths = jax.tree_util.tree_leaves_with_path(state.params)
  return [
    trees.path_string(path)
    for (path, _), bad in zip(paths, progress.bad_leaves, strict=True)
    if bad
  ]


def _working_params(state: TrainState) -> Any:
  states = state.wrapper_states
  if replica_context.get_replica_context() is None:
    states = stack.drop_replica_axis(state.wrappers, states)
  return stack.working_params(state.wrappers, states, state.params)


def _apply(
  state: TrainState, params: Any, batch: Batch, rngs: Any
) -> tuple[jax.Array, dict[str, Any]]:
  """Applies the model, for training if there are rngs."""
  own = ("step", "params", "opt_state", "wrapper_states")
  names = [n for n in fields_lib.array_field_names(state) if n not in own]
  if OVERWRITE_WITH_GRADIENT in params:
    variables = dict(params)
  else:
    variables = {"params": params}
  collections = {name: getattr(state, name) for name in names}
  train = rngs is not None
  variables.update(_own_keys(collections) if train else collections)
  kwargs: dict[str, Any]
  if isinstance(state.apply_fn, nnx_adapter.Apply):
    kwargs = {"mode": "train" if train else "eval"}
  else:
    kwargs = {"train": train, **({"rngs": rngs} if train else {})}
  mutable = names if train else []
  logits, new = state.apply_fn(
    variables, batch["inputs"], mutable=mutable, **kwargs
  )
  return logits, _shared_keys(new, collections)


def _own_keys(tree: Any) -> Any:
  """Gives a replica PRNG keys of its own; NNX modules carry theirs along."""
  context = replica_context.get_replica_context()
  if context is None:
    return tree

  def fold(x: jax.Array) -> jax.Array:
    if not _is_key(x):
      return x
    fold_in = lambda key: jax.random.fold_in(
      key, context.replica_id_in_sync_group
    )
    return jax.vmap(fold_in)(x.reshape(-1)).reshape(x.shape)

  return jax.tree.map(fold, tree)


def _shared_keys(new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
  """Puts back the keys that those of the replicas come from."""
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
  return optax.softmax_cross_entropy_with_integer_labels(
    logits.astype(jnp.float32), batch["labels"]
  )


def _correct(logits: jax.Array, batch: Batch) -> jax.Array:
  return (logits.argmax(-1) == batch["labels"]).astype(jnp.float32)
