"""fs.check: names the seeded mistakes, and is silent without them."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import seeded_mistakes
from seeded_mistakes import MISTAKES

import flaxshard as fs
from flaxshard.analysis import check as check_lib
from flaxshard.analysis import check_state
from flaxshard.analysis import compilation as compilation_lib
from flaxshard.analysis import step_facts
from flaxshard.analysis.findings import Finding
from flaxshard.analysis.findings import Findings
from flaxshard.core.policy import Policy
from flaxshard.partitioning import rules as rules_lib
from flaxshard.tasks import load
from flaxshard.train import config as config_lib
from flaxshard.train import devices as devices_lib
from flaxshard.train import program as program_lib

# So small that the arrays of the seeded programs count.
_MIN_BYTES = 2048
# Compiled in under half a second each; the others are slow.
_FAST = (
  "accumulation_in_the_global_view",
  "batch_is_on_every_device",
  "microbatches_by_a_plain_reshape",
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


def test_seeded_mistakes_are_at_least_twenty_on_each_compiler() -> None:
  for compiler in ("cpu", "tpu"):
    count = sum(compiler in x.compilers for x in MISTAKES.values())
    assert count >= 20, compiler


@pytest.mark.parametrize(("name", "wrong"), _cases("cpu"))
def test_check_names_mistake(name: str, wrong: bool) -> None:
  _assert_found(name, "cpu", wrong)


def _tpu_cases() -> list[Any]:
  """Returns the cases whose result depends on the compiler."""
  moving = ("activations", "gathered parameter", "rematerialization")
  cases = []
  for name, mistake in MISTAKES.items():
    # The traced program decides on these: one of them is enough.
    if mistake.kind == "float32" and name != "layer_has_no_dtype":
      continue
    # The compiler of the CPU alone has these: a sort compiles for long here.
    if name == "norm_of_flattened_parameters":
      continue
    cases.append((name, True))
    if mistake.kind in (*moving, "collective in loop"):
      cases.append((name, False))
  return cases


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


# AGN's replicas; images split over devices; FSDP; tensor parallelism.
_CONFIGS = (
  "digits",
  "digits_agn",
  "digits_diloco",
  "digits_spatial",
  "lm_text_fsdp",
  "lm_text_tensor_parallel",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", _CONFIGS)
def test_configs_have_no_findings(name: str) -> None:
  config = importlib.import_module(f"configs.{name}").get_config()
  if "lm" in name:
    config.model.num_layers = 2
  checked = config_lib.check(config)
  loaded = load.load(checked, shapes_only=True)
  program = program_lib.create_program(
    checked,
    devices_lib.create_strategy(checked),
    loaded,
  )
  compilation = compilation_lib.compile_step(program.trace)
  # Arrays of a real model are larger, and so is what they move.
  found = check_lib.check_compiled(
    program.arguments,
    compilation,
    rules=rules_lib.from_config(checked.mesh.rules),
    policy=Policy(checked.precision),
    min_bytes=2**16,
  )
  assert not found.findings, str(found)


def test_option_of_wrong_type_raises() -> None:
  program = MISTAKES["slots_stay_replicated"].build(jax.devices()[:8], True)
  check = functools.partial(
    fs.check, program.step, program.state, program.batch
  )
  with pytest.raises(ValueError, match="min_bytes"):
    check(min_bytes=-1)
  with pytest.raises(TypeError, match="ignore"):
    check(ignore="mu")
  with pytest.raises(TypeError, match="ignore"):
    check(ignore=[1])
  with pytest.raises((TypeError, ValueError), match="Policy"):
    check(policy=jnp.bfloat16)
  with pytest.raises(ValueError, match="donate_argnums"):
    check(donate_argnums=0)


def test_finding_is_ignored_or_raised() -> None:
  program = MISTAKES["slots_stay_replicated"].build(jax.devices()[:8], True)
  check = functools.partial(
    fs.check, program.step, program.state, program.batch, min_bytes=_MIN_BYTES
  )
  with pytest.raises(ValueError, match="opt_state/0/mu/Dense_0/kernel"):
    check(raise_on_finding=True)
  assert not check(ignore=["replicated slot"]).findings


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
    (jnp.zeros(3), lambda x: x[:2], ("[3]", "[2]")),
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


def test_step_without_compiler_is_checked_by_its_shardings() -> None:
  mesh = jax.sharding.AbstractMesh((4,), ("replica",))
  split = jax.sharding.NamedSharding(mesh, jax.P("replica"))
  whole = jax.sharding.NamedSharding(mesh, jax.P())
  facts = step_facts.collect(
    (
      {
        "params": {
          "w": jax.ShapeDtypeStruct((8, 8), "float32", sharding=split)
        },
        "mu": {"w": jax.ShapeDtypeStruct((8, 8), "float32", sharding=whole)},
      },
    )
  )
  [finding] = check_state.check_slots(facts, 1)
  assert finding.kind == "replicated slot"
  assert finding.paths == ("mu/w",)
  assert finding.nbytes == 256
