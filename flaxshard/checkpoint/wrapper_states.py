"""The states of wrappers, as a checkpoint gives them back.

A state comes back as it was saved. Where there is none, or one of another
number of replicas, a wrapper with `restart` begins at what was restored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
import dataclasses
import logging
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from flaxshard.checkpoint import templates
from flaxshard.core import trees
from flaxshard.state import fields as fields_lib
from flaxshard.state.train_state import TrainState
from flaxshard.wrappers import base
from flaxshard.wrappers import stack

_log = logging.getLogger(__name__)

PyTree = Any

ITEM = "wrappers"


def nonempty(states: Mapping[str, PyTree]) -> dict[str, PyTree]:
  """Returns the states that have anything to save."""
  return {name: s for name, s in states.items() if jax.tree.leaves(s)}


@dataclasses.dataclass(frozen=True)
class WrapperRestorePlan:
  """What is to be read, and what to be begun again.

  Attributes:
    where: The directory of the checkpoint.
    state: The state that is restored into.
    reads: The wrappers whose states come back as they were saved.
    counts: The wrappers that begin again, and the number of replicas that the
      checkpoint has a state of; None if it has none.
    item: What is read of the item, with `ocp.PLACEHOLDER` for what is not.
  """

  where: str
  state: TrainState
  reads: tuple[str, ...]
  counts: dict[str, int | None]
  item: dict[str, PyTree]

  def finish(self, plain: TrainState, read: PyTree) -> dict[str, PyTree]:
    """Returns the states of the wrappers.

    Args:
      plain: What was restored without the wrappers.
      read: What was read for `item`.

    Raises:
      ValueError: Something did not come back as it was saved, or `restart` of
        a wrapper returns no state like the first one.
    """
    states = dict(self.state.wrapper_states)
    for name in self.reads:
      templates.check_restored(
        self.where,
        trees.leaves_by_path({name: read[name]}),
        trees.leaves_by_path({name: states[name]}),
      )
      states[name] = read[name]
    for wrapper in self.state.wrappers:
      name = base.name_of(wrapper)
      if name not in self.counts:
        continue
      count = self.counts[name]
      saved = {} if count is None else _by_path(read[name])
      new = _restart(wrapper, self.state, plain, saved)
      if count is not None:
        self._tell(wrapper, new, saved)
      states[name] = new
    return states

  def _tell(
    self, wrapper: base.Wrapper, new: PyTree, saved: dict[str, jax.Array]
  ) -> None:
    """Says what another number of replicas could not go on with."""
    name = base.name_of(wrapper)
    template = self.state.wrapper_states[name]
    dropped = [
      trees.path_strings(path)[0]
      for (path, _), own in zip(
        jax.tree_util.tree_leaves_with_path(template),
        base.per_replica_mask(wrapper, template),
        strict=True,
      )
      if own
    ]
    was = {path: int(x) for path, x in saved.items() if _is_counter(x)}
    now = {path: x for path, x in _by_path(new).items() if path in was}
    back = [
      f"; {path} goes back from {was[path]} to {int(x)} (accumulated steps "
      f"lost: {was[path] - int(x)})"
      for path, x in now.items()
      if int(x) < was[path]
    ]
    _log.warning(
      "%s has the state of wrapper %r for %d replicas, now there are %d: each "
      "begins at the restored parameters. Dropped are the replicas' own %s%s.",
      self.where,
      name,
      self.counts[name],
      _num_replicas(wrapper, template),
      ", ".join(dict.fromkeys(dropped)),
      "".join(back),
    )


def plan(
  where: str,
  state: TrainState,
  saved: Mapping[str, PyTree],
  elsewhere: Collection[str] = (),
) -> WrapperRestorePlan:
  """Compares the wrappers of a state with those of a checkpoint.

  Args:
    where: The directory of the checkpoint.
    state: The state that is restored into.
    saved: The metadata of the states on disk, by wrapper name.
    elsewhere: The wrappers whose states come from another place.

  Raises:
    ValueError: A state on disk is another than that of `state`, in more than
      the number of replicas; the message names the first path that differs.
  """
  mine = nonempty(state.wrapper_states)
  able = {
    base.name_of(w): w for w in state.wrappers if base.overrides(w, "restart")
  }
  counts: dict[str, int | None] = {}
  for name in sorted(mine.keys() - saved.keys() - set(elsewhere)):
    begins = ""
    if name in able:
      counts[name] = None
      begins = " from the restored parameters"
    _log.info(
      "%s has no state of wrapper %r: it starts fresh%s", where, name, begins
    )
  for name in sorted(saved.keys() - mine.keys()):
    _log.info("%s has a state of wrapper %r: left alone", where, name)
  reads, item = [], {}
  for name, theirs in saved.items():
    if name not in mine:
      item[name] = jax.tree.map(lambda _: ocp.PLACEHOLDER, theirs)
      continue
    wanted = templates.abstract(mine[name], like=state)
    if name in able:
      had = _saved_replicas(able[name], theirs, wanted)
      if had not in (None, _num_replicas(able[name], wanted)):
        wanted = _of_replicas(able[name], wanted, had)
        counts[name] = had
    templates.check_same(
      where,
      ITEM,
      trees.leaves_by_path({name: theirs}),
      trees.leaves_by_path({name: wanted}),
    )
    if name in counts:
      everywhere = templates.on_every_device(state)
      item[name] = _kept(able[name], wanted, everywhere)
    else:
      item[name] = wanted
      reads.append(name)
  return WrapperRestorePlan(where, state, tuple(reads), counts, item)


def _by_path(tree: PyTree) -> dict[str, Any]:
  return {
    trees.path_string(path): x
    for path, x in jax.tree_util.tree_leaves_with_path(tree)
    if x is not ocp.PLACEHOLDER
  }


def _is_counter(x: Any) -> bool:
  return not x.shape and jnp.issubdtype(x.dtype, jnp.integer)


def _num_replicas(wrapper: base.Wrapper, state: PyTree) -> int:
  """Returns the number of replicas that a state is of."""
  leaves = zip(
    jax.tree.leaves(state), base.per_replica_mask(wrapper, state), strict=True
  )
  return next((x.shape[0] for x, own in leaves if own), 1)


def _saved_replicas(
  wrapper: base.Wrapper, saved: PyTree, wanted: PyTree
) -> int | None:
  """Returns the number of replicas on disk, if there are their own leaves."""
  shapes = {
    trees.path_strings(path): x.shape
    for path, x in jax.tree_util.tree_leaves_with_path(saved)
  }
  for (path, _), own in zip(
    jax.tree_util.tree_leaves_with_path(wanted),
    base.per_replica_mask(wrapper, wanted),
    strict=True,
  ):
    shape = shapes.get(trees.path_strings(path))
    if own and shape:
      return shape[0]
  return None


def _of_replicas(wrapper: base.Wrapper, state: PyTree, count: int) -> PyTree:
  """Returns what a state would be with so many replicas."""
  treedef: Any = jax.tree.structure(state)
  return treedef.unflatten(
    jax.ShapeDtypeStruct(
      (count, *x.shape[1:]) if own else x.shape, x.dtype, sharding=x.sharding
    )
    for x, own in zip(
      jax.tree.leaves(state), base.per_replica_mask(wrapper, state), strict=True
    )
  )


def _kept(wrapper: base.Wrapper, wanted: PyTree, everywhere: Any) -> PyTree:
  """Marks what is no use to another number of replicas, so as not to read it.

  What all replicas share is kept, and the scalars that each has its own of.
  """

  def one(x: jax.ShapeDtypeStruct, own: bool) -> Any:
    if not own:
      return x
    if x.ndim > 1 or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      return ocp.PLACEHOLDER
    # So many replicas may not divide by those of now.
    return jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=everywhere or x.sharding
    )

  treedef: Any = jax.tree.structure(wanted)
  own = base.per_replica_mask(wrapper, wanted)
  return treedef.unflatten(map(one, jax.tree.leaves(wanted), own))


def _restart(
  wrapper: Any,
  state: TrainState,
  plain: TrainState,
  saved: dict[str, jax.Array],
) -> PyTree:
  """Returns a wrapper's state that begins at what was restored.

  Args:
    wrapper: The wrapper.
    state: The state that is restored into.
    plain: What was restored.
    saved: What the checkpoint has of the wrapper's state, by path; of the
      scalars that replicas have their own of, `[replicas]`.
  """
  name = base.name_of(wrapper)
  template = state.wrapper_states[name]
  num_replicas = _num_replicas(wrapper, template)
  own = _by_path(
    jax.tree.unflatten(
      jax.tree.structure(template), base.per_replica_mask(wrapper, template)
    )
  )
  names = set(fields_lib.array_field_names(plain)) - {
    "step",
    "params",
    "opt_state",
  }
  target = base.Target(
    jnp.asarray(plain.step),
    plain.params,
    plain.opt_state,
    {n: getattr(plain, n) for n in sorted(names)},
    {},
  )

  def make(target: base.Target, saved: dict[str, jax.Array]) -> PyTree:
    saved = {path: x[0] if own[path] else x for path, x in saved.items()}
    wrappers = (wrapper,)
    first = stack.drop_replica_axis(
      wrappers,
      stack.init(wrappers, target.params, state.tx, target.collections),
    )
    new = base.adapt(wrapper).restart(first[name], target, saved)
    states = stack.add_replica_axis(wrappers, {name: new}, num_replicas)
    new = trees.conform(f"wrapper {name!r}: restart", states[name], template)
    # What has its own memory can be donated together with the parameters.
    return trees.unshare_buffers((target, new))[1]

  shardings = jax.tree.map(
    lambda x: x.sharding, templates.abstract(template, like=state)
  )
  # Born where it is to lie: no device ever has the replicas' own of all.
  made = jax.jit(make, out_shardings=shardings)(target, saved)
  return jax.block_until_ready(made)  # as what Orbax reads is
