"""States of a plain Flax program with every kind of leaf, without flaxshard."""

from typing import Any
import zlib

from flax.training import train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from orbax.checkpoint import v1 as ocp_v1
from tree_equality import assert_trees_equal

STEP = 1200
TX = optax.adam(0.125)


class FlaxState(train_state.TrainState):
  """A train state as in Flax's ImageNet example, with more fields."""

  batch_stats: Any
  rngs: Any
  counters: Any


def variables():
  """Returns variables with every kind of leaf, and empty subtrees."""
  return dict(
    params={
      "dense": {"kernel": jnp.ones((4, 2)), "bias": jnp.zeros(2)},
      "half": jnp.ones(3, jnp.float16),
      "brain": jnp.ones((2, 2), jnp.bfloat16),
      "empty": {},
    },
    batch_stats={"norm": {"mean": jnp.zeros(2), "var": jnp.ones(2)}},
    rngs={
      "dropout": jax.random.key(0, impl="rbg"),
      "each": jax.random.split(jax.random.key(1), 3),
      "raw": jax.random.PRNGKey(2),
    },
    counters={"seen": jnp.int32(0), "mask": jnp.array([True, False])},
  )


def create(tx=TX):
  state = FlaxState.create(apply_fn=None, tx=tx, **variables())
  return state.replace(step=jnp.int32(0))


def changed(tree):
  """Returns a tree in which every leaf has another value, given by its path."""

  def change_leaf(path, x):
    number = zlib.crc32(jax.tree_util.keystr(path).encode()) % 100 + 1
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      fold = lambda key: jax.random.fold_in(key, number)
      for _ in x.shape:
        fold = jax.vmap(fold)
      new = fold(x)
    elif x.dtype == bool:
      new = ~np.asarray(x)
    else:
      added = np.arange(number, x.size + number).reshape(x.shape)
      new = (np.asarray(x, np.float64) + added).astype(x.dtype)
    return jax.device_put(new, x.sharding)

  return jax.tree_util.tree_map_with_path(change_leaf, tree)


def assert_same_fields(given, wanted):
  """Compares what a plain program has, with the kinds of PRNG keys."""
  names = ("step", "params", "opt_state", "batch_stats", "rngs", "counters")
  for name in names:
    assert_trees_equal(getattr(given, name), getattr(wanted, name))


def read(path, item):
  """Returns what each strict call of Orbax reads of a step, into FlaxStates."""
  target = jax.tree.map(ocp.utils.to_shape_dtype_struct, create())
  found = [ocp_v1.load(path / str(STEP), target)]
  with ocp.StandardCheckpointer() as checkpointer:
    found.append(checkpointer.restore(path / str(STEP) / item, target))
  if item == "state":
    with ocp_v1.training.Checkpointer(path) as checkpointer:
      found.append(checkpointer.load(STEP, target))
  else:
    with ocp.CheckpointManager(path) as manager:
      args = ocp.args.StandardRestore(target)
      found.append(manager.restore(STEP, args=args))
  return found


# The writers: each writes a directory of steps.


def write_v0(path, state):
  with ocp.CheckpointManager(path) as manager:
    manager.save(STEP, args=ocp.args.StandardSave(state))


def write_v0_flat(path, state):
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(path / str(STEP), state)


def write_v1_pytree(path, state):
  ocp_v1.save(path / str(STEP), state)


def write_v1_checkpointables(path, state):
  ocp_v1.save_checkpointables(
    path / str(STEP), {"pytree": state, "a": {"x": jnp.ones(2)}}
  )


def write_v1_training(path, state):
  with ocp_v1.training.Checkpointer(path) as checkpointer:
    checkpointer.save(STEP, state)


WRITERS = {
  "v0": write_v0,
  "v0_flat": write_v0_flat,
  "v1_pytree": write_v1_pytree,
  "v1_checkpointables": write_v1_checkpointables,
  "v1_training": write_v1_training,
}
