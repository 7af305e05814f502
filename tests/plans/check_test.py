"""fs.check: names the seeded mistakes, and is silent without them."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
import seeded_mistakes
from seeded_mistakes import MISTAKES

import flaxshard as fs
from flaxshard.partitioning import rules as rules_lib
from flaxshard.plans import check as check_lib
from flaxshard.plans import Finding
from flaxshard.plans import Findings
from flaxshard.plans import step as step_lib
from flaxshard.train import config as config_lib
from flaxshard.train import devices as devices_lib
from flaxshard.train import setup as setup_lib

# So small that the arrays of the seeded programs count.
_MIN_BYTES = 2048
# Compiled in under half a second each; the others are slow.
_FAST = (
  "batch_is_on_every_device",
  "data_set_is_a_constant",
  "microbatches_by_a_plain_reshape",
  "print_is_left_in_the_step",
  "slots_stay_replicated",
  "update_promotes_parameters",
)


@functools.cache
def _tpu_devices() -> Any:
  return list(fs.Strategy("v5e:2x4").mesh.devices.flat)


def _check(name: str, compiler: str, wrong: bool) -> Findings:
  devices = jax.devices()[:8] if compiler == "cpu" else _tpu_devices()
  program = MISTAKES[name].build(devices, wrong)
  return fs.check(
    program.step,
    program.state,
    program.batch,
    min_bytes=_MIN_BYTES,
    **program.options,
  )


def _names_it(finding: Finding, name: str) -> bool:
  mistake = MISTAKES[name]
  if finding.kind != mistake.kind:
    return False
  if mistake.here and not finding.source:
    # XLA of JAX 0.12 gives some collectives no line, on CPUs.
    return jax.__version_info__ >= (0, 12)
  if mistake.here:
    file, _, line = seeded_mistakes.marked_line(name).rpartition(":")
    found_file, _, found_line = finding.source.rpartition(":")
    # Versions of XLA name a collective after neighbouring operations.
    is_near = abs(int(found_line or 0) - int(line)) <= 2
    return found_file.endswith(file) and is_near
  paths = [path for path in finding.paths if mistake.parameter in path]
  return not mistake.parameter or (bool(paths) and paths[0] in str(finding))


def _cases(compiler: str) -> list[Any]:
  marks = {
    name: () if name in _FAST else (pytest.mark.slow,) for name in MISTAKES
  }
  return [
    pytest.param(name, wrong, id=f"{name}-{wrong}", marks=marks[name])
    for name in MISTAKES
    for wrong in (True, False)
  ]


@pytest.mark.parametrize(("name", "wrong"), _cases("cpu"))
def test_check_names_mistake(name: str, wrong: bool) -> None:
  _assert_found(name, "cpu", wrong)


def _tpu_cases() -> list[Any]:
  """Returns the cases whose result depends on the compiler."""
  moving = ("activations", "batch", "float32 gradients")
  return [
    (name, wrong)
    for name, mistake in MISTAKES.items()
    if mistake.kind in moving
    for wrong in (True, False)
  ]


@pytest.mark.tpu
@pytest.mark.parametrize(("name", "wrong"), _tpu_cases())
def test_check_names_mistake_on_tpu(name: str, wrong: bool) -> None:
  _assert_found(name, "tpu", wrong)


def _assert_found(name: str, compiler: str, wrong: bool) -> None:
  found = _check(name, compiler, wrong)
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


def _find(change: Any, **fields: Any) -> Findings:
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


class _Mlp(nn.Module):
  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    return nn.Dense(96)(nn.relu(nn.Dense(64)(x)))


@pytest.mark.slow
def test_fsdp_sums_microbatches_into_split_gradients() -> None:
  strategy = fs.Strategy(devices=jax.devices()[:8])
  x = jax.ShapeDtypeStruct((8192, 64), jnp.float32)
  rules = fs.FSDP(min_size=1024)
  state = fs.create_train_state(
    _Mlp(),
    jax.random.key(0),
    x,
    optax.adam(1e-3),
    strategy=strategy,
    rules=rules,
    abstract=True,
  )

  def step(state: Any, x: jax.Array) -> Any:
    def accumulate(total: Any, x: jax.Array) -> Any:
      loss = lambda p: (state.apply_fn({"params": p}, x) ** 2).mean()
      grads = jax.grad(loss)(state.params)
      return jax.tree.map(jnp.add, total, grads), None

    x = x.reshape(-1, 4, x.shape[-1]).swapaxes(0, 1)
    zeros = jax.tree.map(jnp.zeros_like, state.params)
    grads, _ = jax.lax.scan(accumulate, zeros, x)
    return state.apply_gradients(grads=grads)

  shardings = jax.tree.map(lambda x: x.sharding, state)
  jitted = jax.jit(step, donate_argnums=0, out_shardings=shardings)
  # Biases, which FSDP does not split, are smaller than this.
  batch = strategy.shard_batch(x)
  found = fs.check(jitted, state, batch, min_bytes=2**12)
  assert not found.findings, str(found)


def test_rows_of_a_table_of_fsdp_are_looked_up() -> None:
  strategy = fs.Strategy(devices=jax.devices()[:8])
  ids = jax.ShapeDtypeStruct((96,), jnp.int32)
  state = fs.create_train_state(
    nn.Sequential([nn.Embed(512, 32), nn.Dense(16)]),
    jax.random.key(0),
    ids,
    optax.adam(1e-3),
    strategy=strategy,
    rules="fsdp",
    sparse=["embedding"],
    abstract=True,
  )

  def step(state: Any, ids: jax.Array) -> Any:
    return state.minimize(
      lambda p: (state.apply_fn({"params": p}, ids) ** 2).mean()
    )

  batch = strategy.shard_batch(ids)
  step = jax.jit(step, donate_argnums=0)
  found = fs.check(step, state, batch, min_bytes=2**12)
  assert not found.findings, str(found)
