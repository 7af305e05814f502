"""fs.check: names the seeded mistakes, and is silent without them.

Each function of `MISTAKES` builds a small program twice: `wrong=True` has the
mistake, and `wrong=False` is what its author meant. Nothing is allocated:
states and batches are `jax.ShapeDtypeStruct`s on the given devices, of which
there are eight. The comment `# here: NAME` stands before the line that a
finding must name.
"""

import functools
import importlib
import pathlib
from typing import Any, NamedTuple

import flax.linen as nn
from flax.training import train_state as flax_train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs
from flaxshard.models import images
from flaxshard.partitioning import rules as rules_lib
from flaxshard.plans import check as check_lib
from flaxshard.plans import step as step_lib
from flaxshard.train import config as config_lib
from flaxshard.train import devices as devices_lib
from flaxshard.train import setup as setup_lib

P = jax.sharding.PartitionSpec
SPLIT = P("replica")
MODEL = {"replica": 4, "model": 2}


class Mistake(NamedTuple):
  """A seeded mistake.

  Attributes:
    build: `build(strategy, wrong)` returns a step, a state and a batch, and the
      rules of the state if `fs.check` is to know them.
    kind: The kind of finding that names the mistake.
    parameter: A parameter's path that the finding must have, or "".
    here: Whether the finding must name the line marked with the mistake's name.
    fast: Whether CPUs compile it in under half a second.
    compilers: The compilers whose program has it: another one may mend it.
    mesh_shape: That of the strategy.
  """

  build: Any
  kind: str
  parameter: str = ""
  here: bool = False
  fast: bool = False
  compilers: Any = ("cpu", "tpu")
  mesh_shape: Any = None


MISTAKES = {}


def mistake(kind, *args, **kwargs):
  """Registers the function that builds a seeded mistake."""

  def register(build):
    MISTAKES[build.__name__] = Mistake(build, kind, *args, **kwargs)
    return build

  return register


class Mlp(nn.Module):
  """A stack of dense layers; the kernels have the same shape."""

  dtype: Any = None

  @nn.compact
  def __call__(self, x):
    for _ in range(3):
      x = nn.relu(nn.Dense(64, dtype=self.dtype)(x))
    return x


def sharding(strategy, spec):
  return jax.sharding.NamedSharding(strategy.mesh, spec)


def batch_of(strategy, shape=(64, 64), spec=SPLIT, dtype=jnp.float32):
  sharded = sharding(strategy, spec)
  return jax.ShapeDtypeStruct(shape, dtype, sharding=sharded)


def split_first(x):
  return SPLIT if x.ndim == 2 else P()


MLP, EXAMPLE = Mlp(), jax.ShapeDtypeStruct((1, 64), jnp.float32)


def create(strategy, model=MLP, sample=EXAMPLE, **options):
  return fs.create_train_state(
    model,
    jax.random.key(0),
    sample,
    optax.adam(1e-3),
    strategy=strategy,
    abstract=True,
    **options,
  )


def loss_of(state, params, x):
  out = state.apply_fn({"params": params}, x)
  return (out.astype(jnp.float32) ** 2).mean()


def train_step(state, x):
  loss_fn = functools.partial(loss_of, state)
  loss, grads = jax.value_and_grad(loss_fn)(state.params, x)
  return state.apply_gradients(grads=grads), loss


def jit_like(state, step=train_step):
  """Jits a step whose new state has the shardings of the state."""
  shardings = jax.tree.map(lambda x: x.sharding, state)
  return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))


# -- Shardings of the state.


@mistake("replicated state", "Dense_2/kernel", mesh_shape=MODEL)
def regex_misses_a_layer(strategy, wrong):
  layers = "[01]" if wrong else r"\d"
  rules = ((f"Dense_{layers}/kernel", P(None, "model")),)
  state = create(strategy, rules=rules)
  return jit_like(state), state, batch_of(strategy)


RULES = (("kernel", P(None, "model")),)


