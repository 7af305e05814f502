"""Code of users that mypy accepts: fields of train states (see pyproject)."""

from typing import Any

import jax

import flaxshard as fs


class MyState(fs.TrainState):
  key: jax.Array
  ema: Any = None


def mine(state: MyState, grads: Any) -> MyState:
  key: jax.Array = state.key
  state = state.apply_gradients(grads=grads, batch_stats=state.batch_stats)
  state, _ = state.minimize(lambda params: params["w"])
  return state.replace(key=key, ema=state.ema)


def plain(state: fs.TrainState) -> Any:
  return state.batch_stats["mean"]


def created(tx: Any) -> MyState:
  return MyState.create(apply_fn=None, params={}, tx=tx, key=jax.random.key(0))
