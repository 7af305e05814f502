"""TrainState: equal to Flax's without wrappers; losses, gradients, updates."""

import copy
import pickle
from typing import Any

import compilations
import flax
from flax import core
from flax import linen as nn
from flax import struct
from flax.training import train_state as flax_train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from quadratic_states import create
from quadratic_states import make_params
from quadratic_states import quadratic
from tree_equality import assert_trees_close
from tree_equality import assert_trees_equal

import flaxshard as fs

DYNAMIC = (fs.LossScale("dynamic"),)


# Without wrappers it is Flax's class.


def program(state_class, **kwargs):
  """Returns the text of a lowered step, which is what XLA compiles."""
  state = state_class.create(
    apply_fn=None, params={"w": jnp.ones(2)}, tx=optax.adamw(0.1), **kwargs
  )
  # Flax's step is a Python int until the first update.
  state = state.replace(step=jnp.zeros((), jnp.int32))

  def step(state):
    loss_fn = lambda p: (p["w"] ** 2).mean()
    if isinstance(state, fs.TrainState):
      loss, grads = state.value_and_grad(loss_fn)
    else:
      loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss

  return jax.jit(step, donate_argnums=0).lower(state).as_text()


def test_step_without_wrappers_is_the_program_of_flax():
  bare = program(flax_train_state.TrainState)
  assert "tf.aliasing_output" in bare
  assert program(fs.TrainState) == bare
  # "auto" finds nothing to scale in float32: it is compiled away.
  assert program(fs.TrainState, wrappers=[fs.LossScale("auto")]) == bare
  assert program(fs.TrainState, wrappers=[fs.LossScale(8)]) != bare


def test_leaves_without_wrappers_are_those_of_flax():
  params, tx = make_params(), optax.adam(0.1)
  flax_state = flax_train_state.TrainState.create(
    apply_fn=None, params=params, tx=tx
  )
  ours = create(params=params, tx=tx)
  assert isinstance(ours, flax_train_state.TrainState)
  leaves, theirs = map(jax.tree.leaves_with_path, (ours, flax_state))
  assert [path for path, _ in leaves] == [path for path, _ in theirs]
  # Flax's serialization reads the bytes of the one into the other.
  given = flax.serialization.to_bytes(ours)
  restored = flax.serialization.from_bytes(flax_state, given)
  jax.tree.map(np.testing.assert_array_equal, restored, flax_state)


# The second step does not recompile.

FROM_EIGHT = fs.LossScale(fs.DynamicLossScale(8))


@pytest.mark.parametrize(
  ("wrappers", "param"),
  [
    ((), 2.0),
    ((FROM_EIGHT,), 2.0),
    ((fs.LossScale(8),), np.float32(2.0)),
    ((FROM_EIGHT,), np.float16(2.0)),
  ],
)
def test_second_step_does_not_recompile(wrappers, param):
  # A Python number is weakly typed; step is a Python int in Flax.
  state = create(wrappers, tx=optax.adam(0.5), params={"w": param})
  types = jax.tree.map(jax.typeof, state)
  assert not any(x.weak_type for x in jax.tree.leaves(state))
  step = jax.jit(lambda s: s.minimize(lambda p: (p["w"] ** 2).sum())[0])
  state = step(state)
  with compilations.count() as compiled:
    state = step(step(state))
  assert compiled.total == 0
  # Slots of float16 parameters stay float16, too.
  assert jax.tree.map(jax.typeof, state) == types
  # Adam's steps are as long as the learning rate while the gradients agree.
  assert float(state.params["w"]) == pytest.approx(0.5, abs=0.1)


# Updates.


def test_different_paths_with_the_same_string():
  params = {"a/b": jnp.zeros(1), "a": {"b": jnp.zeros(1)}}
  state = create(DYNAMIC, params=params)
  grads = {"a": {"b": jnp.ones(1)}, "a/b": jnp.full(1, 2.0)}
  new = jax.jit(lambda s, g: s.apply_gradients(grads=g))(state, grads)
  assert float(new.params["a"]["b"][0]) == -0.5
  assert float(new.params["a/b"][0]) == -1.0
  for short in ({"a": {"b": jnp.ones(1)}}, {"a/b": jnp.ones(1)}):
    with pytest.raises(ValueError, match="a/b"):
      state.apply_gradients(grads=short)
  # One of them without a gradient is that one alone.
  new = state.apply_gradients(grads={"a": {"b": None}, "a/b": jnp.ones(1)})
  assert float(new.params["a"]["b"][0]) == 0.0
  assert float(new.params["a/b"][0]) == -0.5


