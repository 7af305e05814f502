"""Builds what a run needs from its config: devices, data, state and steps.

Nothing is written and no step is compiled here, so that an invalid config is
reported within seconds. A plan uses it too, for devices that need not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import functools
from typing import Any

from flax import linen as nn
from flax.core.scope import DenyList
import jax
import numpy as np

from flaxshard import data
from flaxshard import tasks
from flaxshard import wrappers as wrappers_lib
from flaxshard.core import checks
from flaxshard.core import optimizer
from flaxshard.core import patterns
from flaxshard.core import registry
from flaxshard.core.policy import Policy
from flaxshard.data import sharding
from flaxshard.data import sources
from flaxshard.data.iterators import DistributedIterator
from flaxshard.partitioning import logical_devices
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.partitioning import rules as rules_lib
from flaxshard.replicas import context as replica_context
from flaxshard.replicas.values import PerReplica
from flaxshard.state import fields as fields_lib
from flaxshard.state import lora
from flaxshard.state.create import create_train_state
from flaxshard.state.train_state import TrainState
from flaxshard.strategy.strategy import Strategy
from flaxshard.tasks import apply
from flaxshard.tasks import steps
from flaxshard.tasks.stream import Stream
from flaxshard.train.devices import Rank
from flaxshard.wrappers import stack
from flaxshard.wrappers.accumulate import Accumulate
from flaxshard.wrappers.loss_scale import LossScale

_ALONE = Rank()

# Positions in `Setup.arguments`.
STATE, PROGRESS, BATCH, RNG = range(4)


class Setup:
  """The devices, the task, the data, the state and the steps of a config.

  To build it loads the data and traces the creation of the state. Nothing else
  is traced or allocated.

  Args:
    config: A checked config.
    strategy: Its strategy; see `devices.create_strategy`.
    task: A task object, in place of the one that `config.task` names.
    rank: The worker that this process is.
    shapes_only: Whether to find only the shapes of the data; see `tasks.load`.
    known: The shapes of the data, if they are known: nothing is read.

  Attributes:
    num_train_examples: Number of training examples; None if it is not known.
    num_eval_examples: Number of evaluation examples; 0 if there are none.
    batch_size: Examples in a batch, of this worker alone if there are several.
    schedule: The learning rate, as a function of the applied updates.
    abstract_state: The state with a `jax.ShapeDtypeStruct` for every array.

  Raises:
    ValueError, TypeError: The data, the model, the optimizer, the rules and the
      wrappers do not fit each other. The message names the field.
    ImportError: A package that the config needs is not installed.
  """

  def __init__(
    self,
    config: Any,
    strategy: Strategy,
    task: Any = None,
    rank: Rank = _ALONE,
    *,
    shapes_only: bool = False,
    known: data.Shapes | None = None,
  ):
    self.config = config
    self.strategy = strategy
    self.rank = rank
    # Arrays that all devices have, and those that have a row for each replica.
    self._whole = jax.sharding.NamedSharding(strategy.mesh, jax.P())
    self._by_row = jax.sharding.NamedSharding(
      strategy.mesh, sharding.OVER_REPLICAS
    )
    self.task, self.shapes, self.splits = tasks.load(
      config, task, shapes_only=shapes_only, known=known
    )
    self.num_train_examples, self.num_eval_examples = None, 0
    if self.splits is not None:
      if self.splits.eval is not None:
        self.num_eval_examples = len(self.splits.eval)
      self.num_train_examples = sources.check_batch_size(
        "config.batch_size", config.batch_size, self.splits
      )
    self.batch_size = config.batch_size // rank.num_workers
    self._tx, self.schedule = optimizer.create(config)
    with registry.errors_name("config.wrappers"):
      self._wrappers = _create_wrappers(config)
      stack.check_replicas(self._wrappers, strategy.num_replicas_in_sync)
    # The collections that `init` sows are known once it is traced.
    self._sown: list[str] = []
    self.abstract_state = self._create(abstract=True)
    self._sown = _sown_collections(self.abstract_state)
    if self._sown:
      self.abstract_state = self._create(abstract=True)

  # The state.

  def create_state(self) -> TrainState:
    """Returns a new state, and warns of a precision without a scale."""
    leaves = jax.tree.leaves(self._create())
    # The static fields of the traced state, or the step would compile again.
    return jax.tree.unflatten(jax.tree.structure(self.abstract_state), leaves)

  def _create(self, **options: Any) -> TrainState:
    """Returns a new state, or with `abstract=True` its shapes."""
    config, example = self.config, self.shapes.example
    rules = rules_lib.from_config(config.mesh.rules)
    factors = lora.LoRA(**config.lora) if config.lora.rank else None
    # Anew each time: the arrays of an NNX module would otherwise stay in memory
    # during a restore and the whole run.
    model = self.task.make_model(
      config.model,
      example=example,
      num_classes=self.shapes.num_classes,
      policy=Policy(config.precision),
      seed=config.seed,
    )
    # With values: a task may compute its inputs.
    batch = {k: np.zeros((1, *x.shape), x.dtype) for k, x in example.items()}
    args, kwargs = self.task.init_inputs(batch)
    if isinstance(model, nn.Module):
      # Models without a default mode are initialized as in evaluation.
      mode = apply.mode_arguments(model.__call__, False, args, required=True)
      # Otherwise `init` puts the values that it sows in the state.
      mutable = DenyList(("intermediates", *self._sown))
      options = {**mode, **kwargs, "mutable": mutable, **options}
    with self._errors_name_fields():
      return create_train_state(
        model,
        jax.random.key(config.seed),
        args,
        self._tx,
        wrappers=self._wrappers,
        strategy=self.strategy,
        rules=rules,
        lora=factors,
        sparse=config.sparse,
        sparse_semantics=config.sparse_semantics,
        **options,
      )

  @contextlib.contextmanager
  def _errors_name_fields(self) -> Iterator[None]:
    """Names the model and the data in errors of the user's model or rules."""
    try:
      yield
    except patterns.PatternError as e:
      # It names config.freeze or config.learning_rates; or it begins with an
      # argument of `create_train_state`: rules, sparse or lora.
      field = str(e).removeprefix("config.")
      group = "mesh." if field.startswith("rules") else ""
      raise ValueError(f"config.{group}{field}") from e
    except (TypeError, ValueError, ArithmeticError, LookupError):
      its_model = f"config.model ({self.config.model.get('name')!r})"
      its_data = f"config.data ({self.config.data.get('name')!r})"
      if self.task.create_model is not None:
        its_model = f"the model of {self.task.name}"
      if not self.config.data:
        its_data = f"the data of {self.task.name}"
      with registry.errors_name(f"{its_model} with {its_data}", LookupError):
        raise

  # The steps.

  @functools.cached_property
  def arguments(self) -> tuple[Any, ...]:
    """The arguments of the train step, with a shape for every array.

    Raises:
      ValueError: `config.mesh.split` does not fit the data.
    """
    count = self.strategy.num_replicas_in_sync
    whole = lambda x: mesh_lib.abstract_array(x, self._whole)
    row_each = lambda x: PerReplica(
      jax.ShapeDtypeStruct((count, *x.shape), x.dtype, sharding=self._by_row)
    )
    progress = jax.tree.map(
      row_each if self.config.mesh.per_replica else whole,
      jax.eval_shape(lambda: steps.init_progress(self.task)),
    )
    rng = jax.eval_shape(lambda: jax.random.key(0))
    return self.abstract_state, progress, self._batch, whole(rng)

  @functools.cached_property
  def _batch(self) -> dict[str, jax.ShapeDtypeStruct]:
    """The shape and the sharding of each array of a batch, by key."""
    example, mesh = self.shapes.example, self.strategy.mesh
    specs = {key: jax.P(mesh_lib.REPLICA) for key in example}
    # Each replica splits its own part of the batch dimension.
    size = self.batch_size // self.strategy.num_replicas_in_sync
    for key, pieces in self.config.mesh.split.items():
      field = f"config.mesh.split.{key}={pieces!r}"
      if key not in example:
        raise ValueError(
          f"{field}: a batch has {', '.join(sorted(example))}."
          f"{checks.did_you_mean(key, example)}"
        )
      with registry.errors_name(field):
        spec = logical_devices.partition_spec(
          mesh, (size, *example[key].shape), pieces
        )
      batch_axes = (mesh_lib.REPLICA, *mesh_lib.axes_of(spec[0]))
      specs[key] = jax.P(batch_axes, *spec[1:])
    return {
      key: jax.ShapeDtypeStruct(
        (self.batch_size, *x.shape),
        sharding.dtype_of(x),
        sharding=jax.sharding.NamedSharding(mesh, specs[key]),
      )
      for key, x in example.items()
    }

  @functools.cached_property
  def _eval_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
    """`_batch`, and the mask that is False for padding."""
    mask = jax.ShapeDtypeStruct((self.batch_size,), bool, sharding=self._by_row)
    return {**self._batch, "mask": mask}

  @functools.cached_property
  def train_step(self) -> Any:
    """The jitted `train_step(state, progress, batch, rng)`.

    It donates the first two, and returns the next ones.
    """
    first_replica = self.rank.worker_id * self.strategy.num_replicas_in_sync

    # The name stands in profiles and programs.
    def train_step(
      state: TrainState, progress: steps.Progress, batch: Any, rng: Any
    ) -> tuple[TrainState, steps.Progress]:
      # Each worker has the random streams of its own replicas.
      with replica_context.marked(first_replica=first_replica):
        return steps.train_step(self.task, state, progress, batch, rng)

    donated = STATE, PROGRESS
    if self.config.mesh.per_replica:
      return self.strategy.jit(train_step, donate_argnums=donated)
    # Without shardings, XLA may choose others for the new state, and the second
    # step would compile again.
    shardings = jax.tree.map(lambda x: x.sharding, self.arguments[:2])
    return jax.jit(train_step, donate_argnums=donated, out_shardings=shardings)

  @functools.cached_property
  def eval_step(self) -> Any:
    """The jitted `eval_step(state, metrics, batch, rng, index)`.

    It returns the metrics with those of the batch merged into them.
    """
    is_padded = self.num_eval_examples % self.batch_size > 0
    # A task's own evaluation need not use the metrics.
    is_padded &= self.task.evaluate is None
    return jax.jit(
      functools.partial(steps.eval_step, self.task, is_padded=is_padded)
    )

  def trace(self) -> jax.stages.Traced:
    """Traces the train step and the evaluation; returns the traced train step.

    Raises:
      ValueError, TypeError: The model cannot be trained on the data.
    """
    state, progress, batch, rng = self.arguments
    with self._errors_name_fields():
      traced: jax.stages.Traced
      traced = self.train_step.trace(state, progress, batch, rng)
      # Evaluation is compiled much later: trace it now to find its errors.
      metrics = jax.eval_shape(self.task.metrics.empty)
      inputs = state, metrics, self._eval_batch, rng, np.int32(0)
      jax.eval_shape(self.eval_step, *inputs)
    return traced

  # Arguments of the train step, on the devices.

  def init_progress(self, step: int) -> steps.Progress:
    """Returns the progress before the steps that follow a step."""
    values = jax.device_get(steps.init_progress(self.task, step))
    if self.config.mesh.per_replica:
      return self.strategy.distribute_values_from_function(lambda _: values)
    return self.replicate(values)

  def read_progress(self, progress: steps.Progress) -> steps.Progress:
    """Waits for a progress; returns that of all replicas as NumPy arrays."""
    # Otherwise each process has the whole progress already.
    if self.config.mesh.per_replica:
      # One program, and not one for each array.
      combine = jax.jit(steps.combine_replicas, out_shardings=self._whole)
      progress = combine(progress)
    return steps.Progress(*jax.device_get(progress))

  def train_rng(self) -> Any:
    """Returns the PRNG key of the train steps."""
    key = jax.random.key(self.config.seed)
    if self.rank.worker_id and not self.config.mesh.per_replica:
      # Otherwise the steps fold the numbers of their replicas into it.
      key = jax.random.fold_in(key, self.rank.worker_id)
    return self.replicate(key)

  def replicate(self, tree: Any) -> Any:
    """Returns a tree of arrays, whole on every device.

    Args:
      tree: Arrays that are the same in all processes. They are not compared, so
        that no process waits for another one.
    """
    return jax.tree.map(
      lambda x: mesh_lib.put(x, self._whole, compare=False), tree
    )

  # The data.

  def open_train_batches(self, newest_state: Callable[[], TrainState]) -> Any:
    """Returns an iterator over the training batches, to be closed.

    Args:
      newest_state: Returns the newest train state, from which a task may make
        the next batch.
    """
    seed, worker_id = self.config.seed, self.rank.worker_id
    if self.task.train_batches is not None:
      return Stream(self.task, seed, self._batch, newest_state, worker_id)
    assert self.splits is not None
    first_row = worker_id * self.batch_size
    rows = sharding.pipeline_rows(self.strategy.mesh, self.batch_size)
    batches = data.train_iterator(
      self.splits,
      seed=seed,
      collate=self.task.collate,
      # Rows of the batch of all workers.
      batch_size=self.config.batch_size,
      rows=[first_row + row for row in rows],
    )
    # Training batches are never padded: the data repeats.
    put = functools.partial(sharding.put_rows, wanted=self._batch)
    return DistributedIterator(batches, put)

  def eval_batches(self) -> Iterator[dict[str, jax.Array]]:
    """Iterates over the evaluation batches, on the devices.

    Raises:
      ValueError: There is no evaluation data.
    """
    if not self.num_eval_examples:
      raise ValueError(
        f"{self.task.name}.evaluate: there is no evaluation data."
      )
    batches = data.eval_batches(
      self.splits,  # type: ignore[arg-type]
      collate=self.task.collate,
      # Each worker evaluates its center with all examples.
      batch_size=self.batch_size,
      rows=sharding.pipeline_rows(self.strategy.mesh, self.batch_size),
    )
    put = functools.partial(sharding.put_rows, wanted=self._eval_batch)
    # Ends the thread that reads ahead.
    with DistributedIterator(iter(batches), put) as iterator:
      yield from iterator


