"""fs.check: names the seeded mistakes, and is silent without them.

Each function of `MISTAKES` builds a small program twice: `wrong=True` has the
mistake, and `wrong=False` is what its author meant. Nothing is allocated:
states and batches are `jax.ShapeDtypeStruct`s on the given devices, of which
there are eight. The comment `# here: NAME` stands before the line that a
finding must name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import dataclasses
import functools
import importlib
import pathlib
from typing import Any

import flax.linen as nn
from flax.training import train_state as flax_train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs
from flaxshard.models import pooling
from flaxshard.partitioning import rules as rules_lib
from flaxshard.plans import check as check_lib
from flaxshard.plans import Finding
from flaxshard.plans import step as step_lib
from flaxshard.train import config as config_lib
from flaxshard.train import devices as devices_lib
from flaxshard.train import setup as setup_lib

P = jax.sharding.PartitionSpec
_SPLIT = P("replica")
_EXAMPLE = jax.ShapeDtypeStruct((1, 64), jnp.float32)


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


def _whole(x: Any) -> Any:
  return P()


def _split_first(x: Any) -> Any:
  return _SPLIT if x.ndim == 2 else P()


def _placed(strategy: fs.Strategy, tree: Any, spec: Any = _whole) -> Any:
  """Returns shapes of a tree, with the sharding that a function gives each."""
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape,
      x.dtype,
      sharding=jax.sharding.NamedSharding(strategy.mesh, spec(x)),
    ),
    tree,
  )


def _abstract_state(
  strategy: fs.Strategy,
  model: nn.Module,
  sample: Any = _EXAMPLE,
  **options: Any,
) -> Any:
  return fs.create_train_state(
    model,
    jax.random.key(0),
    sample,
    optax.adam(1e-3),
    strategy=strategy,
    abstract=True,
    **options,
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


@_mistake("replicated state", parameter="Dense_0/kernel")
def slots_stay_replicated(devices: Any, wrong: bool) -> Program:
  strategy = fs.Strategy(devices=devices)
  state = _flax_state(strategy, _whole if wrong else _split_first)
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
  spec = P() if wrong else _SPLIT
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

  state = _abstract_state(strategy, Model(), jnp.ones((1, 128)), rules="fsdp")
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
  state = _abstract_state(strategy, Model(), jnp.ones((1, 8, 8, 1)))
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
    in_specs=(P(), _SPLIT),
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


# The checks.

# So small that the arrays of the seeded programs count.
_MIN_BYTES = 2048
# Compiled in under half a second each; the others are slow on CPUs.
_FAST = (
  "batch_is_on_every_device",
  "data_set_is_a_constant",
  "microbatches_by_a_plain_reshape",
  "print_is_left_in_the_step",
  "slots_stay_replicated",
  "update_promotes_parameters",
)
# Their results depend on the compiler.
_MOVING = ("activations", "batch", "float32 gradients")


@functools.cache
def _devices(compiler: str) -> Any:
  if compiler == "cpu":
    return jax.devices()[:8]
  return list(fs.Strategy("v5e:2x4").mesh.devices.flat)


def _names_it(finding: Finding, name: str) -> bool:
  mistake = MISTAKES[name]
  if finding.kind != mistake.kind:
    return False
  if not mistake.here:
    paths = [path for path in finding.paths if mistake.parameter in path]
    return not mistake.parameter or (bool(paths) and paths[0] in str(finding))
  if not finding.source:
    # XLA of JAX 0.12 gives some collectives no line, on CPUs.
    return jax.__version_info__ >= (0, 12)
  source = pathlib.Path(__file__)
  lines = map(str.strip, source.read_text().splitlines())
  marked = list(lines).index(f"# here: {name}") + 2
  file, _, line = finding.source.rpartition(":")
  # Versions of XLA name a collective after neighbouring operations.
  return file.endswith(source.name) and abs(int(line or 0) - marked) <= 2


def _cases() -> Iterator[Any]:
  for name, mistake in MISTAKES.items():
    fast = () if name in _FAST else pytest.mark.slow
    marks = {"cpu": fast, "tpu": pytest.mark.tpu}
    if mistake.kind not in _MOVING:
      del marks["tpu"]
    for compiler, mark in marks.items():
      for wrong in (True, False):
        yield pytest.param(name, compiler, wrong, marks=mark)


@pytest.mark.parametrize(("name", "compiler", "wrong"), list(_cases()))
def test_check_names_mistake(name: str, compiler: str, wrong: bool) -> None:
  program = MISTAKES[name].build(_devices(compiler), wrong)
  found = fs.check(
    program.step,
    program.state,
    program.batch,
    min_bytes=_MIN_BYTES,
    **program.options,
  )
  if wrong and compiler in MISTAKES[name].compilers:
    assert any(_names_it(finding, name) for finding in found), str(found)
  else:
    assert not found.findings, str(found)


# FSDP; tensor parallelism. config_test.py has others, with the TPU compiler.
_CONFIGS = ("digits_diloco", "lm_text_fsdp", "lm_text_tensor_parallel")


@pytest.mark.slow
@pytest.mark.parametrize("name", _CONFIGS)
def test_configs_have_no_findings(name: str) -> None:
  config = importlib.import_module(f"configs.{name}").get_config()
  if "lm" in name:
    config.model.num_layers = 2
  checked = config_lib.check(config)
  program = setup_lib.Setup(
    checked, devices_lib.create_strategy(checked), shapes_only=True
  )
  step = step_lib.compile_step(
    program.trace(), program.arguments, setup_lib.BATCH
  )
  # Arrays of a real model are larger, and so is what they move.
  found = check_lib.check_step(
    step, rules_lib.from_config(checked.mesh.rules), 2**16
  )
  assert not found.findings, str(found)


def test_ignore_takes_several_texts() -> None:
  with pytest.raises(TypeError, match="ignore"):
    fs.check(jax.jit(_descend), {}, jnp.zeros(()), ignore="mu")


def test_finding_is_ignored_or_raised() -> None:
  program = MISTAKES["slots_stay_replicated"].build(jax.devices()[:8], True)
  check = functools.partial(
    fs.check, program.step, program.state, program.batch, min_bytes=_MIN_BYTES
  )
  with pytest.raises(ValueError, match="opt_state/0/mu/Dense_0/kernel"):
    check(raise_on_finding=True)
  assert not check(ignore=["replicated state"]).findings


def _descend(state: Any, x: jax.Array) -> Any:
  grads = jax.grad(lambda w: ((x @ w) ** 2).mean())(state["params"]["w"])
  return {**state, "params": {"w": state["params"]["w"] - 0.1 * grads}}


def _find(change: Any, **fields: Any) -> fs.plans.Findings:
  """Checks a step of one matrix, whose new state `change` changes."""
  state = {"params": {"w": jnp.zeros((8, 8))}, **fields}
  step = jax.jit(lambda state, x: change(_descend(state, x)), donate_argnums=0)
  return fs.check(step, state, jnp.zeros((4, 8)), min_bytes=1)


def test_python_numbers_are_leaves_of_a_state() -> None:
  count = lambda state: {**state, "step": state["step"] + 1}
  assert not _find(count, step=0).findings


@pytest.mark.parametrize(
  ("before", "after", "words"),
  [
    (0.0, jnp.float32, ("weak type", "strong type")),
    (jnp.zeros(3), lambda x: x[:2], ("(3,)", "(2,)")),
    (jnp.zeros(3), jnp.bfloat16, ("float32", "bfloat16")),
  ],
)
def test_changed_leaf_is_named(
  before: Any, after: Any, words: tuple[str, ...]
) -> None:
  change = lambda state: {**state, "scale": after(state["scale"])}
  [finding] = _find(change, scale=before)
  assert finding.kind == "changed state"
  assert finding.paths == ("scale",)
  assert all(word in finding.message for word in words)


def test_new_state_of_another_structure_is_noted() -> None:
  found = _find(lambda state: {**state, "norm": jnp.zeros(())})
  assert not found.findings
  assert len(found.notes) == 1


# Correct programs that look like mistakes.


@pytest.mark.slow
def test_fsdp_sums_microbatches_into_split_gradients() -> None:
  strategy = fs.Strategy(devices=jax.devices()[:8])
  rules = fs.FSDP(min_size=1024)
  state = _abstract_state(strategy, Mlp(2), rules=rules)

  def step(state: Any, x: jax.Array) -> Any:
    def accumulate(total: Any, x: jax.Array) -> Any:
      grads = jax.grad(functools.partial(_loss, state))(state.params, x)
      return jax.tree.map(jnp.add, total, grads), None

    x = x.reshape(-1, 4, x.shape[-1]).swapaxes(0, 1)
    zeros = jax.tree.map(jnp.zeros_like, state.params)
    grads, _ = jax.lax.scan(accumulate, zeros, x)
    return state.apply_gradients(grads=grads), None

  # Biases, which FSDP does not split, are smaller than this.
  batch = _abstract_batch(strategy, (8192, 64))
  found = fs.check(_jit_like(state, step), state, batch, min_bytes=2**12)
  assert not found.findings, str(found)


def test_rows_of_a_table_of_fsdp_are_looked_up() -> None:
  strategy = fs.Strategy(devices=jax.devices()[:8])
  ids = jax.ShapeDtypeStruct((96,), jnp.int32)
  model = nn.Sequential([nn.Embed(512, 32), nn.Dense(16)])
  state = _abstract_state(
    strategy, model, ids, rules="fsdp", sparse=["embedding"]
  )

  def step(state: Any, ids: jax.Array) -> Any:
    return state.minimize(lambda params: _loss(state, params, ids))

  batch = strategy.shard_batch(ids)
  found = fs.check(_jit_like(state, step), state, batch, min_bytes=2**12)
  assert not found.findings, str(found)
