"""Strategy.jit: how often it compiles, donation and lowering."""

import warnings

import compilations
import jax
import pytest
from regression import create
from regression import loss_fn
from regression import sharded
from regression import split
from regression import train_step

import flaxshard as fs

P = jax.sharding.PartitionSpec

EIGHT = fs.Strategy()
SPLIT = fs.Strategy(mesh_shape={"replica": 2, "model": 4})
ONE = fs.Strategy(devices=jax.devices()[:1])


def counting_step():
  """Returns a train step that counts how often it is traced."""

  def step(state, batch):
    step.traces += 1
    return state.minimize(loss_fn, batch)

  step.traces = 0
  return step


@pytest.mark.parametrize(
  ("strategy", "spec", "donate"),
  [
    (EIGHT, None, 0),
    (EIGHT, P(None, "replica"), ()),
    (SPLIT, P(("replica", "model")), 0),
    (ONE, P("replica"), 0),
  ],
)
def test_steps_compile_once(strategy, spec, donate):
  state = create()  # on one device
  if spec is not None:
    state = split(create(strategy), strategy.mesh, spec)
  step = counting_step()
  run = strategy.jit(step, donate_argnums=donate)
  with warnings.catch_warnings():
    warnings.simplefilter("error")  # such as that donated buffers are not used
    state, _ = run(state, sharded(strategy, 0))
    with compilations.count() as compiled:
      for i in (1, 2):
        before = state
        state, _ = run(state, sharded(strategy, i))
        assert before.params["w1"].is_deleted() == (donate == 0)
  assert compiled.total == 0
  assert step.traces == 1 and int(state.step) == 3


def test_donated_state_is_aliased():
  state = create(EIGHT)
  args = state, sharded(EIGHT, 0)
  size = sum(x.nbytes for x in jax.tree.leaves(state))
  lowered = EIGHT.jit(train_step, donate_argnums=0).lower(*args)
  memory = lowered.compile().memory_analysis()
  assert memory.alias_size_in_bytes == size
  assert memory.argument_size_in_bytes == size + (8 + 1) * 2 * 4


def test_lower_accepts_shape_dtype_structs():
  args = create(EIGHT), sharded(EIGHT, 0)
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), args
  )
  step = EIGHT.jit(train_step)
  assert step.lower(*shapes).as_text() == step.lower(*args).as_text()
  with pytest.raises(TypeError, match="ShapeDtypeStruct"):
    step(*shapes)


# A state that was not on the mesh shares its memory with the one that is.
@pytest.mark.parametrize("strategy", [EIGHT, None])
def test_donated_argument_raises(strategy):
  step, state = EIGHT.jit(train_step, donate_argnums=0), create(strategy)
  step(state, sharded(EIGHT, 0))
  with pytest.raises(ValueError, match="argument 0/step is deleted"):
    step(state, sharded(EIGHT, 0))