def test_shared_buffers_are_donated_safely():
  x, key = jnp.ones(3), jax.random.key(7)
  # As with Lookahead and averages, whose slots are the parameters at first.
  anchored = optax.GradientTransformation(
    lambda params: params, lambda updates, anchor, params: (updates, anchor)
  )
  state = create(
    DYNAMIC,
    tx=anchored,
    params={"a": x, "b": x},
    batch_stats={"m": x},
    rngs={"a": key, "b": key},
  )
  loss_fn = lambda p: (p["a"] * 2 + p["b"]).sum()
  step = jax.jit(lambda s: s.minimize(loss_fn)[0], donate_argnums=0)
  state = step(step(state))
  np.testing.assert_array_equal(state.params["a"], [5] * 3)
  np.testing.assert_array_equal(state.params["b"], [3] * 3)
  for untouched in (state.opt_state["a"], state.batch_stats["m"]):
    np.testing.assert_array_equal(untouched, [1] * 3)
  for name in ("a", "b"):
    assert jax.random.key_data(state.rngs[name]).tolist() == [0, 7]


# Subclasses and copies.


class EmaState(fs.TrainState):
  """A subclass as users write it, with a default and a static field."""

  ema: Any = None
  note: str = struct.field(pytree_node=False, default="none")


def _init(params):
  return jax.tree.map(jnp.zeros_like, params)


def _update(updates, state, params=None):
  return jax.tree.map(jnp.negative, updates), updates


# Pickle finds these functions by name; those inside optax have none.
TX = optax.GradientTransformation(_init, _update)


def create_ema_state():
  return EmaState.create(
    apply_fn=create,
    params=make_params(),
    tx=TX,
    wrappers=DYNAMIC,
    ema=np.float32(1.0),
    note="first",
    batch_stats=core.freeze({"m": {"mean": np.zeros(2, np.float32)}}),
  )


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_fields_keep_containers_and_types_or_are_held_back(jit):
  state = create_ema_state()
  assert isinstance(state, EmaState) and state.note == "first"

  @jit
  def step(state, grads):
    return state.apply_gradients(
      grads=grads,
      batch_stats={"m": {"mean": jnp.full(2, 7.0)}},
      ema=2.0,  # a weak type
      note="later",
    )

  good = step(state, state.params)
  np.testing.assert_array_equal(good.params["w"], [0.0, 0.0])
  bad = step(state, jax.tree.map(lambda p: p * jnp.nan, state.params))
  for new, updates, mean, ema in ((good, 1, 7, 2), (bad, 0, 0, 1)):
    assert new.note == "later"
    types = jax.tree.map(jax.typeof, new.replace(note="first"))
    assert types == jax.tree.map(jax.typeof, state)
    np.testing.assert_array_equal(new.batch_stats["m"]["mean"], [mean] * 2)
    assert (int(new.step), float(new.ema)) == (updates, ema)


@pytest.mark.parametrize(
  "copied",
  [
    lambda state: pickle.loads(pickle.dumps(state)),
    copy.deepcopy,
    lambda state: flax.serialization.from_bytes(
      create_ema_state(), flax.serialization.to_bytes(state)
    ),
  ],
  ids=["pickle", "deepcopy", "msgpack"],
)
def test_copies_are_equal_and_train_on(copied):
  step = jax.jit(lambda s: s.minimize(quadratic)[0])
  state = step(create_ema_state())
  same = copied(state)
  # The structure has the class, and static fields such as `note`.
  assert jax.tree.structure(same) == jax.tree.structure(state)
  assert_trees_equal(same, state)
  wanted = step(state)
  with compilations.count() as compiled:
    new = step(same)
  assert compiled.total == 0
  assert_trees_equal(new, wanted)
  # Without wrappers it is a state that was created without.
  plain = same.without_wrappers()
  assert_trees_equal(plain, state.without_wrappers())
  assert plain.wrappers == () and len(jax.tree.leaves(plain)) == 7


class MetricsState(fs.TrainState):
  # As in Flax's examples. It hides the method `metrics`.
  metrics: Any
  key: Any


def test_subclass_with_a_field_named_metrics():
  kwargs = dict(apply_fn=None, params=make_params(), tx=optax.sgd(0.5))
  kwargs["wrappers"] = [fs.LossScale(8)]
  state = MetricsState.create(**kwargs, metrics={"loss": 1.0}, key=jnp.zeros(2))
  new, _ = state.minimize(quadratic)
  assert float(new.metrics["loss"]) == 1.0
  with pytest.raises(TypeError, match="metrics"):
    MetricsState.create(**kwargs, key=jnp.zeros(2))