def _create_wrappers(config: Any) -> stack.Wrappers:
  """Returns the wrappers, with an `Accumulate` for `config.accumulate_steps`.

  It stands as far outside as possible, so that other wrappers see the gradients
  of the update. A dynamic `LossScale` and what is around it stay outside.
  """
  wrappers = wrappers_lib.from_config(config.wrappers)
  if config.accumulate_steps == 1:
    return wrappers
  position = 0
  for i, w in enumerate(wrappers):
    if isinstance(w, LossScale) and w.skips_steps:
      position = i + 1
  outer, inner = wrappers[:position], wrappers[position:]
  # A wrapper such as CrossShard has reduced the gradients of each batch.
  per_replica = config.mesh.per_replica and stack.reduces(outer) == "before"
  added = Accumulate(config.accumulate_steps, per_replica=per_replica)
  return stack.check([*outer, added, *inner])


def _sown_collections(state: TrainState) -> list[str]:
  """Returns the names of collections that the initialization has sown.

  `nn.Module.sow` appends to tuples; other variables are not in tuples.
  """
  return [
    name
    for name, tree in fields_lib.collections(state).items()
    if (paths := jax.tree_util.tree_leaves_with_path(tree))
    and all(isinstance(p[-1], jax.tree_util.SequenceKey) for p, _ in paths)
  ]