@mistake("replicated state", "Dense_0/kernel", mesh_shape=MODEL)
def state_made_without_the_rules(strategy, wrong):
  state = create(strategy, rules=None if wrong else RULES)
  return jit_like(state), state, batch_of(strategy), RULES


@mistake("replicated state", "Dense_0/kernel", fast=True)
def slots_stay_replicated(strategy, wrong):
  """Flax's own state, FSDP by hand."""
  tx = optax.adam(1e-3)
  abstract = jax.eval_shape(MLP.init, jax.random.key(0), EXAMPLE)["params"]

  def place(tree, spec_of):
    return jax.tree.map(
      lambda x: batch_of(strategy, x.shape, spec_of(x), x.dtype), tree
    )

  whole = lambda x: P()
  slots = jax.eval_shape(tx.init, abstract)
  state = flax_train_state.TrainState(
    step=batch_of(strategy, (), P(), jnp.int32),
    apply_fn=MLP.apply,
    params=place(abstract, split_first),
    tx=tx,
    opt_state=place(slots, whole if wrong else split_first),
  )
  return jit_like(state), state, batch_of(strategy, (4096, 64))


# -- What the step does to the state.


@mistake("changed state", "Dense_0/kernel")
def new_parameters_are_replicated(strategy, wrong):
  state = create(strategy, rules=fs.FSDP(min_size=1024))
  shardings = jax.tree.map(lambda x: x.sharding, state.params)

  def step(state, x):
    new, loss = train_step(state, x)
    # As a leftover of a data-parallel program.
    params = jax.lax.with_sharding_constraint(
      new.params, sharding(strategy, P()) if wrong else shardings
    )
    return new.replace(params=params), loss

  jitted = jax.jit(step, donate_argnums=0) if wrong else jit_like(state, step)
  return jitted, state, batch_of(strategy, (4096, 64))


@mistake("donation", "Dense_0/kernel")
def state_is_not_donated(strategy, wrong):
  state = create(strategy)
  step = jax.jit(train_step) if wrong else jit_like(state)
  return step, state, batch_of(strategy)


# -- Data parallelism.


@mistake("batch", fast=True)
def batch_is_on_every_device(strategy, wrong):
  state = create(strategy)
  batch = batch_of(strategy, spec=P() if wrong else SPLIT)
  return jit_like(state), state, batch


@mistake("activations", here=True)
def fsdp_has_no_constraints(strategy, wrong):

  class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
      for _ in range(3):
        # here: fsdp_has_no_constraints
        x = nn.relu(nn.Dense(256, use_bias=False)(x))
        if not wrong:
          split = sharding(strategy, SPLIT)
          x = jax.lax.with_sharding_constraint(x, split)
      return x

  state = create(strategy, Model(), jnp.ones((1, 128)), rules="fsdp")
  return jit_like(state), state, batch_of(strategy, (64, 128))


@mistake("batch", here=True, fast=True)
def microbatches_by_a_plain_reshape(strategy, wrong):
  state = create(strategy)

  def step(state, x):
    if wrong:
      x = x.reshape(4, -1, 64)
    else:  # each device divides its own examples
      x = x.reshape(-1, 4, 64).swapaxes(0, 1)

    def accumulate(total, x):
      out = state.apply_fn({"params": jax.lax.stop_gradient(state.params)}, x)
      return total + out.sum(), None

    # here: microbatches_by_a_plain_reshape
    total, _ = jax.lax.scan(accumulate, 0.0, x)
    return state, total

  return jit_like(state, step), state, batch_of(strategy)