def test_fp8_module_trains_and_updates_its_statistics():
  x = jnp.full((4, 16), 3.0)
  state = fs.create_train_state(
    nn.Dense(4, dot_general_cls=nn.Fp8DirectDotGeneralOp),
    jax.random.key(0),
    x,
    optax.sgd(0.1),
    wrappers=[fs.LossScale(1024.0)],
  )
  loss_fn = lambda variables: (state.apply_fn(variables, x) ** 2).mean()
  new, _ = jax.jit(lambda s: s.minimize(loss_fn))(state)
  before, after = (
    np.asarray(x)
    for s in (state, new)
    for path, x in jax.tree.leaves_with_path(s.params)
    if "input_amax_history" in jax.tree_util.keystr(path)
  )
  assert (before == 0).all()
  # The largest input, neither scaled nor taken off with a learning rate.
  assert after.max() == 3.0
  kernel = lambda s: np.asarray(s.params["params"]["kernel"])
  assert (kernel(new) != kernel(state)).any()


# Optimizers whose update takes more than gradients.

AGN = fs.AGN(2, commit="mean")
PARAMS = {"w": np.array([1, -2], "f"), "b": np.float32(0.5)}


def distance(params, scale=1.0):
  return sum((scale * (p - 0.25) ** 2).sum() for p in jax.tree.leaves(params))


def optax_steps(tx, params, steps):
  """Returns the parameters that optax alone computes."""
  opt_state = tx.init(params)

  @jax.jit
  def step(params, opt_state):
    value, grads = jax.value_and_grad(distance)(params)
    extra = dict(value=value, grad=grads, value_fn=distance)
    updates, opt_state = optax.with_extra_args_support(tx).update(
      grads, opt_state, params, **extra
    )
    return optax.apply_updates(params, updates), opt_state

  for _ in range(steps):
    params, opt_state = step(params, opt_state)
  return params


def minimize(state):
  """Passes what the optimizer uses."""
  return state.minimize(distance)[0]


def apply_with_extra_arguments(state):
  value, grads = state.value_and_grad(distance)
  return state.apply_gradients(
    grads=grads, value=value, grad=grads, value_fn=distance
  )


PLATEAU = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau())
EXTRA = {
  # Compiles faster than the default line search, and takes the same arguments.
  "lbfgs": optax.lbfgs(
    memory_size=1, linesearch=optax.scale_by_backtracking_linesearch(3)
  ),
  "polyak_sgd": optax.polyak_sgd(),
  "reduce_on_plateau": PLATEAU,
}


@pytest.mark.parametrize(
  ("wrappers", "step"),
  [
    pytest.param((), apply_with_extra_arguments, marks=pytest.mark.slow),
    (DYNAMIC, minimize),
  ],
  ids=["apply_gradients", "minimize"],
)
@pytest.mark.parametrize("tx", EXTRA.values(), ids=EXTRA)
def test_extra_arguments_are_those_of_optax(tx, wrappers, step):
  state, step = create(wrappers, tx, PARAMS), jax.jit(step)
  for _ in range(3):
    state = step(state)
  assert_trees_close(state.params, optax_steps(tx, PARAMS, 3), atol=1e-5)
  assert state.tx is tx


@pytest.mark.parametrize("wrapper", [*DYNAMIC, AGN])
def test_value_is_averaged_over_replicas(wrapper):
  strategy = fs.Strategy()
  scales = jnp.arange(8.0)

  def step(state, scale):
    for _ in range(2):  # an AGN commit
      state, _ = state.minimize(distance, scale.mean())
    return state

  state = create([wrapper], PLATEAU, PARAMS, strategy=strategy)
  # `run` raises if the replicas would get different states.
  state = strategy.run(step, args=(state, strategy.shard_batch(scales)))
  best = lambda opt_state: optax.tree.get(opt_state, "best_value")
  if "agn" in state.wrapper_states:
    # Its local steps take the loss of their replica.
    local = best(state.wrapper_states["agn"].local_opt_state)
    assert len(np.unique(local)) > scales.size // 2
  else:
    first = float(distance(PARAMS, scales.mean()))
    assert 0 < float(best(state.opt_state)) < first


@pytest.mark.parametrize("wrappers", [(), DYNAMIC, (AGN,)])
def test_a_state_that_grows_at_the_first_update(wrappers):
  norm = optax.tree.norm
  tx = optax.chain(optax.monitor({"norm": norm}), PLATEAU)
  state, step = create(wrappers, tx, PARAMS), jax.jit(minimize)
  structure = jax.tree.structure(state)
  for _ in range(2):
    state = step(state)
  assert jax.tree.structure(state) == structure
  opt_state = state.opt_state
  if "agn" in state.wrapper_states:
    opt_state = state.wrapper_states["agn"].local_opt_state
  wanted = norm(jax.grad(distance)(optax_steps(tx, PARAMS, 1)))
  got = jnp.ravel(optax.tree.get(opt_state, "norm"))
  assert_trees_close(got, wanted[None], atol=1e-6)
