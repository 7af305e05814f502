"""Small training programs, each with one mistake, and without it.

Each function builds the program twice: `wrong=True` has the mistake, and
`wrong=False` is what its author meant. Nothing is allocated: states and batches
are `jax.ShapeDtypeStruct`s on the given devices, of which there are eight.

The comment `# here: NAME` stands before the line that a finding must name.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
import pathlib
from typing import Any

import flax.linen as nn
from flax.training import train_state as flax_train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax

import flaxshard as fs
from flaxshard.models import pooling

P = jax.sharding.PartitionSpec
_REPLICATED = P()
_SPLIT = P("replica")
_SOURCE = pathlib.Path(__file__)


@dataclasses.dataclass(frozen=True)
class Program:
  """The arguments of `fs.check`."""

  step: Callable[..., Any]
  state: Any
  batch: Any
  options: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Mistake:
  """A seeded mistake.

  Attributes:
    build: `build(devices, wrong)` returns the program.
    kind: The kind of finding that names the mistake.
    parameter: A parameter's path that the finding must have, or "".
    here: Whether the finding must name the line marked with the mistake's name.
    compilers: The compilers whose program has it: another one may mend it.
  """

  build: Callable[[Any, bool], Program]
  kind: str
  parameter: str
  here: bool
  compilers: tuple[str, ...]


MISTAKES: dict[str, Mistake] = {}


def marked_line(name: str) -> str:
  """Returns the line behind the comment `# here: NAME`, as "file.py:12"."""
  lines = _SOURCE.read_text().splitlines()
  [number] = [i for i, x in enumerate(lines) if x.strip() == f"# here: {name}"]
  return f"{_SOURCE.name}:{number + 2}"


def _mistake(
  kind: str,
  parameter: str = "",
  here: bool = False,
  compilers: tuple[str, ...] = ("cpu", "tpu"),
) -> Any:
  def register(build: Any) -> Any:
    MISTAKES[build.__name__] = Mistake(build, kind, parameter, here, compilers)
    return build

  return register


class Mlp(nn.Module):
  """A stack of dense layers; the kernels have the same shape."""

  layers: int = 3
  features: int = 64
  dtype: Any = None

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    for _ in range(self.layers):
      x = nn.relu(nn.Dense(self.features, dtype=self.dtype)(x))
    return x


def _abstract_batch(
  strategy: fs.Strategy,
  shape: tuple[int, ...] = (64, 64),
  spec: Any = _SPLIT,
) -> Any:
  return jax.ShapeDtypeStruct(
    shape, jnp.float32, sharding=jax.sharding.NamedSharding(strategy.mesh, spec)
  )


def _placed(strategy: fs.Strategy, tree: Any, spec: Any = _REPLICATED) -> Any:
  """Returns shapes of a tree, all with one sharding, or those of a function."""
  get_spec = (
    spec if callable(spec) and not isinstance(spec, P) else lambda _: spec
  )
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape,
      x.dtype,
      sharding=jax.sharding.NamedSharding(strategy.mesh, get_spec(x)),
    ),
    tree,
  )


def _abstract_state(
  strategy: fs.Strategy,
  model: nn.Module,
  sample: tuple[int, ...] = (1, 64),
  rules: Any = None,
  tx: Any = None,
) -> Any:
  return fs.create_train_state(
    model,
    jax.random.key(0),
    jax.ShapeDtypeStruct(sample, jnp.float32),
    tx or optax.adam(1e-3),
    strategy=strategy,
    rules=rules,
    abstract=True,
  )


def _loss(state: Any, params: Any, x: jax.Array) -> jax.Array:
  out = state.apply_fn({"params": params}, x)
  return (out.astype(jnp.float32) ** 2).mean()


def _train_step(state: Any, x: jax.Array) -> Any:
  loss, grads = jax.value_and_grad(functools.partial(_loss, state))(
    state.params, x
  )
  return state.apply_gradients(grads=grads), loss


def _jit_like(state: Any, step: Any = _train_step) -> Any:
  """Jits a step whose new state has the shardings of the state."""
  shardings = jax.tree.map(lambda x: x.sharding, state)
  return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))


def _data_and_model(devices: Any) -> fs.Strategy:
  return fs.Strategy(devices=devices, mesh_shape={"replica": 4, "model": 2})


# Shardings of the state.


@_mistake("replicated state", parameter="Dense_2/kernel")
def regex_misses_a_layer(devices: Any, wrong: bool) -> Program:
  strategy = _data_and_model(devices)
  layers = "[01]" if wrong else r"\d"
  rules = ((f"Dense_{layers}/kernel", P(None, "model")),)
  state = _abstract_state(strategy, Mlp(), rules=rules)
  return Program(_jit_like(state), state, _abstract_batch(strategy))


@_mistake("replicated state", parameter="Dense_0/kernel")
def state_made_without_the_rules(devices: Any, wrong: bool) -> Program:
  strategy = _data_and_model(devices)
  rules = (("kernel", P(None, "model")),)
  state = _abstract_state(strategy, Mlp(), rules=None if wrong else rules)
  return Program(
    _jit_like(state), state, _abstract_batch(strategy), {"rules": rules}
  )


def _flax_state(strategy: fs.Strategy, slot_spec: Any) -> Any:
  """Returns Flax's own state, FSDP by hand."""
  model = Mlp()
  params = jax.eval_shape(
    lambda: model.init(jax.random.key(0), jnp.ones((1, 64)))["params"]
  )
  tx = optax.adam(1e-3)
  return flax_train_state.TrainState(
    step=_placed(strategy, jax.ShapeDtypeStruct((), jnp.int32)),
    apply_fn=model.apply,
    params=_placed(strategy, params, _split_first),
    tx=tx,
    opt_state=_placed(strategy, jax.eval_shape(tx.init, params), slot_spec),
  )


