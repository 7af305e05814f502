"""The wrapper protocol, and the stack that a TrainState carries.

A wrapper changes how a loss becomes gradients and how gradients become
parameters. It is a frozen dataclass of hyper-parameters; its state is a pytree
in `TrainState.wrapper_states`. When gradients are applied a wrapper is handed
`next`, the apply inside it, and decides when and on what to call it, as the
optimizer wrappers of TensorFlow call `self._opt.apply_gradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
import dataclasses
import functools
import re
import types
from typing import Any, NamedTuple, Protocol, runtime_checkable
import warnings

import jax
import jax.numpy as jnp

from flaxshard.core import trees
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.partitioning import specs as specs_lib
from flaxshard.replicas import context as replica_context

PyTree = Any


class Target(NamedTuple):
  """What one apply may change: a train state without its static parts.

  Attributes:
    step: int32 scalar, the number of updates applied.
    params: The parameters.
    opt_state: The optimizer's state.
    collections: The other collections that this step replaces, by field name.
    wrapper_states: The states of the wrappers, by wrapper name.
  """

  step: jax.Array
  params: PyTree
  opt_state: PyTree
  collections: dict[str, PyTree]
  wrapper_states: dict[str, PyTree]


Next = Callable[[Target, PyTree], Target]


@runtime_checkable
class Wrapper(Protocol):
  """The protocol of a wrapper: a frozen, hashable dataclass with these methods.

  Its name, the key of its state, is its attribute `name` if it has one, else
  its class name in snake case (`LossScale` → `loss_scale`). It may also have
  `metrics(state)`, a dict of scalars that the training loop logs, and
  `reduces_gradients = True`: then gradients come to it as each replica's own,
  where otherwise they are averaged over the replicas before any wrapper. Such a
  wrapper may have `reduce_collection(x)` for the new values of collections,
  which otherwise are averaged too. With `local_updates = True` what is applied
  inside of it is one replica's own, and no wrapper there may reduce.

  It may have `init_collections(state, collections)`, which gets the state's
  other collections when it is made and returns the wrapper's state, and
  `swap_collections(state, collections)`, which is called when `Strategy.run`
  begins and ends, and returns both: what a replica sees are its own then.

  `restart(state, target, saved)` is for a checkpoint without a state of the
  wrapper, or with one of another number of replicas: from a first state, what
  was restored, and what the checkpoint has for any number of replicas, by path
  (what they share, and the scalars of the first), it makes the state to go on
  with.

  All methods see one replica's own state. Where its `partition_specs` begins
  with "replica", each replica has its own of a leaf: the state that lies in a
  TrainState then has the replicas as the first dimension.
  `check_replicas(num_replicas)`, if there is one, is called before a state is
  made for that many. `divergence()` returns a sentence where groups of replicas
  come to differ in what a TrainState has once for all, else None.

  Example:
    >>> @dataclasses.dataclass(frozen=True)
    ... class SignGradients:
    ...   def init(self, params, tx): return ()
    ...   def working_params(self, state, params): return params
    ...   def scale_loss(self, state, loss): return loss
    ...   def unscale_gradients(self, state, grads): return grads
    ...   def apply(self, state, target, grads, next):
    ...     return next(target, jax.tree.map(jax.numpy.sign, grads)), state
    ...   def partition_specs(self, state): return ()
    >>> isinstance(SignGradients(), Wrapper)
    True
  """

  def init(self, params: PyTree, tx: Any) -> PyTree:
    """Returns the wrapper's first state."""
    ...

  def working_params(self, state: PyTree, params: PyTree) -> PyTree:
    """Returns the parameters that the loss is differentiated at."""
    ...

  def scale_loss(self, state: PyTree, loss: jax.Array) -> jax.Array:
    """Returns the loss that is differentiated."""
    ...

  def unscale_gradients(self, state: PyTree, grads: PyTree) -> PyTree:
    """Returns the gradients of the loss as the user wrote it."""
    ...

  def apply(
    self, state: PyTree, target: Target, grads: PyTree, next: Next
  ) -> tuple[Target, PyTree]:
    """Applies gradients by way of `next`; returns the target and the state."""
    ...

  def partition_specs(self, state: PyTree) -> PyTree:
    """Returns a tree like `state`: a PartitionSpec for each leaf."""
    ...


def name_of(wrapper: Wrapper | type) -> str:
  """Returns the key of a wrapper's state in `wrapper_states`."""
  cls = wrapper if isinstance(wrapper, type) else type(wrapper)
  snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()
  return getattr(wrapper, "name", snake)


