"""Lifetime of functions in Strategy, and the number of compilations."""

import dataclasses
import functools
import gc
import warnings
import weakref

import compilations
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs
from flaxshard.strategy.function_cache import FunctionCache

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


@pytest.mark.filterwarnings("ignore:run. the function")
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


def test_a_compiled_function_keeps_its_function():
  x = captured()
  run = STRATEGY.jit(lambda y: y + np.asarray(x))
  gc.collect()
  assert np.asarray(run(ONES)).tolist() == [[2.0, 2.0]] * 2


class Model:
  """Has methods, and is not hashable."""

  __hash__ = None

  def __eq__(self, other):
    return True

  def scale(self, x):
    return self.factor * x

  def __init__(self, factor):
    self.factor = factor


@dataclasses.dataclass(frozen=True)
class Scale:
  factor: float

  def __call__(self, x):
    return self.factor * x


class Slots:
  """Allows no weak references."""

  __slots__ = ()

  def __call__(self, x):
    return 3.0 * x


def step(state, x):
  return state.minimize(lambda p: (p["w"] * x).mean())


def triple(x):
  return 3.0 * x


MODEL = Model(3.0)
PARTIAL = functools.partial(jnp.multiply, 3.0)
SLOTS = Slots()
EQUAL = Scale(3.0)


@pytest.mark.parametrize(
  "get_fn",
  [
    lambda: triple,
    lambda: MODEL.scale,  # a new object at each access
    lambda: Scale(3.0),  # equal to EQUAL, which is alive
    lambda: PARTIAL,
    lambda: SLOTS,
  ],
  ids=["function", "method", "equal", "partial", "slots"],
)
def test_second_run_does_not_compile(get_fn):
  STRATEGY.run(EQUAL if get_fn() == EQUAL else get_fn(), args=(ONES,))
  with compilations.count() as compiled:
    out = STRATEGY.run(get_fn(), args=(ONES,))
    again = STRATEGY.jit(get_fn())(ONES)
  assert compiled.total == 0
  assert np.asarray(out).tolist() == [[3.0, 3.0]] * 2
  assert np.asarray(again).tolist() == [[3.0, 3.0]] * 2


def test_second_run_steps_does_not_compile():
  state = new_state()
  state, _ = STRATEGY.run_steps(step, state, ONES, reduce="mean")
  with compilations.count() as compiled:
    STRATEGY.run_steps(step, state, ONES, reduce="mean")
  assert compiled.total == 0


def test_methods_of_two_objects_are_two_functions():
  outs = [STRATEGY.run(Model(x).scale, args=(ONES,)) for x in (2.0, 5.0)]
  assert [float(out[0][0]) for out in outs] == [2.0, 5.0]


def test_entry_of_a_method_dies_with_its_object():
  cache = FunctionCache(lambda: object())
  model = Model(1.0)
  assert cache.get(model.scale) is cache.get(model.scale)
  assert len(cache) == 1
  del model
  gc.collect()
  assert len(cache) == 0


def test_equal_function_is_called_after_the_first_one_died():
  first, second = Scale(4.0), Scale(4.0)
  run = STRATEGY.jit(first)
  other = STRATEGY.jit(second)
  run(ONES)
  del first, run
  gc.collect()
  # A new shape is traced again, with a function that is alive.
  out = other(np.ones(3, np.float32))
  assert np.asarray(out).tolist() == [[4.0] * 3] * 2


def double(x, power=1):
  return 2 * x**power


def test_new_lambda_in_a_loop_warns_once_with_its_name():
  with pytest.warns(UserWarning) as caught:
    for i in range(5):
      STRATEGY.run(lambda x: double(x, i), args=(ONES,))  # noqa: B023
  (warning,) = caught
  message = str(warning.message)
  assert "<lambda>" in message and f"{__file__}:" in message
  assert "third time" in message and "outside of the loop" in message
  assert warning.filename == __file__


def test_new_partial_in_a_loop_of_run_steps_warns():
  with pytest.warns(UserWarning, match="call_with_state .*third time"):
    for _ in range(3):
      call_run_steps(double)


def test_functions_that_are_called_again_do_not_warn():
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    for i in range(4):
      step = lambda x, i=i: double(x, i)
      for _ in range(2):
        STRATEGY.run(step, args=(ONES,))


def test_functions_of_several_trainings_do_not_warn():
  def train(power):
    step = lambda x: double(x, power)
    for _ in range(2):
      STRATEGY.run(step, args=(ONES,))
    # Called once in each training, after a step that is called repeatedly.
    STRATEGY.run(lambda x: x + double(x), args=(ONES,))

  with warnings.catch_warnings():
    warnings.simplefilter("error")
    for power in range(4):
      train(power)


def test_new_lambda_beside_a_step_that_is_called_again_warns():
  step = lambda x: double(x)
  with pytest.warns(UserWarning, match="<lambda>.*third time"):
    for i in range(4):
      STRATEGY.run(step, args=(ONES,))
      STRATEGY.run(lambda x: double(x) - i, args=(ONES,))  # noqa: B023


def test_functions_that_are_kept_do_not_warn():
  steps = [lambda x, i=i: double(x, i) for i in range(4)]
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    for step in steps:
      STRATEGY.run(step, args=(ONES,))


def test_one_function_of_several_strategies_does_not_warn():
  function = lambda x: double(x, 3)
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    for i in range(4):
      strategy = fs.Strategy(devices=jax.devices()[i : i + 1])
      strategy.run(function, args=(ONES,))


def test_functions_that_capture_other_functions_do_not_warn():
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    for fn in (jnp.sin, jnp.cos, jnp.tan, jnp.exp):
      STRATEGY.run(lambda x: fn(x), args=(ONES,))  # noqa: B023


def test_function_that_raises_is_not_counted_as_compiled():
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    for _ in range(4):
      with pytest.raises(ZeroDivisionError):
        STRATEGY.run(lambda x: x / (1 // 0), args=(ONES,))
