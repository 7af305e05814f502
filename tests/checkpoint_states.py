"""States with every kind of leaf, and functions that save them."""

import functools
import logging
from typing import Any

from flax.training import train_state as flax_train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from orbax.checkpoint import v1 as ocp_v1

import flaxshard as fs

STEP = 1200
TX = optax.adam(0.125)


class FlaxState(flax_train_state.TrainState):
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


def flax_state(tx=TX):
  state = FlaxState.create(apply_fn=None, tx=tx, **variables())
  return state.replace(step=jnp.int32(0))


AGN = fs.AGN(4, commit="mean")
SCALED = fs.LossScale("dynamic")
STACKS = {
  "none": (),
  "loss_scale": (SCALED,),
  "agn": (AGN,),
  "both": (SCALED, AGN),
}


@functools.cache
def our_state(stack, tx=TX):
  strategy = None
  if AGN in STACKS[stack]:
    strategy = fs.Strategy(devices=jax.devices()[:2])
  return fs.TrainState.create(
    apply_fn=None,
    tx=tx,
    wrappers=STACKS[stack],
    strategy=strategy,
    **variables(),
  )


def weights(value=1.0, tx=TX, wrappers=(SCALED,), size=3):
  """Returns a state of a single parameter, all of one value."""
  return fs.TrainState.create(
    apply_fn=None,
    params={"w": jnp.full(size, float(value))},
    tx=tx,
    wrappers=wrappers,
  )


def change_leaves(tree):
  """Returns a tree in which every leaf has another value."""

  def change_leaf(number, x):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      fold = lambda key: jax.random.fold_in(key, number)
      for _ in x.shape:
        fold = jax.vmap(fold)
      new = fold(x)
    elif x.dtype == bool:
      new = ~x
    else:
      new = x + jnp.arange(number, x.size + number).reshape(x.shape)
      new = new.astype(x.dtype)
    return jax.device_put(new, x.sharding)

  leaves, treedef = jax.tree.flatten(tree)
  return treedef.unflatten(
    [change_leaf(i + 1, x) for i, x in enumerate(leaves)]
  )


def plain_fields(state):
  """Returns the fields of a plain program by name, with NumPy leaves."""
  names = ("step", "params", "opt_state", "batch_stats", "rngs", "counters")
  return {n: jax.tree.map(as_numpy, getattr(state, n)) for n in names}


def as_numpy(x):
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    return str(jax.random.key_impl(x)), np.asarray(jax.random.key_data(x))
  return np.asarray(x)


def assert_same(given, wanted):
  assert jax.tree.structure(given) == jax.tree.structure(wanted)
  for x, y in zip(jax.tree.leaves(given), jax.tree.leaves(wanted), strict=True):
    if isinstance(x, str):
      assert x == y
      continue
    assert (x.dtype, x.shape) == (y.dtype, y.shape)
    np.testing.assert_array_equal(x, y)


def abstract(state):
  """Returns the shapes, dtypes and shardings of a state."""
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
  )


def assert_lies_like(given, wanted):
  for (path, x), y in zip(
    jax.tree_util.tree_leaves_with_path(given),
    jax.tree.leaves(wanted),
    strict=True,
  ):
    assert x.sharding == y.sharding, jax.tree_util.keystr(path)
    assert x.dtype == y.dtype and not jax.typeof(x).weak_type


def messages(caplog, level=logging.WARNING):
  """Returns what flaxshard has logged, but for steps without digests."""
  return [
    r.getMessage()
    for r in caplog.records
    if r.name.startswith("flaxshard")
    and r.levelno >= level
    and "no digests" not in r.getMessage()
  ]


# The writers: each writes a directory of steps.


def write_v0(path, state):
  with ocp.CheckpointManager(path) as manager:
    manager.save(STEP, args=ocp.args.StandardSave(state))


def write_v0_flat(path, state):
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(path / str(STEP), state)


def write_v1_pytree(path, state):
  ocp_v1.save_pytree(path / str(STEP), state)


def write_v1_checkpointables(path, state):
  ocp_v1.save_checkpointables(
    path / str(STEP), {"pytree": state, "a": {"x": jnp.ones(2)}}
  )


def write_v1_training(path, state):
  with ocp_v1.training.Checkpointer(path) as checkpointer:
    checkpointer.save_pytree(STEP, state)


PLAIN_WRITERS = {
  "v0": write_v0,
  "v0_flat": write_v0_flat,
  "v1_pytree": write_v1_pytree,
  "v1_checkpointables": write_v1_checkpointables,
  "v1_training": write_v1_training,
}


def write_ours(path, state, step=STEP, **kwargs):
  with fs.Checkpointer(path, **kwargs) as checkpointer:
    checkpointer.save(step, state)


def write_own_manager(path, state):
  with ocp.CheckpointManager(path) as manager:
    manager.save(STEP, args=fs.checkpoint.save_args(state))


WRITERS = [
  *PLAIN_WRITERS,
  *STACKS,
  "state_item",
  "own_manager",
]


def write(directory, writer):
  """Writes a checkpoint with a writer; returns the state."""
  directory.mkdir()
  if writer in PLAIN_WRITERS:
    state = change_leaves(flax_state())
    PLAIN_WRITERS[writer](directory, state)
    return state
  if writer in STACKS:
    state = change_leaves(our_state(writer))
    write_ours(directory, state)
    return state
  state = change_leaves(our_state("both"))
  if writer == "state_item":
    write_ours(directory, state, plain_item="state")
  else:
    write_own_manager(directory, state)
  return state


def writer_in(root):
  """Returns a function that writes once with the named writer.

  That function returns the directory and the state.
  """

  @functools.cache
  def write_once(writer):
    return root / writer, write(root / writer, writer)

  return write_once
