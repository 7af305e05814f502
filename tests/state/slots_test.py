"""Slots by parameter and name, and all variables of optimizer and wrappers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from quadratic_states import create
from quadratic_states import make_params
from quadratic_states import quadratic

import flaxshard as fs

RATE = 0.1


@pytest.mark.parametrize(
  ("tx", "names"),
  [
    pytest.param(optax.sgd(RATE), [], id="sgd"),
    pytest.param(optax.sgd(RATE, momentum=0.9), ["momentum"], id="momentum"),
    pytest.param(optax.adam(RATE), ["m", "v"], id="adam"),
    pytest.param(optax.amsgrad(RATE), ["m", "v", "vhat"], id="amsgrad"),
    pytest.param(
      optax.rmsprop(RATE, momentum=0.9), ["momentum", "rms"], id="rmsprop"
    ),
    pytest.param(
      optax.rmsprop(RATE, centered=True), ["mg", "rms"], id="centered"
    ),
    pytest.param(optax.adagrad(RATE), ["accumulator"], id="adagrad"),
    pytest.param(
      optax.adadelta(RATE), ["accum", "accum_update"], id="adadelta"
    ),
    pytest.param(
      optax.adafactor(RATE), ["v", "v_col", "v_row"], id="adafactor"
    ),
    pytest.param(
      optax.lbfgs(),
      [
        "diff_params_memory",
        "diff_updates_memory",
        "grad",
        "params",
        "updates",
      ],
      id="lbfgs",
    ),
    pytest.param(
      optax.inject_hyperparams(optax.adam)(RATE), ["m", "v"], id="inject"
    ),
    pytest.param(
      optax.MultiSteps(optax.adam(RATE), 2),
      ["acc_grads", "m", "v"],
      id="multi_steps",
    ),
    pytest.param(
      optax.masked(optax.trace(0.9), {"w": True, "b": False}),
      ["momentum"],
      id="masked",
    ),
    pytest.param(
      optax.chain(optax.trace(0.9), optax.clip(1.0), optax.trace(0.5)),
      ["0/momentum", "2/momentum"],
      id="chain",
    ),
    pytest.param(fs.freeze(optax.adam(RATE), ["^b/"]), ["m", "v"], id="freeze"),
    pytest.param(
      fs.scale_learning_rates(optax.adam(RATE), [("^b/", 2.0)]),
      ["m", "v"],
      id="rates",
    ),
  ],
)
def test_names(tx, names):
  state = create(tx=tx)
  assert state.get_slot_names() == names
  for name in names:
    slot = state.get_slot("w", name)
    assert slot.shape[-1:] in ((2,), (1,))  # (1,): Adafactor without factors
    found = [x for x in state.variables().values() if x is slot]
    assert len(found) == 1


def test_values_by_any_name():
  state = create(tx=optax.adam(RATE, b1=0.75, b2=0.5))
  state, _ = jax.jit(lambda s: s.minimize(quadratic))(state)
  gradient = 2 * make_params()["w"]
  for name in ("m", "mu", "0/m", "0/mu"):
    np.testing.assert_allclose(state.get_slot("w", name), 0.25 * gradient)
  w = state.params["w"]
  np.testing.assert_allclose(state.get_slot(w, "v"), 0.5 * gradient**2)
  assert list(state.variables()) == [
    "opt_state/0/count",
    "opt_state/0/mu/b/c",
    "opt_state/0/mu/w",
    "opt_state/0/nu/b/c",
    "opt_state/0/nu/w",
  ]


def test_two_slots_of_one_name():
  state = create(tx=optax.chain(optax.trace(0.9), optax.trace(0.5)))
  for name, i in (("0/momentum", 0), ("1/trace", 1)):
    assert state.get_slot("w", name) is state.opt_state[i].trace["w"]
  with pytest.raises(ValueError, match="'0/momentum', '1/momentum'"):
    state.get_slot("w", "momentum")


def test_parameters_of_different_optimizers():
  tx = optax.partition(
    {"slow": optax.adam(RATE), "fast": optax.sgd(RATE, momentum=0.9)},
    {"w": "slow", "b": {"c": "fast"}},
  )
  state = create(tx=tx)
  assert state.get_slot_names() == ["m", "momentum", "v"]
  assert state.get_slot("w", "m").shape == (2,)
  assert state.get_slot("b/c", "m") is None
  assert state.get_slot("w", "momentum") is None


def test_frozen_parameter_has_none():
  state = create(tx=fs.freeze(optax.adam(RATE), ["^b/"]))
  assert state.get_slot("w", "v") is not None
  assert state.get_slot("b/c", "v") is None


def test_lookahead():
  params = optax.LookaheadParams.init_synced(make_params())
  tx = optax.lookahead(optax.adam(RATE), 2, 0.5)
  state = create(tx=tx, params=params)
  assert state.get_slot_names() == ["m", "v"]
  assert state.get_slot(state.params.fast["w"], "m").shape == (2,)


def test_wrappers():
  state = create(
    tx=optax.sgd(RATE, momentum=0.9),
    wrappers=[fs.LossScale("dynamic"), fs.AGN(2)],
  )
  assert state.get_slot_names() == [
    "agn/grad_accum",
    "agn/local_params",
    "agn/momentum",
    "momentum",
  ]
  state, _ = jax.jit(lambda s: s.minimize(quadratic))(state)
  gradient = 2 * make_params()["w"]
  # The center has its first update at the commit; replicas have an axis.
  np.testing.assert_array_equal(state.get_slot("w", "momentum"), [0, 0])
  for name in ("agn/momentum", "agn/local_opt_state/0/trace"):
    np.testing.assert_allclose(state.get_slot("w", name), gradient[None])
  np.testing.assert_allclose(
    state.get_slot("w", "agn/grad_accum"), gradient[None]
  )
  variables = state.variables()
  assert int(variables["wrapper_states/agn/local_step"]) == 1
  assert "wrapper_states/loss_scale/scale" in variables
  assert len(variables) == len(
    jax.tree.leaves((state.opt_state, dict(state.wrapper_states)))
  )


def test_average_and_accumulator():
  state = create(tx=optax.adam(RATE), wrappers=[fs.EMA(0.5), fs.Accumulate(2)])
  names = state.get_slot_names()
  assert [n for n in names if "/" not in n] == ["m", "v"]
  assert {n.partition("/")[0] for n in names if "/" in n} == {
    "accumulate",
    "ema",
  }


def test_inside_jit():
  state = create(tx=optax.adam(RATE))

  @jax.jit
  def moment(state):
    return state.get_slot(state.params["w"], "m") + 1

  np.testing.assert_array_equal(moment(state), [1, 1])
  with pytest.raises(ValueError, match=r"not a leaf of state\.params"):
    jax.jit(lambda w: state.get_slot(w, "m"))(state.params["w"])


@pytest.mark.parametrize(
  ("parameter", "name", "error", "parts"),
  [
    ("W", "m", ValueError, ["get_slot: parameter='W'", "b/c, w"]),
    ("b", "m", ValueError, ["b/c"]),
    (("b", "c"), "m", TypeError, ["path of a parameter"]),
    (jnp.ones(2), "m", ValueError, ["float32[2]", "by identity"]),
    ("w", "mv", ValueError, ["'mv'", "'m', 'v'"]),
    ("w", "momentum", ValueError, ["'m', 'v'"]),
    ("w", "muu", ValueError, ["Did you mean 'mu'?"]),
    ("w", "", ValueError, ["name"]),
  ],
)
def test_errors(parameter, name, error, parts):
  state = create(tx=optax.adam(RATE))
  with pytest.raises(error) as e:
    state.get_slot(parameter, name)
  assert all(part in str(e.value) for part in parts)


def test_array_that_is_two_parameters():
  w = jnp.ones(2)
  state = create(tx=optax.adam(RATE), params={"a": w, "b": jnp.ones(2)})
  state = state.replace(params={"a": w, "b": w})
  with pytest.raises(ValueError, match="a, b at once"):
    state.get_slot(w, "m")


def test_two_parameters_of_one_path():
  params = {"a": {"b": jnp.ones(2)}, "a/b": jnp.ones(2)}
  state = create(tx=optax.adam(RATE), params=params)
  for method in (state.get_slot_names, lambda: state.get_slot("a/b", "m")):
    with pytest.raises(ValueError, match="'a/b'"):
      method()


def test_collection_named_variables_hides_the_method():
  state = create(variables={"x": jnp.ones(())})
  assert float(state.variables["x"]) == 1


def test_field_named_variables_hides_the_method():
  class State(fs.TrainState):
    variables: dict

  state = State.create(
    apply_fn=None,
    params=make_params(),
    tx=optax.sgd(RATE),
    variables={"x": jnp.ones(())},
  )
  assert float(state.variables["x"]) == 1


def test_fp8_statistics_have_no_slots():
  from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

  params = {
    "params": {"w": jnp.ones(2)},
    OVERWRITE_WITH_GRADIENT: {"scale": jnp.ones(1)},
  }
  state = create(tx=optax.adam(RATE), params=params, wrappers=[fs.AGN(2)])
  assert state.get_slot("params/w", "m").shape == (2,)
  assert state.get_slot("params/w", "agn/m").shape == (1, 2)
  assert state.get_slot("params/w", "agn/local_params").shape == (1, 2)
  scale = f"{OVERWRITE_WITH_GRADIENT}/scale"
  assert state.get_slot(scale, "m") is None


@pytest.mark.parametrize(
  ("tx", "names"),
  [
    (fs.optimizers.ftrl(RATE), ["accum", "linear"]),
    (
      fs.optimizers.adagrad_da(RATE),
      ["gradient_accumulator", "gradient_squared_accumulator"],
    ),
    (fs.optimizers.proximal_adagrad(RATE), ["accumulator"]),
    (fs.optimizers.proximal_gradient_descent(RATE), []),
  ],
  ids=["ftrl", "adagrad_da", "proximal_adagrad", "proximal_gradient_descent"],
)
def test_names_of_tensorflows_optimizers(tx, names):
  assert create(tx=tx).get_slot_names() == names


@pytest.mark.parametrize(
  ("wrapper", "name", "replicas"),
  [
    (fs.AGN(2), "agn/grad_accum", (1,)),
    (fs.Accumulate(2), "accumulate/grads", ()),
  ],
)
def test_sums_of_rows(wrapper, name, replicas):
  state = create(
    (wrapper,),
    tx=fs.sparse_rows(optax.sgd(RATE), ["table"]),
    params={"table": jnp.ones((4, 2)), "w": jnp.ones(2)},
  )
  ids = jnp.array([1, 1])
  loss_fn = lambda p: (p["table"][ids] * p["w"]).sum()
  state, _ = jax.jit(lambda s: s.minimize(loss_fn))(state)
  np.testing.assert_array_equal(
    state.get_slot("table", name).reshape(4, 2)[:, 0], [0, 2, 0, 0]
  )
  assert state.get_slot("w", name).shape == (*replicas, 2)


def test_restored_state(tmp_path):
  state = create((fs.AGN(2),), tx=optax.adam(RATE))
  state = jax.tree.map(lambda x: x + 1, state)
  with fs.Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(1, state)
    restored = checkpointer.restore(create((fs.AGN(2),), tx=optax.adam(RATE)))
  assert restored.get_slot_names() == state.get_slot_names()
  for name in restored.get_slot_names():
    np.testing.assert_array_equal(
      restored.get_slot(restored.params["w"], name), state.get_slot("w", name)
    )