def check(wrappers: Iterable[Wrapper]) -> tuple[Wrapper, ...]:
  """Checks a list of wrappers, outermost first, and returns it as a tuple.

  Raises:
    TypeError: An entry is not a wrapper, or cannot be hashed.
    ValueError: The same wrapper twice.
  """
  unordered = isinstance(wrappers, (str, Mapping, Set))
  if unordered or not isinstance(wrappers, Iterable):
    raise TypeError(
      "wrappers must be a sequence of wrappers such as "
      f"[LossScale('dynamic')], got {wrappers!r}."
    )
  wrappers = tuple(wrappers)
  names: list[str] = []
  for i, wrapper in enumerate(wrappers):
    if isinstance(wrapper, type) or not isinstance(wrapper, Wrapper):
      methods = [m for m in vars(Wrapper) if not m.startswith("_")]
      missing = [m for m in methods if not hasattr(wrapper, m)]
      raise TypeError(
        f"wrappers[{i}] must be an instance of a wrapper, got {wrapper!r}"
        + (f", which has no {', '.join(missing)}." if missing else ".")
      )
    try:
      hash(wrapper)
    except TypeError as e:
      raise TypeError(
        f"wrappers[{i}]={wrapper!r} must be hashable: a frozen dataclass of "
        f"plain numbers and strings, without arrays ({e})."
      ) from e
    if name_of(wrapper) in names:
      raise ValueError(
        f"wrappers[{i}]: {name_of(wrapper)!r} is given twice; "
        f"got {[name_of(w) for w in wrappers]}."
      )
    names.append(name_of(wrapper))
    outer = [w for w in wrappers[:i] if getattr(w, "local_updates", False)]
    if outer and getattr(wrapper, "reduces_gradients", False):
      raise ValueError(
        f"wrappers[{i}]: {names[-1]!r} reduces gradients over replicas, which "
        f"{name_of(outer[0])!r} around it keeps local; put it before."
      )
  return wrappers


def with_policy(wrappers: tuple[Wrapper, ...], policy: Any) -> tuple:
  """Gives `policy` to the wrappers that have such a field and left it open."""
  if policy is None:
    return wrappers
  return tuple(
    dataclasses.replace(w, policy=policy)  # type: ignore[type-var]
    if getattr(w, "policy", policy) is None
    else w
    for w in wrappers
  )


def reduces_gradients(wrappers: tuple[Wrapper, ...]) -> bool:
  """Whether a wrapper takes the reduction over replicas on itself."""
  return any(getattr(w, "reduces_gradients", False) for w in wrappers)


def per_replica_mask(wrapper: Wrapper, state: PyTree) -> list[bool]:
  """Returns which leaves of a wrapper's state replicas have their own of."""
  return [has_replica_axis(spec) for spec in partition_specs(wrapper, state)]


def reduce_collection(wrappers: tuple[Wrapper, ...], x: jax.Array) -> jax.Array:
  """Makes an array of a collection what the replicas are to go on with."""
  reductions = [
    w.reduce_collection for w in wrappers if hasattr(w, "reduce_collection")
  ]
  for reduce in reductions or [replica_context.mean_collection]:
    x = reduce(x)
  return x


def check_replicas(wrappers: tuple[Wrapper, ...], num_replicas: int) -> None:
  """Raises, or warns, where wrappers do not fit that many replicas."""
  for w in wrappers:
    if hasattr(w, "check_replicas"):
      w.check_replicas(num_replicas)
  note = divergence(wrappers)
  if note:
    warnings.warn(note, UserWarning, stacklevel=2)


def divergence(wrappers: tuple[Wrapper, ...]) -> str | None:
  """Returns what wrappers tell of replicas that differ; None: they agree."""
  if any(getattr(w, "local_updates", False) for w in wrappers):
    return None  # what all have together is reduced over all
  notes = [w.divergence() for w in wrappers if hasattr(w, "divergence")]
  return " ".join(filter(None, notes)) or None


def partition_specs(wrapper: Wrapper, state: PyTree) -> list[Any]:
  """Returns the spec of each leaf of a wrapper's state."""
  given = wrapper.partition_specs(state)
  treedef: Any = jax.tree.structure(state)
  try:
    return treedef.flatten_up_to(given)
  except ValueError as e:
    raise ValueError(
      f"wrapper {name_of(wrapper)!r}: partition_specs must return a tree like "
      f"the state, with a PartitionSpec for each leaf, got {given!r}."
    ) from e


def has_replica_axis(spec: Any) -> bool:
  """Whether a leaf of that spec has the replicas as its first dimension."""
  # What is no PartitionSpec is refused where the state is placed.
  entries = (*spec, None) if isinstance(spec, jax.P) else (None,)
  return mesh_lib.REPLICA in specs_lib.axes_of(entries[0])


