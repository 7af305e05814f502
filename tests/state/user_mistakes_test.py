"""Mistakes in the use of a TrainState: the message names what to write."""

from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from quadratic_states import create
from quadratic_states import make_params
from quadratic_states import quadratic

import flaxshard as fs

DYNAMIC = (fs.LossScale("dynamic"),)
STATS = {"mean": jnp.zeros(2)}
GRADS = make_params()
LOOKAHEAD = optax.LookaheadParams.init_synced(make_params())
FLOAT0 = np.zeros(2, jax.dtypes.float0)
PAIR = (1.0, "b/c")
ADAM, LBFGS = optax.adam(0.1), optax.lbfgs()
POLYAK = optax.chain(optax.clip(1.0), optax.polyak_sgd())


def apply(state=None, **kwargs):
  state = state or create(DYNAMIC, batch_stats=STATS)
  return state.apply_gradients(**{"grads": GRADS, **kwargs})


def differentiate(loss_fn, **kwargs):
  return create(DYNAMIC).value_and_grad(loss_fn, **kwargs)


def minimize(tx=None, wrappers=(), **kwargs):
  return create(wrappers, tx=tx).minimize(quadratic, **kwargs)


def apply_plain(*args, **kwargs):
  return create().apply_gradients(*args, **kwargs)


def make(model, **kwargs):
  return fs.create_train_state(
    model, jax.random.key(0), jnp.ones((2, 3)), optax.sgd(0.1), **kwargs
  )


class NoParams(nn.Module):
  def __call__(self, x):
    return x


class TakenName(nn.Module):
  @nn.compact
  def __call__(self, x):
    self.variable("step", "count", lambda: jnp.zeros(()))
    return nn.Dense(1)(x)


class Empty(nnx.Module):
  pass


