"""One checkpoint of several train states, as of a GAN."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from tree_equality import assert_trees_equal

import flaxshard as fs

TX = optax.adam(0.1)


def create(wrappers, size):
  return fs.TrainState.create(
    apply_fn=None,
    params={"w": jnp.arange(size, dtype=jnp.float32)},
    tx=TX,
    wrappers=wrappers,
    stats={"mean": jnp.zeros(2)},
  )


def states():
  return {
    "generator": create([fs.LossScale("dynamic"), fs.EMA(0.5)], 3),
    "discriminator": create([], 4),
  }


def trained():
  made = states()
  for name, steps in (("generator", 1), ("discriminator", 2)):
    for _ in range(steps):
      made[name], _ = made[name].minimize(lambda p: (p["w"] ** 2).sum())
  return made


def test_states_by_name(tmp_path):
  saved = trained()
  with fs.Checkpointer(tmp_path) as checkpointer:
    assert checkpointer.save(7, saved)
    restored = checkpointer.restore(states())
    assert not checkpointer.save(7, restored)
    with pytest.raises(ValueError, match="was saved from another state"):
      checkpointer.save(7, states())
  assert list(restored) == ["generator", "discriminator"]
  for name in saved:
    assert_trees_equal(restored[name], saved[name])
  # Some of them, and into another stack of wrappers.
  other = {"generator": create([fs.EMA(0.5)], 3)}
  other = fs.checkpoint.restore(tmp_path, other)
  assert_trees_equal(other["generator"].params, saved["generator"].params)
  average = saved["generator"].wrapper_states["ema"]
  assert_trees_equal(other["generator"].wrapper_states["ema"], average)
  # A plain program reads a dict of plain states.
  plain = {name: s.without_wrappers() for name, s in saved.items()}
  with ocp.CheckpointManager(tmp_path) as manager:
    found = manager.restore(7, args=ocp.args.StandardRestore(plain))
  assert_trees_equal(jax.tree.map(np.asarray, found), plain)


@pytest.mark.parametrize(
  ("wanted", "error", "facts"),
  [
    (lambda: create([], 3), ValueError, ["step"]),
    (lambda: {"critic": create([], 4)}, ValueError, ["step"]),
    (lambda: {"generator": create([], 4)}, ValueError, ["params/w", "(4,)"]),
    (lambda: {"generator": {"w": jnp.ones(2)}}, TypeError, ["TrainState"]),
    (lambda: {}, TypeError, ["TrainState"]),
  ],
)
def test_mistakes(tmp_path, wanted, error, facts):
  with fs.Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(1, states())
    with pytest.raises(error) as e:
      checkpointer.restore(wanted())
  assert all(fact in str(e.value) for fact in facts), str(e.value)
