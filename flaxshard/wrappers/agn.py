"""AGN: replicas take local steps and commit to a center once per period."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from flaxshard.core import checks
from flaxshard.core import gradients
from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import trees
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.replicas import context as replica_context
from flaxshard.wrappers import agn_sequential
from flaxshard.wrappers import agn_store
from flaxshard.wrappers import base
from flaxshard.wrappers.agn_sequential import ModelState

PyTree = Any

# JAX name scope of the conditional of a commit: compiled programs name it.
COMMIT_SCOPE = "agn_commit"

# The replicated fields of the state. The others are per replica.
_REPLICATED = ("local_step", "commits", "outer_opt_state", "received")

# Sequential commits are stable if the period is at least this number times the
# number of replicas (measured with `tf.contrib.opt.AGNOptimizer`).
_STABLE_PERIOD = 0.64


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
    received: bool `[leaves of grad_accum]`, those that had a gradient in a
      local step since their last commit.
    sent: With a store, int32 `[fragments]`: the local step of the last commit
      of each fragment. Else `()`.
    versions: With a store, int32 `[fragments]`: the version of the center that
      `params` has of each fragment. Else `()`.
  """

  local_params: PyTree
  local_opt_state: PyTree
  grad_accum: PyTree
  local_step: jax.Array
  commits: jax.Array
  collections: dict[str, PyTree]
  outer_opt_state: PyTree
  received: jax.Array
  sent: PyTree = ()
  versions: PyTree = ()


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
  commit, of the values that `apply_gradients` was given there.

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
    transport: `"compiled"`: commits are collectives of the compiled step.
      `"store"`, or a `Store` with options: each process steps alone, and
      `flaxshard.Worker` commits to a center in a store between steps.

  Raises:
    TypeError: An argument is of a wrong type.
    ValueError: A number is out of range, `commit` or `transport` is unknown, or
      `share_step_count` is combined with `outer_tx` or a store. When a state is
      created: there are more fragments than parameters.

  Example:
    >>> import flaxshard as fs, jax.numpy as jnp, optax
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
  communication_period: int = 10
  commit: str = "sequential"
  share_step_count: bool = False
  outer_tx: Any = None
  commit_delta: bool = False
  transport: Any = "compiled"

  def __post_init__(self) -> None:
    checks.fields(self, checks.integer, "communication_period", minimum=1)
    commits, flags = ("sequential", "mean", "sum"), (True, False)
    checks.fields(self, checks.one_of, "commit", allowed=commits)
    checks.fields(
      self, checks.one_of, "share_step_count", "commit_delta", allowed=flags
    )
    checks.fields(self, agn_store.parse, "transport")
    has_outer = self.outer_tx is not None
    if has_outer:
      opt_state_lib.check_tx(self.outer_tx, "AGN: outer_tx")
    if self.share_step_count and (has_outer or self.commits_to_store):
      raise ValueError(
        "AGN: share_step_count=True needs one optimizer for local steps and "
        "commits, and transport='compiled': no outer_tx, and no store, where "
        "the center counts its own updates."
      )
    if self.commits_to_store:
      self.transport.check(self.communication_period, self.commit)

  # With a store, replicas are those of one process, which are kept equal: to
  # other wrappers AGN is then one with a replicated state.

  @property
  def reduces(self) -> str:  # type: ignore[override]
    """Who reduces gradients: see `Base.reduces`."""
    return "store" if self.commits_to_store else "local"

  @property
  def commits_to_store(self) -> bool:
    """Whether `flaxshard.Worker` commits, between steps."""
    return isinstance(self.transport, agn_store.Store)

  # -- State.

  def init(self, params: PyTree, tx: Any) -> AGNState:
    """Returns the first state of one replica, at the center.

    Args:
      params: The parameters.
      tx: The optax optimizer.
    """
    accum = gradients.zero_accumulators(tx, params)
    outer_opt_state = ()
    if self.outer_tx is not None:
      outer_opt_state = opt_state_lib.init(self.outer_tx, params)
    state = AGNState(
      local_params=params,
      local_opt_state=opt_state_lib.init(tx, params),
      grad_accum=accum,
      local_step=jnp.zeros((), jnp.int32),
      commits=jnp.zeros((), jnp.int32),
      collections={},
      outer_opt_state=outer_opt_state,
      received=jnp.zeros(len(jax.tree.leaves(accum)), bool),
    )
    if not self.commits_to_store:
      return state
    fragments = self.transport.fragments
    agn_store.divide(accum, fragments)  # raises if there are too many
    zeros = jnp.zeros(fragments, jnp.int32)
    return state._replace(sent=zeros, versions=zeros)

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
    names = ("local_step", "commits", "outer_opt_state")
    counters = jax.tree_util.tree_map_with_path(
      lambda path, x: saved.get(trees.path_string(path), x),
      {name: getattr(state, name) for name in names},
    )
    local_step = counters.pop("local_step")
    # Back to the start of a period: the next commit averages a whole one.
    local_step -= local_step % self.communication_period
    # Schedules continue: local step counts are ahead of those of the center.
    counts = {
      path.removeprefix("local_opt_state/"): x for path, x in saved.items()
    }
    return state._replace(
      **counters,
      local_params=target.params,
      local_opt_state=opt_state_lib.with_counts(target.opt_state, counts),
      grad_accum=jax.tree.map(jnp.zeros_like, state.grad_accum),
      local_step=local_step,
      collections={n: target.collections[n] for n in state.collections},
      sent=jax.tree.map(lambda x: jnp.full_like(x, local_step), state.sent),
    )

  def specs(self, state: AGNState) -> AGNState:
    """Returns the specs: counters and `outer_opt_state` are replicated."""

    def specs_of(field: str, value: PyTree) -> PyTree:
      is_replicated = field in _REPLICATED or self.commits_to_store
      spec = jax.P() if is_replicated else jax.P(mesh_lib.REPLICA)
      return jax.tree.map(lambda _: spec, value)

    return AGNState(*map(specs_of, state._fields, state))

  def check_replicas(self, num_replicas: int) -> None:
    """Warns if sequential commits are too frequent to be stable."""
    # With a store, `Worker` knows how many commit.
    if not self.commits_to_store:
      warn_of_short_period(self, num_replicas, "replicas")

  def metrics(self, state: AGNState) -> dict[str, jax.Array]:
    """Returns the number of commits, to be logged."""
    return {"commits": state.commits}

  def pending(self, state: AGNState) -> jax.Array | int:
    """Returns the number of local steps that the center lacks."""
    if self.commits_to_store:
      return state.local_step - state.sent.min()
    return state.local_step % self.communication_period

  # -- A step.

  def params(self, state: AGNState, params: PyTree, mode: str) -> PyTree:
    """Returns this replica's local parameters, or the center to evaluate."""
    return state.local_params if mode == "train" else params

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
    # Outside of the conditional: an update in both of its branches was measured
    # to cost copies of the parameters and slots.
    local = next(
      target._replace(
        params=state.local_params, opt_state=state.local_opt_state
      ),
      grads,
    )
    # A wrapper inside, such as LossScale, may have skipped the step.
    applied = local.step != target.step
    state = self._accumulate(state, local, grads, applied)
    target = local._replace(params=target.params, opt_state=target.opt_state)
    if self.commits_to_store:
      return target, state
    is_due = applied & (state.local_step % self.communication_period == 0)
    # All collectives are in this conditional. Its predicate is replicated: a
    # per-replica one would become a select, with the collectives in every step.
    commit = functools.partial(self._commit, grads, next)
    with jax.named_scope(COMMIT_SCOPE):
      return base.cond(is_due, commit, lambda *given: given, target, state)

  def _accumulate(
    self, state: AGNState, local: base.Target, grads: PyTree, applied: jax.Array
  ) -> AGNState:
    """Returns the state after a local step, without a commit.

    Args:
      state: The state before the step.
      local: What the step has made of the local parameters.
      grads: Its gradients; None for leaves without.
      applied: Whether the step was applied, a bool scalar.
    """
    added = grads
    if self.commit_delta:
      # With the sign of a gradient. Booleans, say, are not trained.
      added = jax.tree.map(
        lambda old, total, new: (
          None if total is None else gradients.widen(old) - gradients.widen(new)
        ),
        state.local_params,
        state.grad_accum,
        local.params,
      )

    def add(total: jax.Array, x: jax.Array) -> jax.Array:
      # Not x * applied: the gradients of a skipped step may be infinite.
      return total + jnp.where(applied, x, 0).astype(total.dtype)

    has_gradient = jax.tree.map(
      lambda _, total, g: None if total is None else g is not None,
      state.local_params,
      state.grad_accum,
      grads,
    )
    received = jnp.array(jax.tree.leaves(has_gradient), bool) & applied
    return state._replace(
      local_params=local.params,
      local_opt_state=local.opt_state,
      grad_accum=trees.map_both(add, state.grad_accum, added),
      local_step=state.local_step + applied.astype(jnp.int32),
      received=state.received | received,
    )

  def _commit(
    self, grads: PyTree, next: base.Next, target: base.Target, state: AGNState
  ) -> tuple[base.Target, AGNState]:
    """Commits what all replicas have accumulated.

    Args:
      grads: The gradients of this step; None for leaves without.
      next: Applies gradients with the wrappers inside and the optimizer.
      target: The center, and the collections of this replica.
      state: The state after the local step.
    """
    accumulators: Any = jax.tree.structure(state.grad_accum)
    numbers = accumulators.unflatten(range(accumulators.num_leaves))

    def update(
      old: ModelState, accum: PyTree, shared: tuple[PyTree, jax.Array]
    ) -> ModelState:
      """Updates the center once."""
      counts, received = shared
      if not self.commit_delta:
        # Here and not before it is sent: XLA fuses this into the update,
        # elsewhere it would take memory for a copy.
        accum = gradients.map_gradients(
          lambda a: a / self.communication_period, accum
        )
      if self.outer_tx is not None:
        new = opt_state_lib.update(self.outer_tx, *old, accum)
      else:
        updated = next(
          target._replace(
            # The target's step is local: `state.step` counts no commits.
            step=jnp.zeros((), jnp.int32),
            params=old.params,
            opt_state=opt_state_lib.with_counts(old.opt_state, counts),
          ),
          accum,
        )
        new = updated.params, updated.opt_state
      # Whether a leaf has a gradient is static in one step, but may differ from
      # step to step: those without one in this step may have had one before.
      is_kept = jax.tree.map(
        lambda _, g, i: g is None and i is not None and ~received[i],
        old.params,
        grads,
        numbers,
      )
      return ModelState(*opt_state_lib.keep(is_kept, old, new))

    has_outer = self.outer_tx is not None
    center = ModelState(
      target.params, state.outer_opt_state if has_outer else target.opt_state
    )
    # Of Flax's statistics the newest values: their sum means nothing.
    commit = jax.tree_util.tree_map_with_path(
      lambda path, p, x: p if gradients.is_statistic(path) else x,
      state.local_params,
      state.grad_accum,
    )
    # Step counts by path, in place of those of the center.
    counts = {}
    if self.share_step_count:
      # Equal on all replicas, but JAX does not know: the maximum makes it so.
      counts = replica_context.reduce_over_replicas(
        "max", opt_state_lib.counts(state.local_opt_state)
      )
    shared = (counts, state.received)
    # Commits are the same on all replicas: wrappers inside must not reduce.
    with replica_context.marked(gradients_reduced=True):
      if self.commit == "sequential":
        center, local_params = agn_sequential.commit_sequentially(
          update, center, commit, shared
        )
      else:
        commit = replica_context.reduce_gradients(self.commit, commit)
        center = update(center, commit, shared)
        local_params = center.params
    if counts:
      counts = opt_state_lib.counts(center.opt_state)
    means = {
      name: replica_context.mean_collection(x)
      for name, x in target.collections.items()
      if name in state.collections
    }
    target = target._replace(
      params=center.params,
      opt_state=target.opt_state if has_outer else center.opt_state,
      collections={**target.collections, **means},
    )
    return target, state._replace(
      local_params=local_params,
      local_opt_state=opt_state_lib.with_counts(state.local_opt_state, counts),
      grad_accum=jax.tree.map(jnp.zeros_like, state.grad_accum),
      commits=state.commits + 1,
      collections={**state.collections, **means},
      outer_opt_state=center.opt_state if has_outer else (),
      received=jnp.zeros_like(state.received),
    )


def warn_of_short_period(agn: AGN, count: int, noun: str) -> None:
  """Warns if sequential commits are too frequent to be stable.

  Args:
    agn: The wrapper.
    count: The number of those that commit.
    noun: What they are: "replicas" or "workers".
  """
  least = _STABLE_PERIOD * count
  if agn.commit == "sequential" and agn.communication_period < least:
    checks.warn(
      f"AGN: communication_period={agn.communication_period} is short for "
      f"sequential commits of {count} {noun}: before a commit is applied, the "
      f"center changes by {count - 1} other commits, and below about "
      f"{_STABLE_PERIOD} * {count} = {least:.1f} local steps training may "
      "diverge. Use a longer period, a lower learning rate, or commit='mean'.",
    )