MISTAKES = [
  # The creation.
  (lambda: create(tx=optax.adam), TypeError, ["tx", "adam(1e-3)"]),
  (lambda: create(tx="adam"), TypeError, ["tx", "'adam'"]),
  (lambda: create(fs.LossScale()), TypeError, ["LossScale"]),
  (
    lambda: create([fs.FixedLossScale(2.0)]),
    TypeError,
    ["LossScale(FixedLossScale(2.0))"],
  ),
  (lambda: create([fs.LoRA(2)]), TypeError, ["lora="]),
  (lambda: create({"loss_scale": fs.LossScale()}), TypeError, ["wrappers"]),
  (lambda: create(batch_stats={"m": "x"}), TypeError, ["batch_stats[m]"]),
  (lambda: create(wrapers=[fs.LossScale()]), TypeError, ["wrapers"]),
  (lambda: create(step=STATS), ValueError, ["'step'"]),
  (lambda: create(minimize=STATS), ValueError, ["'minimize'"]),
  (lambda: create(strategy=3), TypeError, ["strategy", "3"]),
  # The model.
  (lambda: make(nn.Dense), TypeError, ["model", "Dense"]),
  (lambda: make({"w": 1}), TypeError, ["model"]),
  (lambda: make(lambda rngs: 3), TypeError, ["model"]),
  (lambda: make(NoParams()), ValueError, ["NoParams", "params"]),
  (lambda: make(Empty()), ValueError, ["Empty", "params"]),
  (lambda: make(TakenName()), ValueError, ["'step'"]),
  (lambda: make(nn.Dense(1), trian=False), TypeError, ["trian"]),
  (lambda: make(lambda r: Empty(), wrapers=[]), TypeError, ["wrapers"]),
  (lambda: make(nn.Dense(1), rules="fsdp"), ValueError, ["fsdp", "strategy"]),
  (
    lambda: make(nn.Dense(1), wrappers=[fs.LossScale(), fs.LossScale(8)]),
    ValueError,
    ["'loss_scale'"],
  ),
  # The loss.
  (lambda: differentiate(lambda p: (quadratic(p), 1)), TypeError, ["has_aux"]),
  (lambda: differentiate(quadratic, has_aux=True), TypeError, ["(loss, aux)"]),
  (lambda: differentiate(lambda p: None), TypeError, ["loss_fn", "None"]),
  (lambda: differentiate(lambda p: p["w"]), ValueError, ["scalar", "[2]"]),
  # Gradients, and what is replaced with them.
  (lambda: apply(grads={"w": None, "b": {"c": None}}), ValueError, ["b/c, w"]),
  (lambda: apply(grads={"w": FLOAT0, "b": {"c": 0}}), ValueError, ["b/c, w"]),
  (lambda: apply(grads={"w": jnp.ones(2)}), ValueError, ["grads", "b/c"]),
  (lambda: apply(grads=(1.0, GRADS)), ValueError, ["(loss, grads)"]),
  (lambda: apply(batch_stat=STATS), TypeError, ["'batch_stat'", "batch_stats"]),
  (lambda: apply(step=1), TypeError, ["'step'"]),
  (lambda: apply(params=GRADS), TypeError, ["'params'"]),
  (lambda: apply(learning_rate=1), TypeError, ["'learning_rate'"]),
  (lambda: apply(batch_stats={"n": 1.0}), ValueError, ["batch_stats", "mean"]),
  (
    lambda: apply(batch_stats={"mean": jnp.zeros(2, jnp.float16)}),
    ValueError,
    ["batch_stats", "float16", "float32"],
  ),
  (lambda: apply(create(tx=POLYAK)), TypeError, ["value"]),
  # TensorFlow's surface: pairs, var_list, grad_loss and slots.
  (lambda: apply_plain(grads=[]), ValueError, ["No gradients", "b/c, w"]),
  (lambda: apply_plain([(None, "w")]), ValueError, ["No gradients"]),
  (lambda: apply_plain([PAIR, PAIR]), ValueError, ["pair 1", "twice"]),
  (lambda: apply_plain([(1.0, "b/d")]), ValueError, ["pair 0", "'b/d'", "b/c"]),
  (lambda: apply_plain([(1.0, "w")]), ValueError, ["w", "shape ()", "(2,)"]),
  (lambda: apply_plain([(1.0, GRADS["w"])]), TypeError, ["grads=grads"]),
  (lambda: apply_plain(make_params()), TypeError, ["grads=grads"]),
  (lambda: apply_plain([PAIR], 0), TypeError, ["grads=grads"]),
  (lambda: apply_plain([PAIR], global_step=0), TypeError, ["global_step"]),
  (lambda: minimize(var_list=[]), ValueError, ["at least one"]),
  (lambda: minimize(var_list="kernel"), TypeError, ["sequence", "kernel"]),
  (lambda: minimize(var_list=[1]), TypeError, ["var_list[0]", "1"]),
  (lambda: minimize(var_list=["w", "b/d"]), ValueError, ["'b/d'", "b/c"]),
  (lambda: minimize(LBFGS, var_list=["w"]), ValueError, ["value_fn"]),
  (lambda: minimize(grad_loss=jnp.ones(3)), ValueError, ["[]", "(3,)"]),
  (lambda: minimize(aggregation="avg"), ValueError, ["aggregation", "avg"]),
  (lambda: minimize(LBFGS, aggregation="sum"), ValueError, ["value_fn"]),
  (
    lambda: minimize(wrappers=[fs.CrossShard("sum")], aggregation="sum"),
    ValueError,
    ["cross_shard", "sum"],
  ),
  (lambda: minimize(gate_gradients="grpah"), ValueError, ["'graph'"]),
  (lambda: minimize(gate_gradients=2), TypeError, ["'graph'"]),
  (lambda: create(params=LOOKAHEAD), TypeError, ["params.fast"]),
  (lambda: create(tx=ADAM).get_slot("W", "m"), ValueError, ["'W'", "b/c, w"]),
  (lambda: create(tx=ADAM).get_slot(jnp.ones(2), "m"), ValueError, ["b/c"]),
  (lambda: create(tx=ADAM).get_slot("w", "mv"), ValueError, ["'m', 'v'"]),
]


@pytest.mark.parametrize(("call", "error", "facts"), MISTAKES)
def test_mistakes(call, error, facts):
  with pytest.raises(error) as e:
    call()
  assert all(fact in str(e.value) for fact in facts), str(e.value)


@pytest.mark.parametrize("rules", [None, (), []])
def test_no_rules_need_no_strategy(rules):
  state = make(nn.Dense(1), rules=rules)
  assert state.params["kernel"].shape == (3, 1)
