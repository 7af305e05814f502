"""AGN: replicas take local steps and commit to a center once per period."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from flaxshard.core import block_quantization
from flaxshard.core import checks
from flaxshard.core import gradients
from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import parameter_groups
from flaxshard.core import tracing
from flaxshard.core import trees
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.replicas import context as replica_context
from flaxshard.replicas import values
from flaxshard.sparse import row_accumulator
from flaxshard.wrappers import agn_commit
from flaxshard.wrappers import agn_quantized
from flaxshard.wrappers import agn_sequential
from flaxshard.wrappers import agn_tables
from flaxshard.wrappers import base
from flaxshard.wrappers.agn_commit import ModelState

PyTree = Any
P = jax.sharding.PartitionSpec

# Sequential commits are stable if the period is at least this number times the
# number of replicas (measured with `tf.contrib.opt.AGNOptimizer`).
_STABLE_PERIOD = 0.64

# The replicated fields of the state. The others are per replica.
_REPLICATED = ("local_step", "commits", "outer_opt_state")


class AGNState(NamedTuple):
  """The state of `AGN`.

  Per-replica leaves have the shape `[replicas, ...]` in a TrainState, and
  `[...]` inside of `Strategy.run`.

  Attributes:
    local_params: Per replica, the parameters of its local steps.
    local_opt_state: Per replica, the optimizer state of its local steps.
    grad_accum: Per replica, the sum of gradients or parameter deltas since the
      last commit, float32 or wider; None for leaves without a gradient.
    local_step: int32 scalar, number of local steps, the same on all replicas.
    commits: int32 scalar, number of commits.
    collections: Per replica, the other collections by name, such as
      `batch_stats`.
    outer_opt_state: The state of `outer_tx`; `()` without `outer_tx`.
    touched: Per replica, for each table of `sparse_rows`, bool `[rows]`: the
      rows of `grad_accum` that local steps have added to. None for other
      parameters; `{}` without tables.
  """

  local_params: PyTree
  local_opt_state: PyTree
  grad_accum: PyTree
  local_step: jax.Array
  commits: jax.Array
  collections: dict[str, PyTree]
  outer_opt_state: PyTree
  touched: PyTree


@dataclasses.dataclass(frozen=True)
class AGN(base.Base):
  """Accumulated gradient normalization: local steps and rare commits.

  Every replica has its own local parameters and optimizer state. Each train
  step is a local step: it updates them with the replica's gradients, and adds
  the gradients to an accumulator. After every `communication_period` local
  steps the replicas commit. A commit is the mean of the accumulated gradients.
  It updates the center, `state.params`, with the same optimizer and the slots
  of the center, `state.opt_state`. The replicas then continue from the center.
  Nothing is communicated between commits. So the traffic is 1/period of that
  of data parallelism.

  Losses are differentiated at the local parameters. The center is evaluated,
  exported, and restored without the wrapper. `state.step` counts local steps.
  Schedules in `tx` count updates: local steps for a replica, commits for the
  center. Collections such as `batch_stats` are per replica inside of
  `Strategy.run`. Outside they are the mean over the replicas at the last
  commit.

  Args:
    communication_period: Number of local steps per commit.
    commit: `"sequential"`, `"mean"` or `"sum"`. With `"sequential"` the center
      is updated with the commit of one replica after another, in replica order.
      Each replica continues from the center right after its own commit, as with
      a parameter server. With `"mean"` or `"sum"` the center is updated once,
      with the mean or the sum of all commits. All replicas continue from it.
    share_step_count: Share the optimizer's step count between local steps and
      commits, as the original does with Adam's beta powers. The count then
      advances period + 1 times per period. By default the center has its own.
    outer_tx: An optax optimizer for the center, instead of `tx`. Then
      `state.opt_state`, the state of `tx` for the center, does not change.
    commit_delta: Commit the parameter delta of the period, old minus new,
      instead of the mean gradient. With `commit="mean"` and
      `outer_tx=optax.sgd(1.0)` the center is the mean of the local parameters:
      local SGD. With `outer_tx=optax.sgd(0.7, momentum=0.9, nesterov=True)`
      this is DiLoCo.
    commit_dtype: `"bfloat16"`, `"int8"` or `"int4"`: send commits in this
      dtype, with a float32 scale for each 256 integers. They are reduced in
      float32. What quantization cuts off stays in `grad_accum`, for later
      commits. None: send them as they are. Not with `"sequential"`, nor with
      tables of `sparse_rows`.

  Raises:
    TypeError: An argument is of a wrong type.
    ValueError: `communication_period` is below 1, `commit` or `commit_dtype` is
      unknown, `share_step_count` is combined with `outer_tx`, or `commit_dtype`
      with sequential commits.

  Example:
    >>> import flaxshard as fs, optax
    >>> state = fs.TrainState.create(
    ...     apply_fn=None, params={"w": jnp.ones(())}, tx=optax.sgd(0.25),
    ...     wrappers=[fs.AGN(communication_period=2)])
    >>> for _ in range(3):
    ...   state, loss = state.minimize(lambda p: 2 * p["w"])
    ...   local = state.wrapper_states["agn"].local_params["w"][0]
    ...   print(float(local), float(state.params["w"]))
    0.5 1.0
    0.5 0.5
    0.0 0.5

  References:
    Hermans, Accumulated Gradient Normalization, 2017 (arXiv:1710.02368);
    `tf.contrib.opt.AGNOptimizer`. Local SGD: Stich, 2018 (arXiv:1805.09767).
    DiLoCo: Douillard et al., 2023 (arXiv:2311.08105).
  """

  name: ClassVar[str] = "agn"
  takes_indexed_slices: ClassVar[bool] = True
  derived_fields: ClassVar[tuple[str, ...]] = ("touched",)
  reduces_gradients: ClassVar[bool] = True
  local_updates: ClassVar[bool] = True

  communication_period: int = 10
  commit: str = "sequential"
  share_step_count: bool = False
  outer_tx: Any = None
  commit_delta: bool = False
  commit_dtype: str | None = None

  def __post_init__(self) -> None:
    period = checks.integer(
      "AGN: communication_period", self.communication_period, minimum=1
    )
    # A plain int, also from a NumPy integer: configs hold plain values.
    object.__setattr__(self, "communication_period", period)
    checks.one_of("AGN: commit", self.commit, ("sequential", "mean", "sum"))
    checks.boolean("AGN: share_step_count", self.share_step_count)
    checks.boolean("AGN: commit_delta", self.commit_delta)
    self._check_commit_dtype()
    if self.outer_tx is None:
      return
    # Not by isinstance: optax.MultiSteps is no GradientTransformation.
    if not {"init", "update"} <= set(dir(self.outer_tx)):
      hint = ""
      if inspect.isfunction(self.outer_tx):
        hint = f" Call it, as in {self.outer_tx.__name__}(1.0)."
      raise TypeError(
        "AGN: outer_tx must be an optax GradientTransformation or None, got "
        f"{checks.describe(self.outer_tx)}.{hint}"
      )
    if self.share_step_count:
      raise ValueError(
        "AGN: share_step_count=True needs one optimizer for local steps and "
        f"commits, got outer_tx={self.outer_tx!r} as well."
      )

  def _check_commit_dtype(self) -> None:
    if self.commit_dtype is None:
      return
    checks.one_of(
      "AGN: commit_dtype",
      self.commit_dtype,
      (None, *block_quantization.FORMATS),
    )
    if self.commit == "sequential":
      raise ValueError(
        "AGN: commit_dtype must be None with commit='sequential', got "
        f"{self.commit_dtype!r}: replicas receive parameters then, which are "
        "not quantized. Use commit='mean' or 'sum'."
      )

  # -- State.

  def init(self, params: PyTree, tx: Any) -> AGNState:
    """Returns the first state of one replica, at the center.

    Args:
      params: The parameters.
      tx: The optax optimizer.
    """
    if isinstance(params, optax.LookaheadParams):
      raise TypeError(
        "AGN: params must not be optax.LookaheadParams: center and local "
        "parameters are such a pair already. Pass params.fast, and the fast "
        "optimizer as tx; AGN(outer_tx=...) updates the center."
      )
    optimized = opt_state_lib.optimized_params(params)
    return AGNState(
      local_params=params,
      local_opt_state=opt_state_lib.init(tx, optimized),
      grad_accum=parameter_groups.zero_accumulators(tx, params),
      local_step=jnp.zeros((), jnp.int32),
      commits=jnp.zeros((), jnp.int32),
      collections={},
      outer_opt_state=(
        ()
        if self.outer_tx is None
        else opt_state_lib.init(self.outer_tx, optimized)
      ),
      touched=self._init_touched(params, tx),
    )

  def _init_touched(self, params: PyTree, tx: Any) -> PyTree:
    """Returns the rows of the accumulators of tables: none.

    Tables that have None there are summed and committed as a whole.
    """
    touched = row_accumulator.init_touched(tx, params)
    if not jax.tree.leaves(touched):
      return touched
    if self.commit_dtype is not None:
      raise ValueError(
        "AGN: commit_dtype must be None with tables of sparse_rows, got "
        f"{self.commit_dtype!r}: their commits are rows, which are not "
        "quantized."
      )
    decaying = agn_tables.find_decaying(tx, params)
    if decaying:
      raise ValueError(
        f"AGN: {', '.join(decaying)} decay without a gradient, as by weight "
        "decay. With semantics='catch_up', replicas and center would apply the "
        "decay of steps before a commit to parameters after it: use 'lazy' or "
        "'tf'."
      )
    whole = set()
    if self.commit_delta:
      # The change of the rows of a gradient would not be all of it.
      whole |= agn_tables.find_whole(tx, params)
    if self.commit == "sequential":
      # Nor would local tables follow the center by the rows of commits.
      whole |= agn_tables.find_whole(
        tx if self.outer_tx is None else self.outer_tx, params
      )
    elif self.outer_tx is not None:
      agn_tables.warn_of_whole_tables(self.outer_tx, tx, params)
    return jax.tree_util.tree_map_with_path(
      lambda path, rows: None if path in whole else rows, touched
    )

  def init_collections(
    self, state: AGNState, collections: dict[str, PyTree]
  ) -> AGNState:
    """Returns the state with the collections, to be kept per replica.

    Raises:
      TypeError: A collection is a `PerReplica` already.
    """
    for name, tree in collections.items():
      if values.has_per_replica(tree):
        raise TypeError(
          f"AGN: the collection {name!r} must not be a PerReplica: AGN keeps "
          "every collection per replica itself. Pass the value of one replica."
        )
    return state._replace(collections=collections)

  def restart(
    self, state: AGNState, target: base.Target, saved: dict[str, jax.Array]
  ) -> AGNState:
    """Returns a state in which all replicas start from the center.

    Accumulated gradients are dropped, step counts are kept.

    Args:
      state: A first state.
      target: The center, restored from a checkpoint that has no state for this
        number of replicas.
      saved: The saved leaves that do not depend on the number of replicas, by
        path: replicated leaves, and the scalars of the first replica.
    """
    # Schedules continue: local step counts are ahead of those of the center.
    counts = {
      path.removeprefix("local_opt_state/"): x for path, x in saved.items()
    }
    local_step = saved.get("local_step", state.local_step)
    return state._replace(
      local_params=target.params,
      local_opt_state=opt_state_lib.with_counts(target.opt_state, counts),
      grad_accum=jax.tree.map(jnp.zeros_like, state.grad_accum),
      touched=jax.tree.map(jnp.zeros_like, state.touched),
      # Back to the start of a period: the next commit averages a whole one.
      local_step=local_step - local_step % self.communication_period,
      commits=saved.get("commits", state.commits),
      collections={n: target.collections[n] for n in state.collections},
      outer_opt_state=jax.tree_util.tree_map_with_path(
        lambda path, x: saved.get(
          f"outer_opt_state/{trees.path_string(path)}", x
        ),
        state.outer_opt_state,
      ),
    )

  def adjust_restored(self, state: AGNState) -> tuple[AGNState, None]:
    """Returns the state with the rows of sums that another run has saved."""
    touched = row_accumulator.find_touched(state.grad_accum, state.touched)
    return state._replace(touched=touched), None

  def partition_specs(self, state: AGNState) -> AGNState:
    """Returns the specs: counters and `outer_opt_state` are replicated."""
    specs = {
      field: P() if field in _REPLICATED else P(mesh_lib.REPLICA)
      for field in state._fields
    }
    return AGNState(
      **{
        field: jax.tree.map(lambda _, spec=specs[field]: spec, value)
        for field, value in state._asdict().items()
      }
    )

  def check_replicas(self, num_replicas: int) -> None:
    """Warns if sequential commits are too frequent to be stable."""
    least = _STABLE_PERIOD * num_replicas
    if self.commit == "sequential" and self.communication_period < least:
      checks.warn(
        f"AGN: communication_period={self.communication_period} is short for "
        f"sequential commits of {num_replicas} replicas: before a commit is "
        f"applied, the center changes by {num_replicas - 1} other commits, and "
        f"below about {_STABLE_PERIOD} * {num_replicas} = {least:.1f} local "
        "steps training may diverge. Use a longer period, a lower learning "
        "rate, or commit='mean'.",
      )

  def metrics(self, state: AGNState) -> dict[str, jax.Array]:
    """Returns the number of commits, to be logged."""
    return {"commits": state.commits}

  def pending(self, state: AGNState) -> str | None:
    """Returns how many local steps or rows the center lacks, if any."""
    steps = int(state.local_step) % self.communication_period
    if not steps:
      waiting = row_accumulator.count_touched(state.touched)
      if not waiting:
        return None
      return (
        f"AGN: {waiting} rows of tables did not fit in the last commit, and "
        "are not in params. A commit has communication_period times as many "
        "rows as its step, and earlier steps had larger batches."
      )
    return (
      f"AGN: the last {steps} local steps of each replica are not in params. "
      f"They are committed after communication_period="
      f"{self.communication_period} applied steps."
    )

  # -- Collections.

  def reduce_collection(self, x: jax.Array) -> jax.Array:
    """Returns a replica's collection unchanged: commits average it."""
    return x

  def swap_collections(
    self, state: AGNState, collections: dict[str, PyTree]
  ) -> tuple[AGNState, dict[str, PyTree]]:
    """Exchanges the committed collections for those of the replica, or back."""
    swapped = {name: collections[name] for name in state.collections}
    return (
      state._replace(collections=swapped),
      {**collections, **state.collections},
    )

  # -- A step.

  def working_params(self, state: AGNState, params: PyTree) -> PyTree:
    """Returns this replica's local parameters."""
    del params
    return state.local_params

  def apply(
    self, state: AGNState, target: base.Target, grads: PyTree, next: base.Next
  ) -> tuple[base.Target, AGNState]:
    """Takes a local step, and commits at the end of a period.

    Args:
      state: The state of this replica.
      target: The center, and the collections of this replica.
      grads: The gradients of this replica; None for leaves without.
      next: Applies gradients with the wrappers inside and the optimizer.

    Returns:
      The center and collections after the step, and the new state.
    """
    grads = gradients.deduplicate(grads)
    # Outside of the conditional: an update in both of its branches was measured
    # to cost copies of the parameters and slots.
    new = next(
      target._replace(
        params=state.local_params, opt_state=state.local_opt_state
      ),
      grads,
    )
    # A wrapper inside, such as LossScale, may have skipped the step.
    applied = new.step != target.step
    added = grads
    if self.commit_delta:
      added = agn_commit.param_delta(
        state.local_params, new.params, grads, state.touched
      )
    accum, touched = row_accumulator.add(
      state.grad_accum, state.touched, added, applied
    )
    local_step = state.local_step + applied
    is_commit = applied & (local_step % self.communication_period == 0)

    def run_commit(
      center: ModelState,
      local: ModelState,
      accum: PyTree,
      touched: PyTree,
      collections: dict[str, PyTree],
      committed: dict[str, PyTree],
    ) -> Any:
      del committed
      taken = row_accumulator.take(
        accum, touched, grads, self.communication_period
      )
      center, local, remainders = self._commit(
        target, next, center, local, taken, grads
      )
      collections = {
        name: replica_context.mean_collection(x)
        for name, x in collections.items()
      }
      accum, touched = row_accumulator.clear(accum, touched, taken)
      if remainders is not None:
        accum = agn_quantized.keep_remainders(accum, remainders)
      return center, local, accum, touched, collections, collections

    # The collections that this step replaces, as they were last committed.
    committed = {
      name: state.collections[name]
      for name in new.collections
      if name in state.collections
    }
    center_opt_state = (
      target.opt_state if self.outer_tx is None else state.outer_opt_state
    )
    # All collectives are in this conditional. Its predicate is replicated: a
    # per-replica one would become a select, with the collectives in every step.
    with jax.named_scope(tracing.COMMIT_SCOPE):
      center, local, accum, touched, collections, committed = tracing.cond(
        is_commit,
        run_commit,
        lambda *operands: operands,
        ModelState(target.params, center_opt_state),
        ModelState(new.params, new.opt_state),
        accum,
        touched,
        {name: new.collections[name] for name in committed},
        committed,
      )
    if replica_context.get_replica_context() is None:
      # A single replica without `Strategy.run`: collections are not swapped,
      # and the user sees this replica's after every step.
      committed = collections
    target = new._replace(
      params=center.params,
      collections={**new.collections, **collections},
      opt_state=(
        center.opt_state if self.outer_tx is None else target.opt_state
      ),
    )
    return target, AGNState(
      local_params=local.params,
      local_opt_state=local.opt_state,
      grad_accum=accum,
      local_step=local_step,
      commits=state.commits + is_commit,
      collections={**state.collections, **committed},
      outer_opt_state=() if self.outer_tx is None else center.opt_state,
      touched=touched,
    )

  def _commit(
    self,
    target: base.Target,
    next: base.Next,
    center: ModelState,
    local: ModelState,
    taken: PyTree,
    grads: PyTree,
  ) -> tuple[ModelState, ModelState, PyTree]:
    """Commits the accumulated gradients of all replicas.

    Args:
      target: The target of this step, for its other fields.
      next: Applies gradients with the wrappers inside and the optimizer.
      center: The center.
      local: This replica's parameters and optimizer state after the step.
      taken: This replica's accumulated gradients, those of tables as rows.
      grads: The gradients of this step.

    Returns:
      The new center, this replica's new state, and what remains of its
      accumulated gradients: None if all of them were sent.
    """
    local_commit = agn_commit.commit_gradients(taken, grads, local.params)
    received = agn_commit.received_gradient(local_commit, grads)
    counts = {}
    if self.share_step_count:
      # Equal on all replicas, but JAX does not know: the maximum makes it so.
      counts = replica_context.reduce_over_replicas(
        "max", opt_state_lib.counts(local.opt_state)
      )

    def update_center(
      old: ModelState, accum: PyTree, shared: tuple[PyTree, PyTree]
    ) -> ModelState:
      counts, received = shared
      grads = self._normalize(accum)
      if self.outer_tx is not None:
        new = agn_commit.apply_outer_tx(self.outer_tx, old, grads)
      else:
        updated = next(
          target._replace(
            # The target's step is local: `state.step` counts no commits.
            step=jnp.zeros((), jnp.int32),
            params=old.params,
            opt_state=opt_state_lib.with_counts(old.opt_state, counts),
          ),
          grads,
        )
        new = ModelState(updated.params, updated.opt_state)
      return agn_commit.keep_without_gradient(old, new, received)

    # Commits are the same on all replicas: wrappers inside must not reduce.
    remainders = None
    with replica_context.gradients_already_reduced():
      if self.commit == "sequential":
        center, new_local_params = agn_sequential.commit_sequentially(
          update_center, center, local_commit, (counts, received)
        )
      else:
        center, new_local_params, remainders = agn_commit.commit_combined(
          self.commit,
          update_center,
          center,
          local_commit,
          (counts, received),
          self.commit_dtype,
        )
    counts = (
      opt_state_lib.counts(center.opt_state) if self.share_step_count else {}
    )
    local = ModelState(
      new_local_params, opt_state_lib.with_counts(local.opt_state, counts)
    )
    return center, local, remainders

  def _normalize(self, accum: PyTree) -> PyTree:
    """Returns the gradients of a commit: the mean over the period."""
    if self.commit_delta:
      return accum
    # Divided here and not before it is sent: XLA fuses this into the update,
    # elsewhere it would take memory for a copy.
    return gradients.map_gradients(
      lambda a: a / self.communication_period, accum
    )