def init(
  wrappers: tuple[Wrapper, ...],
  params: PyTree,
  tx: Any,
  collections: Mapping[str, PyTree] = types.MappingProxyType({}),
  num_replicas: int = 1,
) -> dict[str, PyTree]:
  """Returns the first states of a stack, by wrapper name.

  Args:
    wrappers: The stack.
    params: The parameters.
    tx: The optimizer.
    collections: The other collections of the train state, by name.
    num_replicas: How many replicas there are.
  """
  states = {}
  for w in wrappers:
    state = w.init(params, tx)
    if hasattr(w, "init_collections"):
      state = w.init_collections(state, dict(collections))
    states[name_of(w)] = state
  return add_replica_axis(wrappers, states, num_replicas)


def add_replica_axis(
  wrappers: tuple[Wrapper, ...],
  states: Mapping[str, PyTree],
  num_replicas: int = 1,
) -> dict[str, PyTree]:
  """Gives what replicas have their own of a first dimension for them."""
  return _map_per_replica(
    lambda path, x: jnp.broadcast_to(x, (num_replicas, *x.shape)),
    wrappers,
    states,
  )


def drop_replica_axis(
  wrappers: tuple[Wrapper, ...], states: Mapping[str, PyTree]
) -> dict[str, PyTree]:
  """Undoes `add_replica_axis` for one replica.

  Raises:
    ValueError: The states are of several.
  """

  def one(path: str, x: jax.Array) -> jax.Array:
    if x.shape[:1] != (1,):
      raise ValueError(
        f"wrapper_states[{path}] is of {x.shape[0]} replicas, each of which "
        "takes a step of its own: take it in Strategy.run."
      )
    return x[0]

  return _map_per_replica(one, wrappers, states)


def _map_per_replica(
  fn: Callable[[str, jax.Array], jax.Array],
  wrappers: tuple[Wrapper, ...],
  states: Mapping[str, PyTree],
) -> dict[str, PyTree]:
  """Applies `fn(path, leaf)` to the leaves that replicas have their own of."""
  new = dict(states)
  for w in wrappers:
    name = name_of(w)
    leaves = jax.tree_util.tree_leaves_with_path(states[name])
    new[name] = jax.tree.unflatten(
      jax.tree.structure(states[name]),
      [
        fn(f"{name}/{trees.path_string(path)}", x) if mine else x
        for (path, x), mine in zip(
          leaves, per_replica_mask(w, states[name]), strict=True
        )
      ],
    )
  return new


def swap_collections(
  wrappers: tuple[Wrapper, ...],
  states: Mapping[str, PyTree],
  collections: dict[str, PyTree],
) -> tuple[dict[str, PyTree], dict[str, PyTree]]:
  """Puts a replica's own collections for those of all, or back."""
  states = dict(states)
  for w in wrappers:
    if hasattr(w, "swap_collections"):
      name = name_of(w)
      states[name], collections = w.swap_collections(states[name], collections)
  return states, collections


def working_params(
  wrappers: tuple[Wrapper, ...], states: Mapping[str, PyTree], params: PyTree
) -> PyTree:
  """Returns the parameters that the loss is differentiated at."""
  for w in reversed(wrappers):
    params = w.working_params(states[name_of(w)], params)
  return params


def scale_loss(
  wrappers: tuple[Wrapper, ...], states: Mapping[str, PyTree], loss: jax.Array
) -> jax.Array:
  """Scales a loss by every wrapper, innermost first."""
  for w in reversed(wrappers):
    loss = w.scale_loss(states[name_of(w)], loss)
  return loss


def unscale_gradients(
  wrappers: tuple[Wrapper, ...], states: Mapping[str, PyTree], grads: PyTree
) -> PyTree:
  """Undoes `scale_loss` on gradients, outermost first."""
  for w in wrappers:
    grads = w.unscale_gradients(states[name_of(w)], grads)
  return grads


def metrics(
  wrappers: tuple[Wrapper, ...], states: Mapping[str, PyTree]
) -> dict[str, jax.Array]:
  """Returns what the wrappers have to log."""
  values: dict[str, jax.Array] = {}
  for w in wrappers:
    if hasattr(w, "metrics"):
      values.update(w.metrics(states[name_of(w)]))
  return values


def apply(
  wrappers: tuple[Wrapper, ...], target: Target, grads: PyTree, update: Next
) -> Target:
  """Applies gradients through the stack; `update` is the optimizer's own step.

  The states of the wrappers travel in the target, so that a wrapper that calls
  `next` under a condition, or twice, carries the inner ones along.
  """

  def apply_from(i: int, target: Target, grads: PyTree) -> Target:
    if i == len(wrappers):
      return update(target, grads)
    name = name_of(wrappers[i])
    target, state = wrappers[i].apply(
      target.wrapper_states[name],
      target,
      grads,
      functools.partial(apply_from, i + 1),
    )
    states = {**target.wrapper_states, name: state}
    return target._replace(wrapper_states=states)

  return apply_from(0, target, grads)
