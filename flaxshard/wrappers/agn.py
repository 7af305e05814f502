"""AGN: replicas take local steps and commit to a center once per period."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from flaxshard.core import gradients
from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import parameter_groups
from flaxshard.core import trees
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.replicas import context as replica_context
from flaxshard.replicas import values
from flaxshard.sparse import row_accumulator
from flaxshard.wrappers import agn_arguments
from flaxshard.wrappers import agn_center
from flaxshard.wrappers import agn_commit
from flaxshard.wrappers import agn_delay
from flaxshard.wrappers import agn_fragments
from flaxshard.wrappers import agn_host
from flaxshard.wrappers import agn_schedule
from flaxshard.wrappers import agn_tables
from flaxshard.wrappers import base
from flaxshard.wrappers.agn_commit import ModelState

PyTree = Any
P = jax.sharding.PartitionSpec

# The replicated fields of the state. The others are per replica.
_REPLICATED = ("local_step", "commits", "outer_opt_state", "fragment_counts")


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
    fragment_counts: For each integer of the center's optimizer state that
      belongs to no parameter, such as a step count, int32 `[fragments]` by
      path: by how much that of a fragment lags behind. `{}` if all fragments
      are committed together.
    sent: Commits whose results have not replaced local parameters yet: see
      `agn_delay`. `()` without a delay.
    received: With `transport="host"`, bool `[leaves of grad_accum]`: those that
      had a gradient in a local step since their last commit. Else `()`.
    center_commits: With `transport="host"` and sequential commits, int32
      scalar: the number of commits of all workers in the center, as far as this
      worker knows. Else `()`.
  """

  local_params: PyTree
  local_opt_state: PyTree
  grad_accum: PyTree
  local_step: jax.Array
  commits: jax.Array
  collections: dict[str, PyTree]
  outer_opt_state: PyTree
  touched: PyTree
  fragment_counts: dict[str, jax.Array]
  sent: PyTree
  received: PyTree = ()
  center_commits: PyTree = ()


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
      commits. None: send them as they are. Not with tables of `sparse_rows`,
      and with `"sequential"` only if `transport="host"`.
    fragments: Number of groups of parameters that are committed in turn, each
      once per period. They are contiguous, have about the same number of bytes,
      and never split a parameter. So the bytes of one step's commit are
      1/fragments of those of all.
    fragment_offset: Number of local steps between the commits of consecutive
      fragments. The last one is committed at multiples of the period. None:
      `communication_period // fragments`. 0: all in one commit, as with one
      fragment.
    delay: Number of local steps from a commit to when the local parameters are
      replaced by its result, below the period. What these steps accumulate
      belongs to the next commit.
    blend: Weight of the local parameters when they are replaced:
      `local = blend * local + (1 - blend) * center`, at least 0 and below 1.
    transport: `"compiled"`: commits are collectives of the compiled step.
      `"host"`: each process steps alone, and `flaxshard.Worker` commits between
      steps.
    quorum: With `transport="host"`, least number of workers of a commit. It
      waits until there are so many.
    deadline: With `transport="host"`, seconds that a commit by mean or sum
      waits for other workers after the first one.
    heartbeat: With `transport="host"`, seconds without a sign of life after
      which a worker counts as dead.

  Raises:
    TypeError: An argument is of a wrong type.
    ValueError: A number is out of range, `commit`, `commit_dtype` or
      `transport` is unknown, `share_step_count` is combined with `outer_tx`,
      `commit_dtype` with sequential commits, or an argument of
      `transport="host"` with `"compiled"`. When a state is created: there are
      more fragments than parameters.

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
    DiLoCo: Douillard et al., 2023 (arXiv:2311.08105). Fragments, delay and
    blend: Douillard et al., Streaming DiLoCo, 2025 (arXiv:2501.18512).
  """

  name: ClassVar[str] = "agn"
  takes_indexed_slices: ClassVar[bool] = True
  derived_fields: ClassVar[tuple[str, ...]] = (
    "touched",
    "fragment_counts",
    "sent",
    "received",
    "center_commits",
  )
  communication_period: int = 10
  commit: str = "sequential"
  share_step_count: bool = False
  outer_tx: Any = None
  commit_delta: bool = False
  commit_dtype: str | None = None
  fragments: int = 1
  fragment_offset: int | None = None
  delay: int = 0
  blend: float = 0.0
  transport: str = "compiled"
  quorum: int = 1
  deadline: float = 60.0
  heartbeat: float = 10.0

  def __post_init__(self) -> None:
    for name, value in agn_arguments.check(self).items():
      object.__setattr__(self, name, value)

  # With transport="host" replicas are those of one process, which are kept
  # equal: to other wrappers AGN is then one with a replicated state.

  @property
  def reduces_gradients(self) -> bool:  # type: ignore[override]
    """Whether AGN gets the gradients of one replica."""
    return self.transport == "compiled"

  @property
  def local_updates(self) -> bool:  # type: ignore[override]
    """Whether replicas have parameters of their own between commits."""
    return self.transport == "compiled"

  @property
  def commits_on_host(self) -> bool:  # type: ignore[override]
    """Whether `flaxshard.Worker` commits, between steps."""
    return self.transport == "host"

  def check_order(
    self, outer: Sequence[base.Wrapper], inner: Sequence[base.Wrapper]
  ) -> None:
    """Raises a ValueError if a wrapper may not stand inside of this one."""
    if self.commits_on_host:
      agn_host.check_order(outer, inner)

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
    if self.commits_on_host:
      agn_host.check_state(self, params, tx)
    optimized = opt_state_lib.optimized_params(params)
    accum = parameter_groups.zero_accumulators(tx, params)
    # Raises if there are too many fragments.
    agn_schedule.fragments_by_path(accum, self.fragments)
    local_opt_state = opt_state_lib.init(tx, optimized)
    outer_opt_state, center_opt_state = (), local_opt_state
    if self.outer_tx is not None:
      outer_opt_state = opt_state_lib.init(self.outer_tx, optimized)
      center_opt_state = outer_opt_state
    return AGNState(
      local_params=params,
      local_opt_state=local_opt_state,
      grad_accum=accum,
      local_step=jnp.zeros((), jnp.int32),
      commits=jnp.zeros((), jnp.int32),
      collections={},
      outer_opt_state=outer_opt_state,
      touched=self._init_touched(params, tx),
      fragment_counts=agn_center.init_fragment_counts(
        self, center_opt_state, params
      ),
      sent=() if self.commits_on_host else agn_delay.init(self, params),
      received=agn_host.init_received(accum) if self.commits_on_host else (),
      center_commits=agn_host.init_center_commits(self),
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
    sent = agn_delay.init_collections(self, state.sent, collections)
    return state._replace(collections=collections, sent=sent)

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
    sent = state.sent
    if "params" in sent:
      sent = {**sent, "params": target.params}
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
      fragment_counts={
        name: saved.get(f"fragment_counts/{name}", x)
        for name, x in state.fragment_counts.items()
      },
      # What was on its way to replicas is dropped: the center has it.
      sent=sent,
    )

  def adjust_restored(self, state: AGNState) -> tuple[AGNState, None]:
    """Returns the state with the rows of sums that another run has saved."""
    touched = row_accumulator.find_touched(state.grad_accum, state.touched)
    state = state._replace(touched=touched)
    if self.commits_on_host:
      state = agn_host.adjust_restored(state)
    return state, None

  def partition_specs(self, state: AGNState) -> AGNState:
    """Returns the specs: counters and `outer_opt_state` are replicated."""
    specs = {
      field: (
        P()
        if field in _REPLICATED or self.commits_on_host
        else P(mesh_lib.REPLICA)
      )
      for field in state._fields
    }
    tree = AGNState(
      **{
        field: jax.tree.map(lambda _, spec=specs[field]: spec, value)
        for field, value in state._asdict().items()
      }
    )
    if self.commits_on_host:
      return tree
    return tree._replace(sent=agn_delay.partition_specs(state.sent))

  def check_replicas(self, num_replicas: int) -> None:
    """Warns if sequential commits are too frequent to be stable."""
    # With the host transport, `Worker` knows how many commit.
    if not self.commits_on_host:
      agn_arguments.warn_of_short_period(self, num_replicas, "replicas")

  def metrics(self, state: AGNState) -> dict[str, jax.Array]:
    """Returns the number of commits, to be logged."""
    return {"commits": state.commits}

  def pending(self, state: AGNState) -> str | None:
    """Returns how many local steps or rows the center lacks, if any."""
    if self.commits_on_host:
      return agn_host.pending(self, state)
    steps = agn_schedule.uncommitted_steps(self, int(state.local_step))
    if not any(steps):
      waiting = row_accumulator.count_touched(state.touched)
      if not waiting:
        return None
      return (
        f"AGN: {waiting} rows of tables did not fit in the last commit, and "
        "are not in params. A commit has communication_period times as many "
        "rows as its step, and earlier steps had larger batches."
      )
    if min(steps) == max(steps):
      return (
        f"AGN: the last {steps[0]} local steps of each replica are not in "
        "params. They are committed after communication_period="
        f"{self.communication_period} applied steps."
      )
    return (
      f"AGN: the last {', '.join(map(str, steps))} local steps of each replica "
      f"are not in params, for fragment 0 to {self.fragments - 1}. Each is "
      f"committed after communication_period={self.communication_period} "
      "applied steps."
    )

  # -- Collections.

  def reduce_collection(self, x: jax.Array) -> jax.Array:
    """Returns a replica's collection unchanged: commits average it."""
    return replica_context.mean_collection(x) if self.commits_on_host else x

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
    if self.commits_on_host:
      return agn_host.apply(self, state, target, grads, next)
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
    # The collections that this step replaces, as they were last committed.
    committed = {
      name: state.collections[name]
      for name in new.collections
      if name in state.collections
    }
    center_opt_state = (
      target.opt_state if self.outer_tx is None else state.outer_opt_state
    )
    new_state, num_commits = agn_fragments.run_commits(
      self,
      agn_center.create_update(self, target, next),
      agn_fragments.CommitState(
        center=ModelState(target.params, center_opt_state),
        local=ModelState(new.params, new.opt_state),
        accum=accum,
        touched=touched,
        collections={name: new.collections[name] for name in committed},
        committed=committed,
        fragment_counts=state.fragment_counts,
        sent=state.sent,
      ),
      grads,
      local_step,
      applied,
    )
    center, local = new_state.center, new_state.local
    collections, committed = new_state.collections, new_state.committed
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
      grad_accum=new_state.accum,
      local_step=local_step,
      commits=state.commits + num_commits,
      collections={**state.collections, **committed},
      outer_opt_state=() if self.outer_tx is None else center.opt_state,
      touched=new_state.touched,
      fragment_counts=new_state.fragment_counts,
      sent=new_state.sent,
    )
