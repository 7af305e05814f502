"""The items of a step as which Orbax's managers save a train state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from flaxshard.checkpoint import digests
from flaxshard.checkpoint import reader
from flaxshard.checkpoint import steps
from flaxshard.core import checks
from flaxshard.core import trees
from flaxshard.core import version
from flaxshard.state import fields as fields_lib
from flaxshard.state import replica_groups
from flaxshard.state.train_state import TrainState

_log = logging.getLogger(__name__)

PyTree = Any
# A train state, or several by name.
States = TrainState | Mapping[str, TrainState]

_KINDS = (jnp.number, jnp.bool_, jax.dtypes.prng_key)


def save_args(
  state: States, *, plain_item: str = "default"
) -> ocp.args.Composite:
  """Returns the arguments with which an Orbax manager saves a state.

  A manager that is used with this function and `restore` alone needs no
  options, in any process; see `item_handlers` for other managers. Add items
  with `ocp.args.Composite(**save_args(state), data=...)`.

  Args:
    state: The state, or a dict of states by name: then each item is a dict of
      what it has for each of them. If groups of replicas differ, replica 0 is
      saved, and the log says so.
    plain_item: The item for the plain train state: `"default"`, the name in
      Orbax's `CheckpointManager`, or `"state"`, the name in Orbax v1.

  Returns:
    The arguments for the items `plain_item` and, unless the wrappers have no
    states, `wrappers`.

  Raises:
    TypeError: `state` is not a `TrainState`, or a leaf of it is not an array.
    ValueError: A leaf has no elements, or `plain_item` has another value.

  Example:
    >>> import flaxshard as fs, jax.numpy as jnp, optax, tempfile
    >>> state = fs.TrainState.create(
    ...     apply_fn=None, params={"w": jnp.ones(3)}, tx=optax.adam(0.1),
    ...     wrappers=[fs.LossScale("dynamic")])
    >>> with ocp.CheckpointManager(tempfile.mkdtemp()) as manager:
    ...   saved = manager.save(1, args=fs.checkpoint.save_args(state))
    ...   state = fs.checkpoint.restore(manager, state)
  """
  check_state(state)
  check_plain_item(plain_item)
  _check_savable(state)
  plain: Any = {}
  states: Any = {}
  for name, s in by_name(state).items():
    note = replica_groups.describe_divergence(s)
    if note is not None:
      _log.info("step %d: %s", int(s.step), note)
      s = replica_groups.of_first_replica(s)
    plain[name] = fields_lib.plain_state(s)
    own = {n: x for n, x in s.wrapper_states.items() if jax.tree.leaves(x)}
    if own:
      states[name] = own
  if not isinstance(state, Mapping):
    plain, states = plain[""], states.get("")
  items: dict[str, Any] = {plain_item: ocp.args.StandardSave(plain)}
  if states:
    items[steps.WRAPPERS] = ocp.args.PyTreeSave(states)
  return ocp.args.Composite(**items)


def item_handlers(
  *, plain_item: str = "default"
) -> dict[str, ocp.CheckpointHandler]:
  """Returns the handlers with which to construct an Orbax manager.

  Without them a manager takes a step for a single item once it has read one
  with Orbax's own calls, and then refuses `save_args`. With them it can do
  both.

  Args:
    plain_item: As in `save_args`.

  Returns:
    Handlers by item, for `ocp.CheckpointManager(directory, item_handlers=...)`.

  Raises:
    ValueError: `plain_item` has another value.

  Example:
    >>> sorted(item_handlers())
    ['default', 'wrappers']
  """
  check_plain_item(plain_item)
  return {
    plain_item: ocp.StandardCheckpointHandler(),
    # Unlike Standard's, this handler can leave out leaves.
    steps.WRAPPERS: ocp.PyTreeCheckpointHandler(),
  }


def by_name(state: States) -> Mapping[str, TrainState]:
  """Returns states by name; a single one has the name `""`."""
  return state if isinstance(state, Mapping) else {"": state}


def metadata(
  state: States,
  step: int,
  items: Sequence[str],
  config: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
  """Returns what describes a step, with values that JSON can hold.

  Args:
    state: The state that is saved, or states by name.
    step: Number of the step that it is saved under.
    items: Names of the step's other items.
    config: The training config, with values that JSON can hold.
  """
  mesh = mesh_of(state)
  wrappers = [w for s in by_name(state).values() for w in s.wrappers]
  return {
    "flaxshard": version.VERSION,
    "jax": jax.__version__,
    "orbax": ocp.__version__,
    "step": step,
    "state_step": _step_of(state),
    "items": sorted(items),
    "wrappers": [repr(w) for w in wrappers],
    "processes": jax.process_count(),
    "devices": None if mesh is None else mesh.size,
    "mesh": None if mesh is None else dict(mesh.shape),
    "config": None if config is None else dict(config),
  }


def _step_of(state: States) -> Any:
  """Returns the step of a state, or the steps of states by name."""
  if isinstance(state, Mapping):
    return {name: int(s.step) for name, s in state.items()}
  return int(state.step)


def mesh_of(tree: PyTree) -> Any:
  """Returns the mesh of a tree of arrays; None if it has none."""
  for x in jax.tree.leaves(tree):
    sharding = getattr(x, "sharding", None)
    if isinstance(sharding, jax.sharding.NamedSharding):
      return sharding.mesh
  return None


def as_saved(x: Any) -> Any:
  """Returns the shape and dtype with which Orbax saves a leaf."""
  is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
  return jax.eval_shape(jax.random.key_data, x) if is_key else x


# -- Checks.


def check_state(state: Any) -> None:
  """Raises a TypeError unless `state` is a TrainState, or a dict of some."""
  if isinstance(state, Mapping) and state:
    for s in state.values():
      check_state(s)
  elif not isinstance(state, TrainState):
    raise TypeError(
      "state must be a flaxshard TrainState, as flaxshard.TrainState.create "
      f"returns with the arguments of Flax's, got {checks.describe(state)} of "
      f"{type(state)}."
    )


def check_plain_item(plain_item: Any) -> None:
  """Raises a ValueError unless other programs find an item of that name."""
  checks.one_of("plain_item", plain_item, ("default", "state"))


def _check_savable(state: States) -> None:
  """Raises an error at the first leaf that Orbax cannot save and restore.

  Orbax notices some of these leaves in the middle of a save, and others never.
  A Python number, for example, is saved but not restored as a number.

  Raises:
    TypeError: A leaf is not an array of numbers, booleans or random keys, or
      JAX would change its dtype.
    ValueError: An array has no elements.
  """
  for path, x in jax.tree_util.tree_leaves_with_path(state):
    name = f"state[{trees.path_string(path)}]"
    if (
      isinstance(x, jax.core.Tracer)
      or not isinstance(x, (jax.Array, np.ndarray, np.generic))
      or not any(jnp.issubdtype(x.dtype, kind) for kind in _KINDS)
      # NumPy has 64 bits by default, and JAX would restore 32.
      or (not isinstance(x, jax.Array) and jnp.asarray(x).dtype != x.dtype)
    ):
      raise TypeError(
        f"{name} must be an array of numbers, booleans or random keys, without "
        f"jax_enable_x64 of 32 bits or less, got {checks.describe(x)}."
      )
    if 0 in np.shape(x):
      raise ValueError(
        f"{name} has no elements, shape {np.shape(x)}: Orbax cannot save that."
      )


def check_same(step_dir: Any, state: States, items: ocp.args.Composite) -> None:
  """Raises an error if a step was saved from another state.

  Compares the trees with their shapes and dtypes, and `state.step`. No array is
  read. A step that another program saved is not compared.

  Args:
    step_dir: Path of the directory of the step.
    state: The state, or states by name.
    items: What `save_args` returned for the state.

  Raises:
    ValueError: The states differ; the message names the first difference.
  """
  saved = digests.read_metadata(step_dir)
  if saved is None:
    return
  current: dict[reader.Path, Any] = {}
  for name, item in dict(items.items()).items():
    prefix = (reader.WRAPPER_STATES,) if name == steps.WRAPPERS else ()
    for path, x in trees.leaves_by_path(item.item).items():
      current[(*prefix, *path)] = as_saved(x)
  difference = trees.difference_by_path(
    reader.open_unverified(steps.as_path(step_dir)), current
  )
  if saved["state_step"] != _step_of(state):
    difference = (
      f"state.step is {_step_of(state)}, {saved['state_step']} was saved"
    )
  if difference:
    raise ValueError(
      f"{step_dir} was saved from another state: {difference}. Save under "
      "another step, or in another directory."
    )
