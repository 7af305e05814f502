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
SUM = (fs.CrossShard("sum"),)
STATS = {"mean": np.zeros(2, np.float32)}
HALF = {"mean": np.zeros(2, np.float16)}
GRADS = make_params()
NONE = {"w": np.zeros(2, jax.dtypes.float0), "b": {"c": None}}
LOOKAHEAD = optax.LookaheadParams.init_synced(make_params())
PAIR = (1.0, "b/c")
ADAM, LBFGS = optax.adam(0.1), optax.lbfgs()
POLYAK = optax.chain(optax.clip(1.0), optax.polyak_sgd())


def apply(state=None, **kwargs):
  state = state or create(DYNAMIC, batch_stats=STATS)
  return state.apply_gradients(**{"grads": GRADS, **kwargs})


def apply_plain(*args, **kwargs):
  return create().apply_gradients(*args, **kwargs)


def differentiate(loss_fn, **kwargs):
  return create(DYNAMIC).value_and_grad(loss_fn, **kwargs)


def minimize(tx=None, wrappers=(), **kwargs):
  return create(wrappers, tx=tx).minimize(quadratic, **kwargs)


def search_lines_in_replicas():
  strategy = fs.Strategy()
  state = create(tx=LBFGS, strategy=strategy)
  strategy.run(lambda s: s.minimize(quadratic)[0], (state,))


def slot(parameter, name="m"):
  return create(tx=ADAM).get_slot(parameter, name)


# The model.


class NoParams(nn.Module):
  def __call__(self, x):
    return x


X = np.ones((2, 3), np.float32)
DENSE = nn.Dense(1)
NORM = nnx.BatchNorm(3, rngs=nnx.Rngs(0))


def make(model, **kwargs):
  tx = optax.sgd(0.1)
  return fs.create_train_state(model, jax.random.key(0), X, tx, **kwargs)


def lora(rank=1, **kwargs):
  return make(DENSE, lora=fs.LoRA(rank, **kwargs))


def call(state):
  """Differentiates with parameters alone, where there are other variables."""
  return state.minimize(lambda p: state.apply_fn({"params": p}, X).sum())


MISTAKES = [
  # The creation.
  (lambda: create(tx=optax.adam), TypeError, r"tx .*adam\(1e-3\)"),
  (lambda: create(tx=fs.wrap(ADAM)), TypeError, "tx .*Wrapped"),
  (lambda: create([fs.LoRA(2)]), TypeError, "lora="),
  (lambda: create(batch_stats={"m": "x"}), TypeError, r"batch_stats\[m\]"),
  (lambda: create(wrapers=DYNAMIC), TypeError, "wrapers"),
  (lambda: create(step=STATS), ValueError, "'step'"),
  (lambda: create(n=np.array(2**31)), ValueError, "n is int64.*214748"),
  (lambda: create(strategy=3), TypeError, "strategy .*3"),
  (lambda: create(params=LOOKAHEAD), TypeError, r"params\.fast"),
  (lambda: apply(create(params={}), grads={}), ValueError, "params has no"),
  # The model.
  (lambda: make(nn.Dense), TypeError, "model .*Dense"),
  (lambda: make(lambda rngs: 3), TypeError, "model"),
  (lambda: make(NoParams()), ValueError, "NoParams has no parameters"),
  (lambda: make(lambda rngs: NORM, wrapers=[]), TypeError, "wrapers"),
  (lambda: make(DENSE, rules="fsdp"), ValueError, "fsdp.*strategy"),
  # The parameters that LoRA trains.
  (lambda: lora(rank=0), ValueError, "rank"),
  (lambda: lora(patterns=("kernal",)), ValueError, "'kernel'"),
  (lambda: lora(patterns=("bias",)), ValueError, r"bias, float32 \(1,\)"),
  (lambda: lora(train=("kernel",)), ValueError, "kernel is .*train="),
  (lambda: lora(batch_dims=(("x", 1),)), ValueError, r"dims\[0\]='x'.*kernel"),
  (lambda: lora(batch_dims=(("k", 0),)), ValueError, r"batch_dims\[0\]\[1\]"),
  (lambda: lora(batch_dims=(("k", 2),)), ValueError, "kernel.* 2 batch dim"),
  (lambda: call(lora()), ValueError, "'frozen': state.froz"),
  (lambda: call(make(NORM)), ValueError, "given are.*batch_stats"),
  # The loss.
  (lambda: differentiate(lambda p: (quadratic(p), 1)), TypeError, "has_aux"),
  (lambda: differentiate(quadratic, has_aux=True), TypeError, "loss, aux"),
  (lambda: differentiate(lambda p: None), TypeError, "loss_fn .*None"),
  (lambda: differentiate(lambda p: p["w"]), ValueError, r"scalar.*\[2\]"),
  # Gradients, and what is replaced with them.
  (lambda: apply(grads=NONE), ValueError, "b/c, w"),
  (lambda: apply(grads={"w": jnp.ones(2)}), ValueError, "grads .*b/c"),
  (lambda: apply(grads=(1.0, GRADS)), ValueError, r"\(loss, grads\)"),
  (lambda: apply(batch_stat=STATS), TypeError, "'batch_stat'.*batch_stats"),
  (lambda: apply(step=1), TypeError, "'step'"),
  (lambda: apply(batch_stats={"n": 1.0}), ValueError, "batch_stats.*mean"),
  (
    lambda: apply(batch_stats=HALF),
    ValueError,
    "batch_stats.*float16.*float32",
  ),
  (lambda: apply(create(tx=POLYAK)), TypeError, "value"),
  # TensorFlow's surface: pairs, var_list, grad_loss and slots.
  (lambda: apply_plain([PAIR, PAIR]), ValueError, "pair 1.*twice"),
  (lambda: apply_plain([(1.0, "b/d")]), ValueError, "pair 0.*'b/d'.*b/c"),
  (lambda: apply_plain([(1.0, "w")]), ValueError, r"w.*shape \(\).*\(2,\)"),
  (lambda: apply_plain(GRADS), TypeError, "grads=grads"),
  (lambda: apply_plain([PAIR], 0), TypeError, "grads=grads"),
  (lambda: minimize(var_list=[]), ValueError, "at least one"),
  (lambda: minimize(var_list="kernel"), TypeError, "sequence.*kernel"),
  (lambda: minimize(var_list=["w", "b/d"]), ValueError, "'b/d'.*b/c"),
  (lambda: minimize(LBFGS, var_list=["w"]), ValueError, "value_fn"),
  (lambda: minimize(grad_loss=X), ValueError, r"\(2, 3\) of grad_loss.*\[\]"),
  (lambda: minimize(grad_loss="x"), TypeError, "grad_loss.*'x'"),
  (lambda: minimize(aggregation="avg"), ValueError, "aggregation.*avg"),
  (lambda: minimize(LBFGS, aggregation="sum"), ValueError, "value_fn"),
  (lambda: minimize(None, SUM, aggregation="sum"), ValueError, "cross_shard"),
  (search_lines_in_replicas, ValueError, "value_fn"),
  (lambda: minimize(gate_gradients=2), TypeError, "'graph'"),
  (lambda: slot("W"), ValueError, "'W'.*b/c, w"),
  (lambda: slot("w", "mv"), ValueError, "'m', 'v'"),
]


@pytest.mark.parametrize(("call", "error", "words"), MISTAKES)
def test_mistakes(call, error, words):
  with pytest.raises(error, match=f"(?s){words}"):
    call()
