"""The items of a step: the train state, the position in the data, metadata.

A position in the data is global if it means the same place in every process,
such as the number of a global batch. Then one is saved, and any number of
processes restore it. Other positions belong to their process: all are saved in
the order of the processes, and as many processes restore them.
"""

from __future__ import annotations

from collections.abc import Mapping
import json
import logging
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from flaxshard.checkpoint import step_files
from flaxshard.core import checks
from flaxshard.core import multihost
from flaxshard.core import registry
from flaxshard.core import trees
from flaxshard.core import version
from flaxshard.state import fields as fields_lib
from flaxshard.state import replica_groups
from flaxshard.state.train_state import TrainState
from flaxshard.wrappers import stack

_log = logging.getLogger(__name__)

# The names under which other programs look for the train state.
PLAIN_ITEMS = ("default", "state")

# A train state, or several by name.
States = TrainState | Mapping[str, TrainState]


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
    ValueError: A leaf has no elements, two leaves differ in dots of their path
      alone, or `plain_item` has another value.

  Example:
    >>> import flaxshard as fs, jax.numpy as jnp, optax, tempfile
    >>> import orbax.checkpoint as ocp
    >>> state = fs.TrainState.create(
    ...     apply_fn=None, params={"w": jnp.ones(3)}, tx=optax.adam(0.1),
    ...     wrappers=[fs.LossScale("dynamic")])
    >>> with ocp.CheckpointManager(tempfile.mkdtemp()) as manager:
    ...   saved = manager.save(1, args=fs.checkpoint.save_args(state))
    ...   state = fs.checkpoint.restore(manager, state)
  """
  check_state(state)
  checks.one_of("plain_item", plain_item, PLAIN_ITEMS)
  check_savable(state)
  plain: Any = {}
  states: Any = {}
  for name, s in by_name(state).items():
    note = stack.divergence(s.wrappers)
    if note is not None:
      _log.info("step %d: %s", int(s.step), note)
      s = replica_groups.of_first_replica(s)
    s = jax.tree.map(_one_copy, s)
    plain[name] = fields_lib.plain_state(s)
    own = {n: x for n, x in s.wrapper_states.items() if jax.tree.leaves(x)}
    if own:
      states[name] = own
  if not isinstance(state, Mapping):
    plain, states = plain[""], states.get("")
  items: dict[str, Any] = {plain_item: ocp.args.StandardSave(plain)}
  if states:
    items[step_files.WRAPPERS] = ocp.args.PyTreeSave(states)
  return ocp.args.Composite(**items)


def _one_copy(x: Any) -> Any:
  """Returns one of the equal copies that the devices of this process have.

  Of several, Orbax would write a slice from each device, and compile each.
  """
  is_here = isinstance(x, jax.Array) and x.is_fully_addressable
  if is_here and x.is_fully_replicated and x.sharding.num_devices > 1:
    return x.addressable_data(0)
  return x


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
    >>> import flaxshard as fs
    >>> sorted(fs.checkpoint.item_handlers())
    ['default', 'wrappers']
  """
  checks.one_of("plain_item", plain_item, PLAIN_ITEMS)
  return {
    plain_item: ocp.StandardCheckpointHandler(),
    # Unlike Standard's, this handler can leave out leaves.
    step_files.WRAPPERS: ocp.PyTreeCheckpointHandler(),
  }


def by_name(state: States) -> Mapping[str, TrainState]:
  """Returns states by name; a single one has the name `""`."""
  return state if isinstance(state, Mapping) else {"": state}


def metadata(
  state: States, step: int, config: Mapping[str, Any] | None
) -> dict[str, Any]:
  """Returns what describes a step, with values that JSON can hold.

  Args:
    state: The state that is saved, or states by name.
    step: Number of the step that it is saved under.
    config: The training config, with values that JSON can hold.
  """
  mesh = fields_lib.mesh_in(state)
  wrappers = [w for s in by_name(state).values() for w in s.wrappers]
  return {
    "flaxshard": version.VERSION,
    "jax": jax.__version__,
    "orbax": ocp.__version__,
    "step": step,
    "state_step": step_of(state),
    "wrappers": [repr(w) for w in wrappers],
    "processes": jax.process_count(),
    "devices": None if mesh is None else mesh.size,
    "mesh": None if mesh is None else dict(mesh.shape),
    "config": config,
  }


def step_of(state: States) -> Any:
  """Returns the step of a state, or the steps of states by name.

  The steps of an ensemble, which `jax.vmap` has made, are a list.
  """
  if isinstance(state, Mapping):
    return {name: step_of(s) for name, s in state.items()}
  return jax.device_get(state.step).tolist()


# -- The position in the data.


