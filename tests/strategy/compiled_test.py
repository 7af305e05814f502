"""Compiled functions of a Strategy: how long they live, when they compile."""

import functools
import gc
import weakref

import compilations
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from regression import batch
from regression import create
from regression import sharded
from regression import train_step
from tree_equality import assert_trees_equal

import flaxshard as fs

STRATEGY = fs.Strategy(devices=jax.devices()[:2])
EIGHT = fs.Strategy()
ONES = np.ones(2, np.float32)


class Scale:
  """Has a method, and is not hashable."""

  __hash__ = None

  def __init__(self, factor):
    self.factor = factor

  def apply(self, x):
    return self.factor * x


def test_functions_and_their_closures_die():
  references = []
  gc.freeze()  # to collect new objects only, which is quick
  for _ in range(2):
    captured = Scale(3.0)
    fn = lambda x, captured=captured: captured.apply(x)
    step = lambda state, x, fn=fn: (state, fn(x))
    STRATEGY.run(fn, args=(ONES,))
    STRATEGY.jit(fn)(ONES)
    STRATEGY.run_steps(step, create(), ONES)
    references += [weakref.ref(x) for x in (fn, step, captured)]
    del fn, step, captured
  gc.collect()
  assert [ref() for ref in references] == [None] * 6


def triple(x):
  return 3.0 * x


SCALE = Scale(3.0)
PARTIAL = functools.partial(jnp.multiply, 3.0)


@pytest.mark.parametrize(
  # A method is a new object at each access.
  "get_fn",
  [lambda: triple, lambda: SCALE.apply, lambda: PARTIAL],
)
def test_second_run_does_not_compile(get_fn):
  batches = [sharded(STRATEGY, i) for i in range(3)]
  STRATEGY.run(get_fn(), args=(ONES,))
  state, _ = STRATEGY.run_steps(train_step, create(), batches)
  with compilations.count() as compiled:
    out = STRATEGY.run(get_fn(), args=(ONES,))
    STRATEGY.run_steps(train_step, state, batches)
    again = STRATEGY.jit(get_fn())(ONES)
  assert compiled.total == 0
  assert np.asarray(out).tolist() == [[3.0, 3.0]] * 2
  assert np.asarray(again).tolist() == [[3.0, 3.0]] * 2


def test_methods_of_two_objects_are_two_functions():
  outs = [STRATEGY.run(Scale(x).apply, args=(ONES,)) for x in (2.0, 5.0)]
  assert [float(out[0][0]) for out in outs] == [2.0, 5.0]


def callable_with(*slots):
  """Returns a class of callables, all of one size."""

  class Callable:
    __slots__ = ("factor", *slots)

    def __call__(self, x):
      return self.factor * x

  return Callable


def test_what_is_compiled_for_a_dead_callable_serves_no_other():
  # New callables get the addresses of dead ones, which were refused or called.
  refused = [callable_with("a")() for _ in range(8)]
  for fn in refused:
    with pytest.raises(TypeError, match="weak reference"):
      STRATEGY.run(fn, args=(ONES,))
  del fn, refused
  weakly_referred = callable_with("__weakref__")
  for first in (1.0, 100.0):
    fns = [weakly_referred() for _ in range(8)]
    for i, fn in enumerate(fns):
      fn.factor = first + i
      assert float(STRATEGY.run(fn, args=(ONES,)).value[0, 0]) == first + i
    del fn, fns


# -- Arguments. strategy_test.py has their shardings.


def test_lower_accepts_shapes_and_aliases_a_donated_state():
  state = create(EIGHT)
  step = EIGHT.jit(train_step, donate_argnums=0)
  lowered = step.lower(state, sharded(EIGHT, 0))
  size = sum(x.nbytes for x in jax.tree.leaves(state))
  compiled = lowered.compile()
  memory = compiled.memory_analysis()
  assert memory.alias_size_in_bytes == size
  assert memory.argument_size_in_bytes == size + (8 + 1) * 2 * 4

  shape_of = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
  shapes = (
    jax.tree.map(shape_of, state),
    EIGHT.shard_batch(jax.tree.map(shape_of, batch(0))),
  )
  assert step.lower(*shapes).as_text() == lowered.as_text()
  with pytest.raises(TypeError, match="ShapeDtypeStruct"):
    step(*shapes)
  # As of jax.jit, it takes the arguments of the step.
  wanted = step(create(EIGHT), sharded(EIGHT, 0))
  assert_trees_equal(compiled(state, sharded(EIGHT, 0)), wanted)
