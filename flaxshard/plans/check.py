"""Checks a train step for mistakes that JAX compiles without a complaint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
import dataclasses
import math
import re
from typing import Any

import jax

from flaxshard.core import checks
from flaxshard.core import jaxprs
from flaxshard.core import source_lines
from flaxshard.partitioning import rules as rules_lib
from flaxshard.plans import findings
from flaxshard.plans import step as step_lib
from flaxshard.plans.findings import Finding
from flaxshard.plans.findings import Findings
from flaxshard.plans.step import Leaf
from flaxshard.plans.step import Step
from flaxshard.plans.traffic import Collective

PyTree = Any

_MOVING = ("all-gather", "all-to-all", "collective-permute")
_REDUCING = ("all-reduce", "reduce-scatter")
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
  if isinstance(ignore, str) or not all(isinstance(x, str) for x in ignore):
    raise TypeError(f"ignore must be a sequence of texts, got {ignore!r}.")
  compiled = step_lib.compile_call(step, state, batch, args, donate_argnums)
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
  new_state = step.new_state()
  found = [
    *_replicated_parameters(step, rules),
    *_replicated_slots(step),
    *_batch_on_every_device(step),
    *_moved_examples(step),
    *_float32_gradients(step),
    *_large_constants(step),
    *_callbacks(step),
  ]
  notes: tuple[str, ...] = ()
  if new_state is not None:
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


def _parameters(step: Step) -> dict[str, Leaf]:
  """Returns the parameters by their paths in `step.params`."""
  leaves = step.state_leaves
  if step.params is not step.state:
    leaves = [x for x in leaves if x.path.startswith("params/")]
  return {x.path.removeprefix("params/"): x for x in leaves}


def _replicated_parameters(
  step: Step, rules: rules_lib.Rules
) -> Iterator[Finding]:
  """Finds parameters that are whole against their rule, or unlike others."""
  mesh, params = step.mesh, list(_parameters(step).values())
  if mesh is None:
    return
  if rules is not None:
    specs = jax.tree.leaves(
      rules_lib.resolve(rules, mesh, step.params),
      is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec),
    )
    ruled = [
      dataclasses.replace(x, sharding=jax.sharding.NamedSharding(mesh, spec))
      for x, spec in zip(params, specs, strict=True)
    ]
    yield from findings.of_arrays(
      "replicated state",
      [x for x, y in zip(params, ruled, strict=True) if x.nbytes > y.nbytes],
      "not split as the rules say. Create the state with these rules: "
      "create_train_state(..., strategy=, rules=).",
    )
    return
  # Layers are numbered. If most of them are split, all should be.
  alike = lambda x: (re.sub(r"\d+", "#", x.path), x.shape)
  is_whole = lambda x: x.local_shape == x.shape
  layers: Counter[Any] = Counter()
  for x in params:
    layers[alike(x)] += -1 if is_whole(x) else 1
  yield from findings.of_arrays(
    "replicated state",
    [x for x in params if is_whole(x) and layers[alike(x)] > 0],
    "whole, although other layers are split. Add a rule that splits it, or "
    "pass rules= if it is meant so.",
  )


def _replicated_slots(step: Step) -> Iterator[Finding]:
  """Finds slots, and averages, that are split less than their parameter."""
  params = _parameters(step)
  if step.params is step.state:
    return
  whole = []
  for leaf in step.state_leaves:
    parts = leaf.path.split("/")
    ends = ("/".join(parts[start:]) for start in range(1, len(parts)))
    param = next((params[end] for end in ends if end in params), None)
    if (
      param is not None
      and leaf.shape == param.shape
      and leaf.local_size > param.local_size
    ):
      whole.append(leaf)
  yield from findings.of_arrays(
    "replicated state",
    whole,
    "not split as the parameter is. Initialize it with the sharding of the "
    "parameter: create_train_state(..., strategy=) does.",
  )


def _batch_on_every_device(step: Step) -> Iterator[Finding]:
  if step.mesh is None or step.compiled is None or not step.batch_leaves:
    return
  used = {
    axis for leaf in step.leaves for axes in leaf.axes_by_dim for axis in axes
  }
  # A step may split its batch inside.
  used.update(axis for one in step.collectives for axis in one.along)
  idle = [n for n, k in step.mesh.shape.items() if k > 1 and n not in used]
  if idle:
    number = math.prod(step.mesh.shape[name] for name in idle)
    yield Finding(
      "batch",
      f"nothing is split over the mesh axis {', '.join(map(repr, idle))}: "
      f"{number} devices compute the same. Split the batch over it, as "
      "strategy.shard_batch(batch) does.",
      nbytes=max(leaf.nbytes for leaf in step.batch_leaves),
    )


def _batch_axes(step: Step) -> frozenset[str]:
  """Returns the mesh axes that split the examples of the batch."""
  # Dimension 1 if the batches of several steps are stacked. An axis of one
  # device along dimension 0 says that the examples are there.
  for dim in range(2):
    axes = {
      axis
      for leaf in step.batch_leaves
      if dim < len(leaf.shape)
      for axis in leaf.axes_by_dim[dim]
    }
    if axes and step.mesh is not None:
      return frozenset(name for name in axes if step.mesh.shape[name] > 1)
  return frozenset()


def _over_batch(step: Step) -> list[Collective]:
  """Returns the collectives of the compiler along the axes of the batch."""
  axes = _batch_axes(step)
  return [
    one
    for one in step.collectives
    # In jax.shard_map the user writes the collectives. What stands in a
    # conditional is rare, such as a commit of AGN.
    if one.along and axes.issuperset(one.along)
    if not one.in_conditional and "shard_map" not in one.op_name
  ]


def _lengths(shape: Sequence[int]) -> tuple[int, ...]:
  """Returns the lengths of an array, however its dimensions are ordered."""
  return tuple(sorted(n for n in shape if n != 1))


def _gathers_state(step: Step) -> Callable[[Collective], bool]:
  """Returns whether a collective has an array as large as one of the state."""
  # Split parameters are gathered where the model uses them. Also of layers that
  # nn.scan stacks along the first dimension.
  sizes = {
    size // length
    for leaf in step.state_leaves
    for size in (math.prod(leaf.shape), leaf.local_size)
    for length in (1, *leaf.shape[:1])
    if length
  }
  return lambda one: any(array.size in sizes for array in one.results)


def _moved_examples(step: Step) -> Iterator[Finding]:
  """Finds examples, and activations of them, that devices exchange."""
  of_state = _gathers_state(step)
  moved = [
    one
    for one in _over_batch(step)
    if one.kind in _MOVING and not of_state(one)
  ]
  # As the batch, perhaps transposed: a program does not say what it moves.
  batch = {_lengths(leaf.local_shape) for leaf in step.batch_leaves}
  yield from findings.of_lines(
    "batch",
    [x for x in moved if any(_lengths(y.dims) in batch for y in x.operands)],
    "devices exchange examples of the batch. Split it along its first "
    "dimension alone, and do not mix this dimension with others in a reshape "
    "or an index.",
  )
  yield from findings.of_lines(
    "activations",
    [x for x in moved if x.kind == "all-gather" and "jvp(" in x.op_name],
    "devices exchange activations of the examples. Constrain them to the "
    "sharding of the batch with jax.lax.with_sharding_constraint.",
  )


def _float32_gradients(step: Step) -> Iterator[Finding]:
  if step.device.platform == "cpu":
    return
  yield from findings.of_lines(
    "float32 gradients",
    [
      dataclasses.replace(one, results=one.widened)
      for one in step.collectives
      if one.kind in _REDUCING and one.group_size > 1 and one.widened
    ],
    "float32 that was cast from bfloat16. Cast after the sum: half of the "
    "bytes are sent.",
  )


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
