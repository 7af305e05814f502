"""Creates the train state of a config."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import functools
from typing import Any

from flax import linen as nn
from flax.core.scope import DenyList
import jax
import optax

from flaxshard import wrappers as wrappers_lib
from flaxshard.core import checks
from flaxshard.core import patterns
from flaxshard.core import registry
from flaxshard.core.policy import Policy
from flaxshard.partitioning import rules as rules_lib
from flaxshard.sparse import optimizer as sparse_optimizer
from flaxshard.state import fields as fields_lib
from flaxshard.state import lora
from flaxshard.state.create import create_train_state
from flaxshard.state.train_state import TrainState
from flaxshard.strategy.strategy import Strategy
from flaxshard.tasks import apply
from flaxshard.tasks import load
from flaxshard.tasks.adapted import AdaptedTask
from flaxshard.wrappers import stack
from flaxshard.wrappers.accumulate import Accumulate
from flaxshard.wrappers.loss_scale import LossScale


def plan_state(
  config: Any,
  strategy: Strategy,
  loaded: load.LoadedTask,
  tx: optax.GradientTransformation,
) -> tuple[TrainState, Callable[[], TrainState]]:
  """Traces the creation of the state of a config.

  Args:
    config: A checked config.
    strategy: The devices.
    loaded: The task, and the shapes of its data.
    tx: The optimizer of the config, without `config.sparse`.

  Returns:
    The state with a `jax.ShapeDtypeStruct` for every array, and a function that
    creates it.

  Raises:
    ValueError, TypeError: The model, the rules and the wrappers do not fit each
      other. The message names the field.
  """
  task, example = loaded.task, loaded.shapes.example
  tx = sparse_optimizer.wrap(
    tx, config.sparse, config.sparse_semantics, prefix="config."
  )
  with registry.errors_name("config.wrappers"):
    wrappers = _create_wrappers(config)
    stack.check_replicas(wrappers, strategy.num_replicas_in_sync)
  rules = rules_lib.from_config(config.mesh.rules)
  factors = lora.LoRA(**config.lora) if config.lora.rank else None

  def create(**options: Any) -> TrainState:
    # Anew each time: the arrays of an NNX module would otherwise stay in memory
    # during a restore and the whole run.
    model = task.make_model(
      config.model,
      example=example,
      num_classes=loaded.shapes.num_classes,
      policy=Policy(config.precision),
      seed=config.seed,
    )
    args, kwargs = task.abstract_inputs(
      {
        key: jax.ShapeDtypeStruct((1, *x.shape), x.dtype)
        for key, x in example.items()
      }
    )
    if isinstance(model, nn.Module):
      # Models without a default mode are initialized as in evaluation.
      mode = apply.mode_arguments(model.__call__, False, args, required=True)
      kwargs = {**mode, **kwargs}
    else:
      # An NNX module is not called.
      kwargs = {}
    with errors_name_fields(config, task):
      return create_train_state(
        model,
        jax.random.key(config.seed),
        args,
        tx,
        wrappers=wrappers,
        strategy=strategy,
        rules=rules,
        lora=factors,
        **{**kwargs, **options},
      )

  state = create(abstract=True)
  if sown := _sown_collections(state):
    # Otherwise `init` puts the values that it sows in the state.
    create = functools.partial(
      create, mutable=DenyList(("intermediates", *sown))
    )
    state = create(abstract=True)

  def create_state() -> TrainState:
    # The static fields of the traced state, or the step would compile again.
    return jax.tree.unflatten(
      jax.tree.structure(state), jax.tree.leaves(create())
    )

  return state, create_state


def _create_wrappers(config: Any) -> stack.Wrappers:
  """Returns the wrappers, with an `Accumulate` for `config.accumulate_steps`.

  It stands as far outside as possible, so that other wrappers see the gradients
  of the update. A dynamic `LossScale` and what is around it stay outside.
  """
  wrappers = wrappers_lib.from_config(config.wrappers)
  if any(isinstance(w, Accumulate) for w in wrappers):
    raise ValueError(
      "'accumulate' is not a wrapper of a training config; set "
      "config.accumulate_steps, which the schedule depends on as well."
    )
  if config.accumulate_steps == 1:
    return wrappers
  position = 0
  for i, w in enumerate(wrappers):
    if isinstance(w, LossScale) and w.skips_steps:
      position = i + 1
  outer, inner = wrappers[:position], wrappers[position:]
  # A wrapper such as CrossShard has reduced the gradients of each batch.
  per_replica = config.mesh.per_replica and not stack.reduces_gradients(outer)
  added = Accumulate(config.accumulate_steps, per_replica=per_replica)
  return stack.check([*outer, added, *inner])


def _sown_collections(state: TrainState) -> list[str]:
  """Returns the names of collections that the initialization has sown.

  `nn.Module.sow` appends to tuples; other variables are not in tuples.
  """
  model = getattr(lora.model_apply(state.apply_fn), "__self__", None)
  if not isinstance(model, nn.Module):
    return []
  return [
    name
    for name, tree in fields_lib.collections(state).items()
    if (paths := jax.tree_util.tree_leaves_with_path(tree))
    and all(isinstance(p[-1], jax.tree_util.SequenceKey) for p, _ in paths)
  ]


@contextlib.contextmanager
def errors_name_fields(config: Any, task: AdaptedTask) -> Iterator[None]:
  """Names the model and the data in errors of the user's model or rules.

  Args:
    config: A checked config.
    task: Its task, which may make the model or the data.
  """
  try:
    yield
  except patterns.PatternError as e:
    # It names config.freeze, config.learning_rates, config.sparse or lora; or
    # begins with "rules", a field of config.mesh.
    if not str(e).startswith("rules"):
      raise
    raise ValueError(f"config.mesh.{e}") from e
  except (TypeError, ValueError, ArithmeticError, LookupError) as e:
    model = f"config.model ({config.model.get('name')!r})"
    data = f"config.data ({config.data.get('name')!r})"
    if task.create_model is not None:
      model = f"the model of {task.name}"
    if not config.data:
      data = f"the data of {task.name}"
    is_type_error = isinstance(e, TypeError)
    kind = checks.ArgumentTypeError if is_type_error else ValueError
    raise kind(f"{model} with {data}: {e}") from e