def _split_first(x: Any) -> Any:
  return P("replica") if x.ndim == 2 else P()


@_mistake("replicated state", parameter="Dense_0/kernel")
def slots_stay_replicated(devices: Any, wrong: bool) -> Program:
  strategy = fs.Strategy(devices=devices)
  state = _flax_state(strategy, P() if wrong else _split_first)
  return Program(_jit_like(state), state, _abstract_batch(strategy, (4096, 64)))


# What the step does to the state.


@_mistake("changed state", parameter="Dense_0/kernel")
def new_parameters_are_replicated(devices: Any, wrong: bool) -> Program:
  strategy = fs.Strategy(devices=devices)
  state = _abstract_state(strategy, Mlp(), rules=fs.FSDP(min_size=1024))
  shardings = jax.tree.map(lambda x: x.sharding, state)
  whole = jax.sharding.NamedSharding(strategy.mesh, P())

  def step(state: Any, x: jax.Array) -> Any:
    new, loss = _train_step(state, x)
    # As a leftover of a data-parallel program.
    params = jax.lax.with_sharding_constraint(
      new.params, whole if wrong else shardings.params
    )
    return new.replace(params=params), loss

  jitted = jax.jit(step, donate_argnums=0)
  return Program(
    jitted if wrong else _jit_like(state, step),
    state,
    _abstract_batch(strategy, (4096, 64)),
  )


@_mistake("changed state", parameter="Dense_0/kernel")
def update_promotes_parameters(devices: Any, wrong: bool) -> Program:
  strategy = fs.Strategy(devices=devices)
  params = jax.eval_shape(
    lambda: Mlp(2).init(jax.random.key(0), jnp.ones((1, 64)))["params"]
  )
  halves = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), params
  )
  params = _placed(strategy, halves)
  rate = jnp.float32(0.1) if wrong else 0.1

  def step(params: Any, x: jax.Array) -> Any:
    loss = lambda p: (Mlp(2).apply({"params": p}, x) ** 2).mean()
    grads = jax.grad(loss)(params)
    return jax.tree.map(lambda p, g: p - rate * g, params, grads)

  return Program(
    jax.jit(step, donate_argnums=0), params, _abstract_batch(strategy)
  )


@_mistake("donation", parameter="Dense_0/kernel")
def state_is_not_donated(devices: Any, wrong: bool) -> Program:
  strategy = fs.Strategy(devices=devices)
  state = _abstract_state(strategy, Mlp())
  step = jax.jit(_train_step) if wrong else _jit_like(state)
  return Program(step, state, _abstract_batch(strategy))


# Data parallelism.


@_mistake("batch")
def batch_is_on_every_device(devices: Any, wrong: bool) -> Program:
  strategy = fs.Strategy(devices=devices)
  state = _abstract_state(strategy, Mlp())
  spec = P() if wrong else P("replica")
  return Program(_jit_like(state), state, _abstract_batch(strategy, spec=spec))


