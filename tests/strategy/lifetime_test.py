"""Lifetime of functions in Strategy, and the number of compilations."""

import functools
import gc
import weakref

import compilations
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs

STRATEGY = fs.Strategy(devices=jax.devices()[:2])
ONES = np.ones(2, np.float32)


@pytest.fixture(autouse=True)
def collect_only_new_objects():
  """Keeps `gc.collect` fast in a process with many objects of JAX."""
  gc.freeze()
  yield
  gc.unfreeze()


class Captured(np.ndarray):
  """An array that a function captures; it allows weak references."""


def captured():
  return np.ones(2, np.float32).view(Captured)


def new_state():
  return fs.TrainState.create(
    apply_fn=None, params={"w": jnp.ones(())}, tx=optax.sgd(0.5)
  )


def call_run(fn):
  STRATEGY.run(fn, args=(ONES,))


def call_jit(fn):
  STRATEGY.jit(fn)(ONES)


def call_run_steps(fn):
  state = new_state()
  step = functools.partial(call_with_state, fn)
  STRATEGY.run_steps(step, state, ONES, reduce="mean")


def call_with_state(fn, state, x):
  return state, fn(x)


@pytest.mark.parametrize("call", [call_run, call_jit, call_run_steps])
def test_functions_and_their_closures_die(call):
  references = []
  for _ in range(2):
    x = captured()
    fn = lambda y, x=x: y + np.asarray(x)
    call(fn)
    references += [weakref.ref(fn), weakref.ref(x)]
    del fn, x
  gc.collect()
  assert [ref() for ref in references] == [None] * 4


class Model:
  """Has methods, and is not hashable."""

  __hash__ = None

  def __eq__(self, other):
    return True

  def scale(self, x):
    return self.factor * x

  def __init__(self, factor):
    self.factor = factor


def step(state, x):
  return state.minimize(lambda p: (p["w"] * x).mean())


def triple(x):
  return 3.0 * x


MODEL = Model(3.0)
PARTIAL = functools.partial(jnp.multiply, 3.0)


@pytest.mark.parametrize(
  "get_fn",
  [
    lambda: triple,
    lambda: MODEL.scale,  # a new object at each access
    lambda: PARTIAL,
  ],
  ids=["function", "method", "partial"],
)
def test_second_run_does_not_compile(get_fn):
  STRATEGY.run(get_fn(), args=(ONES,))
  state, _ = STRATEGY.run_steps(step, new_state(), ONES, reduce="mean")
  with compilations.count() as compiled:
    out = STRATEGY.run(get_fn(), args=(ONES,))
    STRATEGY.run_steps(step, state, ONES, reduce="mean")
    again = STRATEGY.jit(get_fn())(ONES)
  assert compiled.total == 0
  assert np.asarray(out).tolist() == [[3.0, 3.0]] * 2
  assert np.asarray(again).tolist() == [[3.0, 3.0]] * 2


def test_methods_of_two_objects_are_two_functions():
  outs = [STRATEGY.run(Model(x).scale, args=(ONES,)) for x in (2.0, 5.0)]
  assert [float(out[0][0]) for out in outs] == [2.0, 5.0]