@mistake("activations", here=True)
def max_pool_gathers_the_batch(strategy, wrong):
  class Model(nn.Module):
    """Computes in float16: XLA gathers nothing in bfloat16 and float32."""

    @nn.compact
    def __call__(self, x):
      x = nn.relu(nn.Conv(32, (3, 3), dtype=jnp.float16)(x))
      if wrong:
        # here: max_pool_gathers_the_batch
        x = nn.max_pool(x, (2, 2), (2, 2))
      else:
        x = images.max_pool(x, 2, stride=2)
      return nn.Dense(8, dtype=jnp.float16)(x.reshape(x.shape[0], -1))

  state = create(strategy, Model(), jnp.ones((1, 8, 8, 1)))
  return jit_like(state), state, batch_of(strategy, (1024, 8, 8, 1))


# -- The program.


@mistake("float32 gradients", here=True, compilers=("tpu",))
def gradients_are_cast_before_their_sum(strategy, wrong):
  state = create(strategy, Mlp(dtype=jnp.bfloat16))

  @functools.partial(
    jax.shard_map,
    mesh=strategy.mesh,
    in_specs=(P(), SPLIT),
    out_specs=P(),
    check_vma=False,
  )
  def gradients(params, x):
    halves = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    grads = jax.grad(functools.partial(loss_of, state))(halves, x)
    if wrong:
      grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    # here: gradients_are_cast_before_their_sum
    return jax.lax.psum(grads, "replica")

  def step(state, x):
    return state.apply_gradients(grads=gradients(state.params, x)), None

  return jit_like(state, step), state, batch_of(strategy)


@mistake("host callback", here=True, compilers=("cpu",), fast=True)
def print_is_left_in_the_step(strategy, wrong):
  state = create(strategy)

  def step(state, x):
    new, loss = train_step(state, x)
    if wrong:
      # here: print_is_left_in_the_step
      jax.debug.print("loss {}", loss)
    return new, loss

  return jit_like(state, step), state, batch_of(strategy)


@mistake("large constant", here=True, fast=True)
def data_set_is_a_constant(strategy, wrong):
  state = create(strategy)
  whole = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)

  def step(state, x):
    if wrong:
      # here: data_set_is_a_constant
      x = x + whole
    return train_step(state, x)

  return jit_like(state, step), state, batch_of(strategy)


# -- The checks.

# So small that the arrays of the seeded programs count.
check = functools.partial(fs.check, min_bytes=2048)
# Their results depend on the compiler.
MOVING = ("activations", "batch", "float32 gradients")


def names_it(finding, name):
  """Returns whether a finding has the parameter, or the line."""
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
  lines = list(map(str.strip, source.read_text().splitlines()))
  marked = lines.index(f"# here: {name}") + 2
  file, _, line = finding.source.rpartition(":")
  # Versions of XLA name a collective after neighbouring operations.
  return file.endswith(source.name) and abs(int(line or 0) - marked) <= 2


@pytest.mark.parametrize("wrong", [True, False])
@pytest.mark.parametrize(
  ("compiler", "name"),
  [
    pytest.param(compiler, name, marks=mark)
    for name, mistake in MISTAKES.items()
    for compiler, mark in (
      ("cpu", [] if mistake.fast else pytest.mark.slow),
      ("tpu", pytest.mark.tpu),
    )
    if compiler == "cpu" or mistake.kind in MOVING
  ],
)
def test_check_names_mistake(compiler, name, wrong):
  mistake = MISTAKES[name]
  devices = "v5e:2x4" if compiler == "tpu" else None
  strategy = fs.Strategy(devices, mesh_shape=mistake.mesh_shape)
  step, state, batch, *rules = mistake.build(strategy, wrong)
  found = check(step, state, batch, rules=rules[0] if rules else None)
  if wrong and compiler in mistake.compilers:
    assert any(names_it(finding, name) for finding in found), str(found)
  else:
    assert not found.findings, str(found)


