"""Checks a train step for mistakes that JAX compiles without a complaint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import math
from typing import Any

import jax

from flaxshard.core import checks
from flaxshard.core import jaxprs
from flaxshard.core import source_lines
from flaxshard.partitioning import rules as rules_lib
from flaxshard.plans import findings
from flaxshard.plans import sharding_checks
from flaxshard.plans import step as step_lib
from flaxshard.plans.findings import Finding
from flaxshard.plans.findings import Findings
from flaxshard.plans.step import Leaf
from flaxshard.plans.step import Step

PyTree = Any

_OF_ANY_SIZE = ("changed state", "host callback")
_CALLBACKS = ("debug_callback", "debug_print", "io_callback", "pure_callback")


def check(
  step: Callable[..., Any],
  state: PyTree,
  batch: PyTree,
  *args: PyTree,
  donate_argnums: int | Sequence[int] | None = None,
  rules: rules_lib.Rules = None,
  min_bytes: int = 2**20,
  ignore: Sequence[str] = (),
  raise_on_finding: bool = False,
) -> Findings:
  """Compiles a train step and names the mistakes that show in its program.

  Nothing is run, and nothing needs to be allocated: the arguments may be
  `jax.ShapeDtypeStruct`s, also on the devices of `Strategy("v5e:2x4")`, which
  this machine does not have. The kinds of findings are:

  - `batch`: all devices along a mesh axis get the same examples, or devices
    exchange the examples that they get.
  - `replicated state`: a parameter is not split as `rules` say or as in other
    layers, or a slot of the optimizer not as its parameter.
  - `float32 gradients`: devices sum float32 that was cast from bfloat16. Not on
    CPUs, which sum nothing narrower.
  - `activations`: devices gather activations along the axes of the batch.
  - `host callback`: the program calls Python on the host.
  - `donation`: the state is not donated.
  - `changed state`: the new state has another sharding, shape or (weak) dtype,
    so the second step compiles again.
  - `large constant`: an array is part of the program, not an argument.

  Args:
    step: `step(state, batch, *args)`, a function or the result of `jax.jit`,
      `nnx.jit` or `Strategy.jit`.
    state: The state, arrays or `jax.ShapeDtypeStruct`s with shardings.
    batch: The batch.
    *args: Further arguments of the step. Bind static ones before, with
      `functools.partial`.
    donate_argnums: Positions of the arguments whose memory the step may
      overwrite, for a function that is not jitted. None: the state.
    rules: How the parameters should be split, as in `create_train_state`. None:
      the parameters are compared with each other.
    min_bytes: Smallest number of bytes to report, on each device and in one
      call of the step. Callbacks and changes of the state are always reported.
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
    >>> import flaxshard as fs, flax.linen as nn, jax, jax.numpy as jnp, optax
    >>> strategy = fs.Strategy(devices=jax.devices()[:1])
    >>> state = fs.create_train_state(
    ...     nn.Dense(2), jax.random.key(0), jnp.ones((1, 3)), optax.sgd(0.1),
    ...     strategy=strategy, abstract=True)
    >>> def step(state, x):
    ...   loss = lambda p: state.apply_fn({"params": p}, x).sum()
    ...   return state.apply_gradients(grads=jax.grad(loss)(state.params))
    >>> batch = jax.ShapeDtypeStruct((8, 3), "float32")
    >>> print(fs.check(jax.jit(step), state, batch, min_bytes=1)[0].kind)
    donation
  """
  if isinstance(ignore, str) or not all(isinstance(x, str) for x in ignore):
    raise TypeError(f"ignore must be a sequence of texts, got {ignore!r}.")
  compiled = step_lib.compile_call(step, (state, batch, *args), donate_argnums)
  found = check_step(compiled, rules, min_bytes, ignore)
  if raise_on_finding and found:
    raise ValueError(f"check: {len(found)} findings:\n{found}")
  return found


def check_step(
  step: Step,
  rules: rules_lib.Rules = None,
  min_bytes: int = 2**20,
  ignore: Sequence[str] = (),
) -> Findings:
  """Checks a step that is compiled already; see `check`."""
  found = [
    *sharding_checks.find(step, rules),
    *_large_constants(step),
    *_callbacks(step),
  ]
  notes: tuple[str, ...] = ()
  if (new_state := step.new_state()) is not None:
    found += _new_state(step, new_state)
  elif step.compiled is None:
    notes = (
      "The step does not fit the devices: what its program moves and "
      "overwrites was not checked.",
    )
  else:
    notes = (
      "The step returns no state with the paths of the given one: its "
      "donation, shardings and dtypes were not checked.",
    )
  kept = [
    finding
    for finding in found
    if finding.nbytes >= min_bytes or finding.kind in _OF_ANY_SIZE
    if not any(text in str(finding) for text in ignore)
  ]
  kept.sort(key=lambda finding: finding.nbytes, reverse=True)
  return Findings(tuple(kept), notes)


def _large_constants(step: Step) -> Iterator[Finding]:
  programs = [step.traced.jaxpr]
  # Open ones have arguments in place of constants.
  is_closed = lambda x: hasattr(x, "consts")
  for eqn in jaxprs.equations(step.traced.jaxpr):
    params = jax.tree.leaves(list(eqn.params.values()), is_leaf=is_closed)
    programs += filter(is_closed, params)
  seen = set()
  for program in programs:
    for x, var in zip(program.consts, program.jaxpr.constvars, strict=True):
      if id(x) in seen or not hasattr(x, "shape"):
        continue
      seen.add(id(x))
      readers = (eqn for eqn in program.eqns if var in eqn.invars)
      lines = map(source_lines.equation_line, readers)
      nbytes = math.prod(x.shape) * x.dtype.itemsize
      yield Finding(
        "large constant",
        f"an array {x.dtype}{list(x.shape)} from outside of the step is part "
        f"of the program ({checks.format_bytes(nbytes)} on each device). "
        "Make it an argument of the step.",
        source=next(filter(None, lines), ""),
        nbytes=nbytes,
      )


def _callbacks(step: Step) -> Iterator[Finding]:
  lines = {
    (source_lines.equation_line(eqn), eqn.primitive.name)
    for eqn in jaxprs.equations(step.traced.jaxpr)
    if eqn.primitive.name in _CALLBACKS
  }
  for line, name in sorted(lines):
    yield Finding(
      "host callback",
      f"{name} calls Python on the host in each step, and devices may wait for "
      "it. Return the value from the step instead, or remove the call.",
      source=line,
    )


def _new_state(step: Step, new_state: Sequence[Leaf]) -> Iterator[Finding]:
  """Finds arrays of the state that are not donated, or come back otherwise."""
  kept: list[Leaf] = []
  changed: dict[str, list[Leaf]] = {}
  for before, after in zip(step.state_leaves, new_state, strict=True):
    if change := _describe_change(before, after):
      changed.setdefault(change, []).append(after)
    # What comes back otherwise cannot overwrite it; see `_describe_change`.
    if (before.shape, before.dtype) == (after.shape, after.dtype):
      kept += [] if before.donated else [before]
  yield from findings.of_arrays(
    "donation",
    kept,
    "not donated, so the old and the new state are in memory together. Jit "
    "the step with donate_argnums=0, or the position of the state.",
  )
  for change, leaves in changed.items():
    yield from findings.of_arrays("changed state", leaves, change)


def _describe_change(before: Leaf, after: Leaf) -> str:
  """Returns what an array was, what it came back as, and what to do; or ""."""
  old, new = before.sharding, after.sharding
  if before.shape != after.shape:
    change = f"the shape {before.shape} goes in, {after.shape}"
    remedy = "Return arrays of the same shapes; nothing can overwrite the old."
  elif before.dtype != after.dtype:
    change = f"{before.dtype} goes in, {after.dtype}"
    remedy = "Cast it back in the step; nothing can overwrite the old array."
  # PRNG keys: is_equivalent_to counts the dimensions of the array of keys.
  elif old and new and not old.is_equivalent_to(new, len(after.shape)):
    old, new = (getattr(x, "spec", x) for x in (old, new))
    change = f"the sharding {old} goes in, {new}"
    remedy = "Pass out_shardings= to jax.jit, with the shardings of the state."
  elif before.is_weak != after.is_weak:
    kinds = ("a strong type", "a weak type")
    change = f"{kinds[before.is_weak]} goes in, {kinds[after.is_weak]}"
    remedy = "Create it with a dtype, as in jnp.asarray(1.0, jnp.float32)."
  else:
    return ""
  return f"{change} comes back, so the second step compiles again. {remedy}"
