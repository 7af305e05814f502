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
    pytest.param(optax.rmsprop(RATE), ["rms"], id="rmsprop"),
    pytest.param(
      optax.rmsprop(RATE, momentum=0.0), ["momentum", "rms"], id="tf_rmsprop"
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
    pytest.param(fs.optimizers.ftrl(RATE), ["accum", "linear"], id="ftrl"),
    pytest.param(
      fs.optimizers.adagrad_da(RATE),
      ["gradient_accumulator", "gradient_squared_accumulator"],
      id="adagrad_da",
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
  np.testing.assert_allclose(state.get_slot("w", "v"), 0.5 * gradient**2)
  assert list(state.variables()) == [
    "opt_state/0/count",
    "opt_state/0/mu/b/c",
    "opt_state/0/mu/w",
    "opt_state/0/nu/b/c",
    "opt_state/0/nu/w",
  ]


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


@pytest.mark.parametrize(
  ("parameter", "name", "facts"),
  [
    ("W", "m", ["parameter='W'", "b/c, w"]),
    (jnp.ones(2), "m", ["b/c, w"]),
    ("w", "mv", ["'mv'", "'m', 'v'"]),
  ],
)
def test_mistakes(parameter, name, facts):
  with pytest.raises(ValueError) as e:
    create(tx=optax.adam(RATE)).get_slot(parameter, name)
  assert all(fact in str(e.value) for fact in facts)


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