@_mistake("activations", here=True)
def fsdp_has_no_constraints(devices: Any, wrong: bool) -> Program:
  strategy = fs.Strategy(devices=devices)
  batch_sharding = jax.sharding.NamedSharding(strategy.mesh, _SPLIT)

  class Model(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
      for _ in range(3):
        # here: fsdp_has_no_constraints
        x = nn.relu(nn.Dense(256, use_bias=False)(x))
        if not wrong:
          x = jax.lax.with_sharding_constraint(x, batch_sharding)
      return x

  state = _abstract_state(strategy, Model(), (1, 128), rules="fsdp")
  return Program(_jit_like(state), state, _abstract_batch(strategy, (64, 128)))


@_mistake("batch", here=True)
def microbatches_by_a_plain_reshape(devices: Any, wrong: bool) -> Program:
  strategy = fs.Strategy(devices=devices)
  state = _abstract_state(strategy, Mlp())

  def step(state: Any, x: jax.Array) -> Any:
    if wrong:
      x = x.reshape(4, -1, 64)
    else:  # each device divides its own examples
      x = x.reshape(-1, 4, 64).swapaxes(0, 1)

    def accumulate(total: Any, x: jax.Array) -> Any:
      out = state.apply_fn({"params": jax.lax.stop_gradient(state.params)}, x)
      return total + out.sum(), None

    # here: microbatches_by_a_plain_reshape
    total, _ = jax.lax.scan(accumulate, 0.0, x)
    return state, total

  return Program(_jit_like(state, step), state, _abstract_batch(strategy))


@_mistake("activations", here=True)
def max_pool_gathers_the_batch(devices: Any, wrong: bool) -> Program:
  class Model(nn.Module):
    """Computes in float16: XLA gathers nothing in bfloat16 and float32."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
      x = nn.relu(nn.Conv(32, (3, 3), dtype=jnp.float16)(x))
      if wrong:
        # here: max_pool_gathers_the_batch
        x = nn.max_pool(x, (2, 2), (2, 2))
      else:
        x = pooling.max_pool(x, 2, stride=2)
      return nn.Dense(8, dtype=jnp.float16)(x.reshape(x.shape[0], -1))

  strategy = fs.Strategy(devices=devices)
  state = _abstract_state(strategy, Model(), (1, 8, 8, 1))
  batch = _abstract_batch(strategy, (1024, 8, 8, 1))
  return Program(_jit_like(state), state, batch)


# The program.


@_mistake("float32 gradients", here=True, compilers=("tpu",))
def gradients_are_cast_before_their_sum(devices: Any, wrong: bool) -> Program:
  strategy = fs.Strategy(devices=devices)
  state = _abstract_state(strategy, Mlp(dtype=jnp.bfloat16))

  @functools.partial(
    jax.shard_map,
    mesh=strategy.mesh,
    in_specs=(P(), P("replica")),
    out_specs=P(),
    check_vma=False,
  )
  def gradients(params: Any, x: jax.Array) -> Any:
    halves = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    grads = jax.grad(functools.partial(_loss, state))(halves, x)
    if wrong:
      grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    # here: gradients_are_cast_before_their_sum
    return jax.lax.psum(grads, "replica")

  def step(state: Any, x: jax.Array) -> Any:
    return state.apply_gradients(grads=gradients(state.params, x)), None

  return Program(_jit_like(state, step), state, _abstract_batch(strategy))


@_mistake("host callback", here=True, compilers=("cpu",))
def print_is_left_in_the_step(devices: Any, wrong: bool) -> Program:
  strategy = fs.Strategy(devices=devices)
  state = _abstract_state(strategy, Mlp())

  def step(state: Any, x: jax.Array) -> Any:
    new, loss = _train_step(state, x)
    if wrong:
      # here: print_is_left_in_the_step
      jax.debug.print("loss {}", loss)
    return new, loss

  return Program(_jit_like(state, step), state, _abstract_batch(strategy))


@_mistake("large constant", here=True)
def data_set_is_a_constant(devices: Any, wrong: bool) -> Program:
  strategy = fs.Strategy(devices=devices)
  state = _abstract_state(strategy, Mlp())
  whole = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)

  def step(state: Any, x: jax.Array) -> Any:
    if wrong:
      # here: data_set_is_a_constant
      x = x + whole
    return _train_step(state, x)

  return Program(_jit_like(state, step), state, _abstract_batch(strategy))
