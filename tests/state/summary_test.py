"""`repr` of a train state: shapes and dtypes on a page, no values."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs


def create(params, tx=None, **kwargs):
  tx = tx or optax.sgd(0.1)
  return fs.TrainState.create(apply_fn=None, params=params, tx=tx, **kwargs)


@pytest.fixture(scope="module")
def many_params():
  """40 layers of 4 MB in all: printed whole, they fill 2,000 lines."""
  shape = {"kernel": np.zeros((128, 128), np.float32)}
  return {
    f"layer{i}": {**shape, "bias": np.zeros(128, np.float32)} for i in range(40)
  }


def test_repr_shows_each_small_tree_and_the_wrappers():
  state = create(
    {"dense": {"bias": jnp.zeros(3), "kernel": jnp.ones((2, 3))}},
    optax.adam(0.1),
    wrappers=[fs.LossScale("dynamic")],
    batch_stats={"mean": jnp.zeros(3, jnp.bfloat16)},
  )
  lines = repr(state).splitlines()
  assert lines[0] == "TrainState("
  assert "  step=int32[] 0," in lines
  assert "  params: 2 arrays of float32, 9 elements, 36 B" in lines
  assert "    dense/kernel  float32[2,3]" in lines
  assert "    0/mu/dense/kernel  float32[2,3]" in lines
  assert "    loss_scale/scale          float32[] 32768.0" in lines
  assert "    mean  bfloat16[3]" in lines
  (wrapper,) = [line for line in lines if "LossScale(" in line]
  assert wrapper.startswith("    LossScale(scale='dynamic'")
  # Functions without their addresses, which differ in every run.
  assert "0x" not in repr(state)


@pytest.mark.slow
def test_repr_of_a_large_state_with_wrappers_is_a_page(many_params):
  state = create(
    many_params,
    optax.adamw(1e-3),
    wrappers=[fs.LossScale("dynamic"), fs.AGN()],
    batch_stats=many_params,
  )
  lines = repr(state).splitlines()
  assert len(lines) <= 60
  assert max(map(len, lines)) <= 100
  assert "    ... and 30 more" in lines
  text = repr(state)
  assert "agn/grad_accum" in text
  assert "loss_scale/skipped_steps" in text
  assert "batch_stats: 80 arrays" in text


def test_repr_of_the_apply_fn_is_short():
  model = nn.Sequential([nn.Dense(2) for _ in range(30)])
  params = {"w": jnp.ones(2)}
  state = fs.TrainState.create(
    apply_fn=model.apply, params=params, tx=optax.identity()
  )
  assert "  apply_fn=Sequential.apply," in repr(state).splitlines()


def test_repr_of_tracers_and_abstract_states_has_no_values():
  state = create({"w": jnp.ones((2, 3))})
  seen = []
  jax.jit(lambda s: seen.append(repr(s)))(state)
  abstract = repr(jax.eval_shape(lambda: state))
  assert seen == [abstract]
  assert abstract == repr(state).replace("int32[] 0", "int32[]")


def test_repr_of_a_donated_state_says_that_it_is_deleted():
  state = create({"w": jnp.ones(2)})
  jax.jit(lambda s: s.replace(step=s.step + 1), donate_argnums=0)(state)
  assert "step=int32[], deleted," in repr(state)
  assert "w  float32[2], deleted" in repr(state)


def test_repr_of_trees_of_other_things():
  state = create({"w": jnp.ones(2), "b": jnp.ones(())})
  ranks = repr(jax.tree.map(lambda x: f"rank {x.ndim}", state))
  assert "params: 2 leaves of type str" in ranks
  assert "w  'rank 1'" in ranks
  nothing = repr(jax.tree.map(lambda x: None, state))
  assert "step=None," in nothing
  assert "params={'b': None, 'w': None}," in nothing
  key = create({"w": jnp.ones(2)}, rngs={"key": jax.random.key(0)})
  assert "key  key<fry>[]" in repr(key)


def test_repr_allows_no_implicit_transfer():
  state = create({"w": jnp.ones(2)})
  with jax.transfer_guard("disallow"):
    assert "step=int32[] 0," in repr(state)


def test_repr_of_a_subclass_has_its_name_and_fields():
  class WithEma(fs.TrainState):
    ema: dict

  state = WithEma.create(
    apply_fn=None,
    params={"w": jnp.ones(2)},
    tx=optax.identity(),
    ema={"w": jnp.ones(2)},
  )
  assert repr(state).startswith("WithEma(")
  assert "  ema: 1 array of float32, 2 elements, 8 B" in repr(state)


def test_a_subclass_may_have_a_repr_of_its_own():
  class Short(fs.TrainState):
    def __repr__(self):
      return "short"

  state = Short.create(
    apply_fn=None, params={"w": jnp.ones(2)}, tx=optax.identity()
  )
  assert repr(state) == "short"
