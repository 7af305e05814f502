"""Checks a train step for mistakes that JAX compiles without a complaint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from flaxshard.analysis import check_collectives
from flaxshard.analysis import check_loops
from flaxshard.analysis import check_precision
from flaxshard.analysis import check_state
from flaxshard.analysis import compilation as compilation_lib
from flaxshard.analysis import step_facts
from flaxshard.analysis.findings import Finding
from flaxshard.analysis.findings import Findings
from flaxshard.core import checks
from flaxshard.core import trees
from flaxshard.core.policy import Policy
from flaxshard.partitioning import rules as rules_lib

PyTree = Any

TOO_BIG = (
  "The step does not fit the devices: what its program moves and overwrites "
  "was not checked."
)
_NO_COMPILER = (
  "There is no compiler for these devices here: what the program moves and "
  "overwrites was not checked."
)


def check(
  step: Callable[..., Any],
  state: PyTree,
  batch: PyTree,
  *args: PyTree,
  donate_argnums: int | Sequence[int] | None = None,
  rules: rules_lib.Rules = None,
  policy: Policy | str | None = None,
  min_bytes: int = 2**20,
  ignore: Sequence[str] = (),
  raise_on_finding: bool = False,
) -> Findings:
  """Compiles a train step and names the mistakes that show in its program.

  Nothing is run, and nothing needs to be allocated: the arguments may be
  `jax.ShapeDtypeStruct`s, also on the devices of `Strategy("v5e:2x4")`, which
  this machine does not have. The kinds of findings are:

  - `replicated parameter`, `replicated slot`, `misplaced slot`: an array of the
    state is not split as its rule says, as the parameter of the same name in
    other layers, or as the parameter that it belongs to.
  - `changed state`: the new state has another sharding or dtype, so the second
    step compiles again.
  - `donation`: the new state does not overwrite the old one.
  - `repeated work`: all devices along a mesh axis compute the same.
  - `gathered parameter`: a parameter or slot is gathered whole. That FSDP
    gathers parameters where the model uses them is expected.
  - `activations`: devices exchange examples of the batch.
  - `rematerialization`: the compiler gathers an array to change its sharding.
  - `float32`: a matrix product has float32 operands in a model of 16 bits.
  - `collective in loop`: a loop repeats a collective that could run once.

  Collectives that the user wrote, in `jax.shard_map` or `Strategy.run`, are
  only looked at in loops.

  Args:
    step: `step(state, batch, *args)`, a function or the result of `jax.jit` or
      `Strategy.jit`.
    state: The state, arrays or `jax.ShapeDtypeStruct`s with shardings.
    batch: The batch.
    *args: Further arguments of the step. Bind static ones before, with
      `functools.partial`.
    donate_argnums: Positions of the arguments whose memory the step may
      overwrite, for a function that is not jitted. None: the state.
    rules: How the parameters should be split, as in `create_train_state`. None:
      the parameters are compared with each other.
    policy: The model's precision, or its name, such as `"mixed_bfloat16"`.
      None: the precision of most of its matrix products.
    min_bytes: Smallest number of bytes to report, on each device and in one
      call of the step.
    ignore: Texts of which a finding that is meant has one in its `str()`, such
      as `"contrastive.py"` or `"params/embed"`.
    raise_on_finding: Whether a finding is an error.

  Returns:
    The findings, the most expensive first. Their `str()` is a list of
    sentences, each with what to do.

  Raises:
    TypeError: `step` is not a function, or an argument has leaves that are not
      arrays.
    ValueError: An option is invalid; or there is a finding, with
      `raise_on_finding=True`.

  Example:
    >>> import flax.linen as nn, flaxshard as fs, jax.numpy as jnp, optax
    >>> strategy = fs.Strategy(devices=jax.devices()[:1])
    >>> state = fs.create_train_state(
    ...     nn.Dense(2), jax.random.key(0), jnp.ones((1, 3)), optax.sgd(0.1),
    ...     strategy=strategy, abstract=True)
    >>> def step(state, x):
    ...   loss = lambda p: state.apply_fn({"params": p}, x).sum()
    ...   return state.apply_gradients(grads=jax.grad(loss)(state.params))
    >>> batch = jax.ShapeDtypeStruct((8, 3), "float32")
    >>> print(check(jax.jit(step), state, batch, min_bytes=1)[0].kind)
    donation
  """
  for name, tree in {"state": state, "batch": batch, "args": args}.items():
    trees.check_arrays(name, tree)
  raises = checks.boolean("raise_on_finding", raise_on_finding)
  jitted = _jit(step, donate_argnums)
  arguments = (state, batch, *args)
  result = check_traced(
    lambda: jitted.trace(*arguments),
    arguments,
    rules=rules,
    policy=policy,
    min_bytes=min_bytes,
    ignore=ignore,
  )
  if raises and result.findings:
    raise ValueError(f"check: {len(result)} findings:\n{result}")
  return result


def check_traced(
  trace: Callable[[], jax.stages.Traced],
  arguments: Sequence[PyTree],
  **options: Any,
) -> Findings:
  """Compiles and checks a traced step; see `check`.

  Args:
    trace: Returns the traced step.
    arguments: The arguments that it was traced for; the first is the state.
    **options: `rules`, `policy`, `min_bytes`, `ignore`, as in `check`.
  """
  if not _can_compile(arguments):
    return check_compiled(arguments, notes=(_NO_COMPILER,), **options)
  compilation = compilation_lib.compile_step(trace)
  return check_compiled(
    arguments,
    compilation.compiled,
    compilation.traced.jaxpr,
    notes=() if compilation.compiled is not None else (TOO_BIG,),
    **options,
  )


def check_compiled(
  arguments: Sequence[PyTree],
  compiled: Any = None,
  jaxpr: Any = None,
  *,
  rules: rules_lib.Rules = None,
  policy: Policy | str | None = None,
  min_bytes: int = 2**20,
  ignore: Sequence[str] = (),
  notes: Sequence[str] = (),
) -> Findings:
  """Checks a step that is compiled already; see `check`.

  Args:
    arguments: The arguments of the step, the state first.
    compiled: The compiled step; None if it could not be compiled.
    jaxpr: The traced step (`jitted.trace(*args).jaxpr`); None if unknown.
    rules: As in `check`, like the following three.
    policy: See there.
    min_bytes: See there.
    ignore: See there.
    notes: Sentences on what could not be checked.
  """
  minimum = checks.integer("min_bytes", min_bytes, minimum=0)
  if isinstance(policy, str):
    policy = Policy(policy)
  if isinstance(ignore, str):
    raise TypeError(f"ignore must be a sequence of texts, got {ignore!r}.")
  facts = step_facts.collect(arguments, compiled)
  params = step_facts.params_of(arguments[0])
  moved = check_collectives.check_collectives(facts, minimum)
  # One cause, one finding: examples are moved, and that in a loop.
  lines = {finding.source for finding in moved}
  loops = check_loops.check_loops(facts, minimum)
  found: list[Finding] = [
    *check_state.check_parameters(facts, params, rules, minimum),
    *check_state.check_slots(facts, minimum),
    *check_state.check_new_state(facts),
    *check_state.check_donation(facts, minimum),
    *check_state.check_axes(facts, minimum),
    *moved,
    *(finding for finding in loops if finding.source not in lines),
  ]
  if jaxpr is not None:
    found += check_precision.check_precision(jaxpr, policy, minimum)
  kept = [x for x in found if not any(text in str(x) for text in ignore)]
  kept.sort(key=lambda finding: finding.nbytes, reverse=True)
  return Findings(tuple(kept), tuple(notes))


def _jit(step: Any, donate_argnums: int | Sequence[int] | None) -> Any:
  if not callable(step):
    raise TypeError(f"step must be a function, got {step!r}.")
  if not callable(getattr(step, "trace", None)):
    donated = 0 if donate_argnums is None else donate_argnums
    return jax.jit(step, donate_argnums=donated)
  if donate_argnums is not None:
    raise ValueError(
      f"donate_argnums={donate_argnums!r} must be None for a step that is "
      "jitted already: give it to jax.jit or Strategy.jit."
    )
  return step


def _can_compile(arguments: Sequence[PyTree]) -> bool:
  """Returns whether the devices of the arguments are real, or a compiler's."""
  for leaf in jax.tree.leaves(tuple(arguments)):
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, jax.sharding.Sharding):
      return isinstance(next(iter(sharding.device_set)), jax.Device)
  return True