# FSDP; tensor parallelism. config_test.py has others, with the TPU compiler.
@pytest.mark.slow
@pytest.mark.parametrize(
  "name", ["digits_diloco", "lm_text_fsdp", "lm_text_tensor_parallel"]
)
def test_configs_have_no_findings(name):
  config = importlib.import_module(f"configs.{name}").get_config()
  if "lm" in name:
    config.model.num_layers = 2
  checked = config_lib.check(config)
  strategy = devices_lib.create_strategy(checked)
  setup = setup_lib.Setup(checked, strategy, shapes_only=True)
  step = step_lib.compile_step(setup.trace(), setup.arguments, setup_lib.BATCH)
  rules = rules_lib.from_config(checked.mesh.rules)
  # Arrays of a real model are larger, and so is what they move.
  found = check_lib.check_step(step, rules, 2**16)
  assert not found.findings, str(found)


def test_finding_is_ignored_or_raised():
  program = slots_stay_replicated(fs.Strategy(), True)
  with pytest.raises(ValueError, match="opt_state/0/mu/Dense_0/kernel"):
    check(*program, raise_on_finding=True)
  assert not check(*program, ignore=["replicated state"]).findings
  with pytest.raises(TypeError, match="ignore"):
    check(*program, ignore="mu")


def find(change, **fields):
  """Checks a step of one matrix, whose new state `change` changes."""

  def step(state, x):
    w = state["params"]["w"]
    grads = jax.grad(lambda w: ((x @ w) ** 2).mean())(w)
    return change({**state, "params": {"w": w - 0.1 * grads}})

  state = {"params": {"w": jnp.zeros((8, 8))}, "mask": None, **fields}
  jitted = jax.jit(step, donate_argnums=0)
  return fs.check(jitted, state, jnp.zeros((4, 8)), min_bytes=1)


@pytest.mark.parametrize(
  ("before", "after", "words"),
  [
    (0.0, jnp.float32, ("weak type", "strong type")),
    (jnp.zeros(3), lambda x: x[:2], ("(3,)", "(2,)")),
    (jnp.zeros(3), jnp.bfloat16, ("float32", "bfloat16")),
  ],
)
def test_changed_leaf_is_named(before, after, words):
  change = lambda state: {**state, "scale": after(state["scale"])}
  [finding] = find(change, scale=before)
  assert finding.kind == "changed state"
  assert finding.paths == ("scale",)
  assert all(word in finding.message for word in words)


def test_other_new_states():
  # A Python number is a leaf.
  found = find(lambda state: {**state, "step": state["step"] + 1}, step=0)
  assert not found.findings and not found.notes
  # Of a state with other leaves, these checks are left out.
  found = find(lambda state: {**state, "norm": jnp.zeros(())})
  assert not found.findings and len(found.notes) == 1


# -- Correct programs that look like mistakes.


@pytest.mark.slow
def test_fsdp_sums_microbatches_into_split_gradients():
  strategy = fs.Strategy()
  state = create(strategy, rules=fs.FSDP(min_size=1024))

  def step(state, x):
    def accumulate(total, x):
      grads = jax.grad(functools.partial(loss_of, state))(state.params, x)
      return jax.tree.map(jnp.add, total, grads), None

    x = x.reshape(-1, 4, x.shape[-1]).swapaxes(0, 1)
    zeros = jax.tree.map(jnp.zeros_like, state.params)
    grads, _ = jax.lax.scan(accumulate, zeros, x)
    return state.apply_gradients(grads=grads), None

  # Biases, which FSDP does not split, are smaller than this.
  batch = batch_of(strategy, (8192, 64))
  found = fs.check(jit_like(state, step), state, batch, min_bytes=2**12)
  assert not found.findings, str(found)


def test_rows_of_a_table_of_fsdp_are_looked_up():
  strategy = fs.Strategy()
  ids = jax.ShapeDtypeStruct((96,), jnp.int32)
  model = nn.Sequential([nn.Embed(512, 32), nn.Dense(16)])
  state = create(strategy, model, ids, rules="fsdp", sparse=["embedding"])

  def step(state, ids):
    return state.minimize(functools.partial(loss_of, state), ids)

  batch = strategy.shard_batch(ids)
  found = fs.check(jit_like(state, step), state, batch, min_bytes=2**12)
  assert not found.findings, str(found)
