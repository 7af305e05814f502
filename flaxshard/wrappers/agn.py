"""AGN: replicas that step alone and commit to a center once in a while."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple
import warnings

import jax
import jax.numpy as jnp

from flaxshard.core import checks
from flaxshard.core import gradients
from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import trees
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.replicas import context as replica_context
from flaxshard.replicas import values
from flaxshard.wrappers import agn_commit as commits
from flaxshard.wrappers import base
from flaxshard.wrappers.agn_commit import ModelState

PyTree = Any
P = jax.sharding.PartitionSpec

# Commits one after another are stable from about this many local steps for
# each replica on (measured with the original).
_STABLE_PERIOD = 0.64

# The fields of the state that are not a replica's own.
_MIRRORED = ("local_step", "commits", "outer_opt_state")


class AGNState(NamedTuple):
  """The state of `AGN`. Leaves `[replicas, ...]` are the replicas' own.

  Attributes:
    local_params: `[replicas, ...]`, the parameters that each goes on with.
    local_opt_state: `[replicas, ...]`, the optimizer's state for them.
    grad_accum: `[replicas, ...]`, float32 or wider, what has come together for
      the next commit; None for leaves without a gradient.
    local_step: int32 scalar, steps that each replica has taken.
    commits: int32 scalar, how often they have committed.
    collections: `[replicas, ...]`, the other collections, such as
      `batch_stats`, as each replica has them; by name.
    outer_opt_state: The state of `outer_tx`, for the center; `()` without.
  """

  local_params: PyTree
  local_opt_state: PyTree
  grad_accum: PyTree
  local_step: jax.Array
  commits: jax.Array
  collections: dict[str, PyTree]
  outer_opt_state: PyTree


@dataclasses.dataclass(frozen=True)
class AGN(base.Base):
  """Accumulated gradient normalization: local steps, rare commits.

  Every replica steps on a copy of the parameters of its own, with slots of its
  own, and adds up its gradients. Every `communication_period` steps it commits
  their mean: the center, `state.params`, is updated with it by the same
  optimizer in the center's own slots, and the replica goes on from the center.
  Between commits nothing is communicated, so that over a period there is
  1/period of the traffic of data parallelism.

  Losses are differentiated at the local parameters. `state.params` and
  `state.opt_state` are the center: what is evaluated, exported, and restored
  without the wrapper. `state.step` counts local steps. Schedules in `tx` count
  updates: a replica's its local steps, the center's its commits. Collections
  such as `batch_stats` are a replica's own inside of `Strategy.run`; outside
  there is their mean at the last commit.

  Args:
    communication_period: Local steps from commit to commit.
    commit: `"sequential"`: the replicas commit one after another, in their
      order, and each goes on from the center as it is after its own commit, as
      with a parameter server. `"mean"` or `"sum"`: the center is updated once,
      with the mean or the sum of all, and all go on from the same.
    share_step_count: The original's Adam has one pair of beta powers for local
      steps and commits: the step count of the optimizer then advances
      period + 1 times a period. By default the center has its own.
    outer_tx: Another optimizer for the center, any of optax. `state.opt_state`,
      what `tx` has for the center, then stays as it is.
    commit_delta: Commit by how much the local parameters have changed since the
      last commit, the sum and not the mean over the period, instead of the mean
      gradient. With `commit="mean"` and `outer_tx=optax.sgd(1.0)` the center is
      the mean of the local parameters (local SGD); with
      `optax.sgd(0.7, momentum=0.9, nesterov=True)` this is DiLoCo.

  Raises:
    ValueError, TypeError: A value outside of these.

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
  reduces_gradients: ClassVar[bool] = True
  local_updates: ClassVar[bool] = True

  communication_period: int = 10
  commit: str = "sequential"
  share_step_count: bool = False
  outer_tx: Any = None
  commit_delta: bool = False

  def __post_init__(self) -> None:
    period = self.communication_period
    period = checks.integer("AGN: communication_period", period, minimum=1)
    object.__setattr__(self, "communication_period", period)
    if self.commit not in ("sequential", "mean", "sum"):
      raise ValueError(
        f"AGN: commit={self.commit!r}; allowed: 'sequential', 'mean', 'sum'."
      )
    for name in ("share_step_count", "commit_delta"):
      if not isinstance(getattr(self, name), bool):
        raise TypeError(
          f"AGN: {name} must be a bool, got {getattr(self, name)!r}."
        )
    if self.outer_tx is not None:
      if not all(hasattr(self.outer_tx, n) for n in ("init", "update")):
        raise TypeError(
          "AGN: outer_tx must be an optax GradientTransformation or None, got "
          f"{self.outer_tx!r}."
        )
      if self.share_step_count:
        raise ValueError(
          "AGN: share_step_count=True shares the count of one optimizer; with "
          f"outer_tx={self.outer_tx!r} there are two."
        )

  # -- The wrapper protocol.

  def init(self, params: PyTree, tx: Any) -> AGNState:
    """Returns the first state, of one replica."""

    def accumulator(path: trees.Path, p: jax.Array) -> jax.Array | None:
      if not gradients.has_gradient(path, p):
        return None
      return jnp.zeros(p.shape, commits.accumulated(p.dtype))

    with_optimizer = opt_state_lib.optimized_params(params)
    return AGNState(
      local_params=params,
      local_opt_state=tx.init(with_optimizer),
      grad_accum=jax.tree_util.tree_map_with_path(accumulator, params),
      local_step=jnp.zeros((), jnp.int32),
      commits=jnp.zeros((), jnp.int32),
      collections={},
      outer_opt_state=(
        () if self.outer_tx is None else self.outer_tx.init(with_optimizer)
      ),
    )

  def init_collections(
    self, state: AGNState, collections: dict[str, PyTree]
  ) -> AGNState:
    """Returns the state with collections for each replica.

    Raises:
      TypeError: A collection is each replica's own already.
    """
    for name, tree in collections.items():
      if values.has_per_replica(tree):
        raise TypeError(
          f"AGN: the collection {name!r} is a PerReplica; each replica has its "
          "own of every collection anyway. Give it as one."
        )
    return state._replace(collections=collections)

  def restart(
    self, state: AGNState, target: base.Target, saved: dict[str, jax.Array]
  ) -> AGNState:
    """Returns a state in which all replicas begin at the center.

    Args:
      state: A first state.
      target: The center, from a checkpoint that has no state for as many
        replicas.
      saved: What it has for any number of replicas, by path: what they share,
        and the scalars of the first.
    """
    # Schedules go on where they were: the local one is ahead of the center's.
    counts = {
      path.removeprefix("local_opt_state/"): x for path, x in saved.items()
    }
    local_step = saved.get("local_step", state.local_step)
    return state._replace(
      local_params=target.params,
      local_opt_state=opt_state_lib.with_counts(target.opt_state, counts),
      grad_accum=jax.tree.map(jnp.zeros_like, state.grad_accum),
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

  def check_replicas(self, num_replicas: int) -> None:
    """Warns where sequential commits are too frequent to be stable."""
    least = _STABLE_PERIOD * num_replicas
    if self.commit == "sequential" and self.communication_period < least:
      warnings.warn(
        f"AGN: communication_period={self.communication_period} is short for "
        f"sequential commits of {num_replicas} replicas: each replica's commit "
        f"was computed {num_replicas - 1} commits ago, and below about "
        f"{_STABLE_PERIOD} * {num_replicas} = {least:.1f} local steps training "
        "may diverge. Use a longer period, a lower learning rate, or "
        "commit='mean'.",
        UserWarning,
        stacklevel=2,
      )

  def working_params(self, state: AGNState, params: PyTree) -> PyTree:
    """Returns this replica's parameters."""
    del params
    return state.local_params

  def reduce_collection(self, x: jax.Array) -> jax.Array:
    """Returns a replica's statistics as they are, until they are committed."""
    return x

  def swap_collections(
    self, state: AGNState, collections: dict[str, PyTree]
  ) -> tuple[AGNState, dict[str, PyTree]]:
    """Puts a replica's own collections for the committed ones, or back."""
    other = {name: collections[name] for name in state.collections}
    return (
      state._replace(collections=other),
      {**collections, **state.collections},
    )

  def partition_specs(self, state: AGNState) -> AGNState:
    """A first dimension for the replicas, but for the counters."""
    specs = {
      field: P() if field in _MIRRORED else P(mesh_lib.REPLICA)
      for field in state._fields
    }
    return AGNState(
      **{
        field: jax.tree.map(lambda _, spec=specs[field]: spec, value)
        for field, value in state._asdict().items()
      }
    )

  def metrics(self, state: AGNState) -> dict[str, jax.Array]:
    """Returns `commits`, to be logged."""
    return {"commits": state.commits}

  def apply(
    self, state: AGNState, target: base.Target, grads: PyTree, next: base.Next
  ) -> tuple[base.Target, AGNState]:
    """Steps on the local copy; commits to the center when it is time."""
    new = next(
      target._replace(
        params=state.local_params, opt_state=state.local_opt_state
      ),
      grads,
    )
    applied = new.step != target.step  # or a wrapper inside has skipped it
    accum = commits.accumulate(
      state.grad_accum,
      commits.param_delta(state.local_params, new.params)
      if self.commit_delta
      else grads,
      applied,
    )
    local_step = state.local_step + applied
    due = applied & (local_step % self.communication_period == 0)

    def commit(
      center: ModelState,
      local: ModelState,
      accum: PyTree,
      collections: dict[str, PyTree],
      committed: dict[str, PyTree],
    ) -> Any:
      del committed
      center, local = self._commit(target, next, center, local, accum, grads)
      collections = {
        name: replica_context.mean_collection(x)
        for name, x in collections.items()
      }
      accum = jax.tree.map(jnp.zeros_like, accum)
      return center, local, accum, collections, collections

    # The one place with collectives. Its predicate is the same on all replicas,
    # so that it stays a branch. The local step is outside of it: inside of both
    # branches it was measured to cost copies of everything it updates.
    center_opt_state = (
      target.opt_state if self.outer_tx is None else state.outer_opt_state
    )
    committed = {
      name: state.collections[name]
      for name in new.collections
      if name in state.collections
    }
    center, local, accum, collections, committed = jax.lax.cond(
      due,
      commit,
      lambda *operands: operands,
      ModelState(target.params, center_opt_state),
      ModelState(new.params, new.opt_state),
      accum,
      {name: new.collections[name] for name in committed},
      committed,
    )
    if replica_context.get_replica_context() is None:
      committed = collections  # nobody sees them but this one
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
      commits=state.commits + due,
      collections={**state.collections, **committed},
      outer_opt_state=() if self.outer_tx is None else center.opt_state,
    )

  # -- Commits.

  def _commit(
    self,
    target: base.Target,
    next: base.Next,
    center: ModelState,
    local: ModelState,
    accum: PyTree,
    grads: PyTree,
  ) -> tuple[ModelState, ModelState]:
    """Returns the center and the replica's copy after a commit."""
    committed = commits.commit_gradients(accum, grads, local.params)
    given = commits.received_gradient(committed, grads)
    counts = {}
    if self.share_step_count:
      counts = replica_context.reduce_over_replicas(
        "max", opt_state_lib.counts(local.opt_state)
      )

    def apply(old: ModelState, accum: PyTree, shared: Any) -> ModelState:
      counts, given = shared
      grads = self._mean(accum)
      if self.outer_tx is not None:
        return commits.keep(
          old, commits.apply_tx(self.outer_tx, old, grads), given
        )
      new = next(
        target._replace(
          step=jnp.zeros((), jnp.int32),  # the local step has counted
          params=old.params,
          opt_state=opt_state_lib.with_counts(old.opt_state, counts),
        ),
        grads,
      )
      return commits.keep(old, ModelState(new.params, new.opt_state), given)

    with replica_context.gradients_already_reduced():
      if self.commit == "sequential":
        center, pulled = commits.sequential(
          apply, center, committed, (counts, given)
        )
      else:
        center, pulled = commits.combined(
          self.commit, apply, center, committed, (counts, given)
        )
    counts = (
      opt_state_lib.counts(center.opt_state) if self.share_step_count else {}
    )
    return center, ModelState(
      pulled, opt_state_lib.with_counts(local.opt_state, counts)
    )

  def _mean(self, accum: PyTree) -> PyTree:
    """Returns the gradients that an update of the center is made with."""
    if self.commit_delta:
      return accum
    # Here, where it is one pass with the update and needs no memory.
    return gradients.map_gradients(
      lambda a: a / self.communication_period, accum
    )
