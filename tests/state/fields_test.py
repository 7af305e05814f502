"""Fields of train states, and classes with further fields."""

import copy
import pickle
from typing import Any

import compilations
from flax import struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs
from flaxshard.state import fields as fields_lib


def _init(params):
  return {"trace": jax.tree.map(jnp.zeros_like, params)}


def _update(updates, state, params=None):
  del params
  trace = jax.tree.map(lambda t, u: 0.5 * t + u, state["trace"], updates)
  return jax.tree.map(lambda t: -t, trace), {"trace": trace}


# Pickle finds these functions by name; those inside optax have none.
TX = optax.GradientTransformation(_init, _update)


def apply_fn(variables, x):
  return variables["params"]["w"] * x


class Declared(fs.TrainState):
  """A subclass with an array field and a static field."""

  ema: Any = None
  note: str = struct.field(pytree_node=False, default="none")


def create(cls=fs.TrainState, wrappers=(), **collections):
  return cls.create(
    apply_fn=apply_fn,
    params={"w": jnp.array([1.0, -2.0])},
    tx=TX,
    wrappers=wrappers,
    **collections,
  )


STATES = {
  "plain": {},
  "both": {
    "wrappers": [fs.LossScale(fs.DynamicLossScale(8.0, hysteresis=2))],
    "batch_stats": {"m": np.full(2, 3.0, np.float32)},
    "ema_params": {"w": np.zeros(2, np.float32)},
  },
  "subclass": {
    "cls": Declared,
    "wrappers": [fs.LossScale("dynamic")],
    "ema": {"w": np.zeros(2, np.float32)},
    "note": "first",
    "cache": {"m": np.full(2, 3.0, np.float32)},
  },
}
COPIES = {
  "pickle": lambda state: pickle.loads(pickle.dumps(state)),
  "deepcopy": copy.deepcopy,
}


@jax.jit
def take_step(state):
  return state.minimize(lambda p: (p["w"] ** 2).sum())[0]


@pytest.mark.parametrize(
  ("kind", "how"),
  [("plain", "pickle"), ("both", "deepcopy"), ("subclass", "pickle")],
)
def test_pickled_and_copied_states_are_equal(kind, how):
  state = take_step(create(**STATES[kind]))
  same = COPIES[how](state)
  assert type(same) is type(state)
  assert jax.tree.structure(same) == jax.tree.structure(state)
  names = fields_lib.fields_by_name(type(state))
  assert list(fields_lib.fields_by_name(type(same))) == list(names)
  for name in fields_lib.array_field_names(state):
    old, new = getattr(state, name), getattr(same, name)
    assert jax.tree.structure(new) == jax.tree.structure(old)
    for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True):
      assert a.dtype == b.dtype
      np.testing.assert_array_equal(a, b)
  assert same.wrappers == state.wrappers
  assert same.apply_fn is apply_fn
  assert int(same.step) == 1
  assert isinstance(same, STATES[kind].get("cls", fs.TrainState))
  if kind == "subclass":
    assert same.note == "first"
  # The copy trains like the original.
  b = take_step(state)
  with compilations.count() as compiled:
    a = take_step(same)
  assert compiled.total == 0
  np.testing.assert_array_equal(a.params["w"], b.params["w"])
  np.testing.assert_array_equal(
    a.opt_state["trace"]["w"], b.opt_state["trace"]["w"]
  )
  assert int(a.step) == 2


def test_without_wrappers_is_equal_to_a_state_created_without():
  stats = {"m": np.full(2, 3.0, np.float32)}
  plain = create(batch_stats=stats)
  state = create(wrappers=[fs.LossScale(8)], batch_stats=stats)
  bare = state.without_wrappers()
  assert bare.wrappers == ()
  assert fields_lib.array_field_names(bare) == fields_lib.array_field_names(
    plain
  )
  assert type(bare) is type(plain)
  assert jax.tree.structure(bare) == jax.tree.structure(plain)
  same = pickle.loads(pickle.dumps(bare))
  np.testing.assert_array_equal(same.batch_stats["m"], stats["m"])
  assert "wrapper_states" not in fields_lib.array_field_names(same)