def position_of(data: Any) -> dict[str, Any]:
  """Returns what to save of the position in the data, for JSON.

  All processes must call it, and get the same.

  Raises:
    TypeError: The position is neither bytes nor a value for JSON.
    ValueError: The position is said to be global, and processes differ.
  """
  # An error in the middle of a save would make Orbax hang at the exit.
  with multihost.raise_on_all_processes(TypeError, ValueError):
    state, is_bytes = _state_of(data)
    # A character for each byte.
    with registry.errors_name("data.get_state()"):
      text = json.dumps(state.decode("latin-1") if is_bytes else state)
  if getattr(data, "position_is_global", False):
    multihost.check_agreement(
      {"the position of data, although position_is_global": text}
    )
    texts = [text]
  else:
    texts = multihost.exchange(text)
  return {"positions": [json.loads(x) for x in texts], "is_bytes": is_bytes}


def read_position(data: Any, step_dir: Any) -> Any:
  """Returns the position in a step, for `data.set_state`.

  Args:
    data: The iterator; it is not changed.
    step_dir: Path of the directory of the step.

  Raises:
    Damaged: The file is missing, or is not what was saved.
    ValueError: The step has no position, or that of another number of
      processes.
  """
  item_dir = step_dir / step_files.POSITION
  names = step_files.names_in(item_dir)
  if not names:
    raise ValueError(
      f"{step_dir} has no {step_files.POSITION}: the position of the data."
    )
  _, is_bytes = _state_of(data)
  index, count = jax.process_index(), jax.process_count()
  # Grain's own handler writes a file for each process.
  files = [name for name in names if name.startswith("process_")]
  content = {} if files else step_files.read_json(item_dir / step_files.JSON)
  positions = content.get("positions", files)
  if not files and getattr(data, "position_is_global", False):
    index, count = 0, 1
  if len(positions) != count:
    raise ValueError(
      f"{item_dir} has the positions of {len(positions)} processes, and this "
      f"program has {jax.process_count()}: only an iterator with "
      "position_is_global = True saves one position, and restores it in any "
      "number of processes."
    )
  if files:
    text = (item_dir / f"process_{index}-of-{count}.json").read_text()
    return text.encode() if is_bytes else json.loads(text)
  if content.get("is_bytes") != is_bytes:
    raise ValueError(
      f"{item_dir} has the position of another iterator than data: one of them "
      "is bytes, the other one is not."
    )
  position = positions[index]
  return position.encode("latin-1") if is_bytes else position


def _state_of(data: Any) -> tuple[Any, bool]:
  """Returns the position in the data, and whether it is bytes."""
  if not hasattr(data, "get_state"):
    raise TypeError(f"data must have a method get_state, got {data!r}.")
  state = data.get_state()
  return state, isinstance(state, bytes)


# -- Checks.


def check_state(state: Any) -> None:
  """Raises a TypeError unless `state` is a TrainState, or a dict of some."""
  if isinstance(state, Mapping) and not all(
    isinstance(name, str) and name for name in state
  ):
    raise TypeError(f"the names of states must be texts, got {[*state]}.")
  for s in by_name(state).values() or [state]:
    if not isinstance(s, TrainState):
      raise TypeError(
        "state must be that of flaxshard.TrainState.create, with the arguments "
        "of Flax's, or of nnx.Optimizer.train_state(model), got "
        f"{checks.describe(s)} of {type(s)}."
      )


def check_savable(state: States) -> None:
  """Raises an error at the first leaf that Orbax cannot save and restore.

  Orbax notices some of these leaves in the middle of a save, and others never.
  A Python number, for example, is saved but not restored as a number.

  Raises:
    TypeError: A leaf is not an array of numbers, booleans or random keys, or
      JAX would change its dtype.
    ValueError: An array has no elements, or Orbax would write two leaves under
      one name.
  """
  names: dict[str, str] = {}
  for path, x in jax.tree_util.tree_leaves_with_path(state):
    keys = trees.path_strings(path)
    name = f"state[{'/'.join(keys)}]"
    # Orbax joins the keys by dots, and restores one of the two for both.
    other = names.setdefault(".".join(keys), name)
    if other != name:
      raise ValueError(
        f"{name} and {other} have the same name in Orbax's files, which join "
        "keys by dots: rename one of them."
      )
    is_numpy = isinstance(x, (np.ndarray, np.generic)) and trees.is_array(x)
    # NumPy has 64 bits by default, and JAX would restore 32.
    if not isinstance(x, jax.Array) and not (
      is_numpy and jax.dtypes.canonicalize_dtype(x.dtype) == x.dtype
    ):
      raise TypeError(
        f"{name} must be an array of numbers, booleans or random keys, without "
        f"jax_enable_x64 of 32 bits or less, got {checks.describe(x)}."
      )
    if 0 in np.shape(x):
      raise ValueError(
        f"{name} has no elements, shape {np.shape(x)}: Orbax cannot save that."
      )
