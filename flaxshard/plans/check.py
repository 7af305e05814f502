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
from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import source_lines
from flaxshard.partitioning import rules as rules_lib
from flaxshard.plans import step as step_lib
from flaxshard.plans.step import Leaf
from flaxshard.plans.step import Step
from flaxshard.plans.traffic import Collective

PyTree = Any

_MOVING = ("all-gather", "all-to-all", "collective-permute")
_REDUCING = ("all-reduce", "reduce-scatter")
_OF_ANY_SIZE = ("changed state", "host callback")
_CALLBACKS = ("debug_callback", "debug_print", "io_callback", "pure_callback")
# Paths that a sentence names before it counts the others.
_MAX_LISTED = 3


@dataclasses.dataclass(frozen=True)
class Finding:
  """One likely mistake in a compiled step.

  Attributes:
    kind: "batch", "replicated state", "float32 gradients", "activations",
      "host callback", "donation", "changed state" or "large constant".
    message: What was found and what to do about it.
    paths: Paths of the arrays of the state that it concerns, such as
      `params/Dense_0/kernel`; empty if it concerns none.
    source: The user's line, such as `model.py:12`, or "".
    nbytes: Bytes on each device that the mistake costs: of memory, or, for a
      collective, of its results in one call of the step.
  """

  kind: str
  message: str
  paths: tuple[str, ...] = ()
  source: str = ""
  nbytes: int = 0

  def __str__(self) -> str:
    where = f"{self.source}: " if self.source else ""
    return f"{where}{self.kind}: {self.message}"


@dataclasses.dataclass(frozen=True)
class Findings:
  """All findings of a step, the most expensive first.

  `str()` has a line for each. A result without findings is false.

  Attributes:
    findings: The findings.
    notes: Sentences on what could not be checked.
  """

  findings: tuple[Finding, ...]
  notes: tuple[str, ...] = ()

  def __iter__(self) -> Iterator[Finding]:
    return iter(self.findings)

  def __len__(self) -> int:
    return len(self.findings)

  def __getitem__(self, index: int) -> Finding:
    return self.findings[index]

  def __str__(self) -> str:
    lines = [f"{i}. {x}" for i, x in enumerate(self.findings, 1)]
    return "\n".join([*(lines or ["no findings"]), *self.notes])


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


def _of_arrays(
  kind: str, leaves: Sequence[Leaf], message: str
) -> Iterator[Finding]:
  """Yields one finding for all leaves, the largest first; none for none."""
  if not leaves:
    return
  ordered = sorted(leaves, key=lambda leaf: leaf.nbytes, reverse=True)
  paths = tuple(leaf.path for leaf in ordered)
  listed = checks.listed(paths, _MAX_LISTED)
  nbytes = sum(leaf.nbytes for leaf in ordered)
  yield Finding(kind, _with_size(listed, nbytes, message), paths, "", nbytes)


def _of_lines(
  kind: str, moved: Sequence[Collective], message: str
) -> Iterator[Finding]:
  """Yields one finding for each of the user's lines."""
  lines: dict[str, list[Collective]] = {}
  for one in moved:
    lines.setdefault(one.source, []).append(one)
  for source, group in lines.items():
    kinds = " and ".join(sorted({one.kind for one in group}))
    axes = ", ".join(
      sorted({repr(axis) for one in group for axis in one.along})
    )
    nbytes = int(sum(x.executions * x.result_bytes for x in group))
    text = _with_size(f"{kinds} over {axes}", nbytes, message)
    if not source:
      text += f" (In {group[0].op_name or 'the program'}.)"
    yield Finding(kind, text, source=source, nbytes=nbytes)


def _with_size(what: str, nbytes: int, message: str) -> str:
  return f"{what} ({checks.format_bytes(nbytes)} on each device): {message}"


def _parameters(step: Step) -> list[Leaf]:
  """Returns the leaves of the state that are those of `step.params`."""
  if step.params is step.state:
    return step.state_leaves
  return [x for x in step.state_leaves if x.path.startswith("params/")]


def _replicated_parameters(
  step: Step, rules: rules_lib.Rules
) -> Iterator[Finding]:
  """Finds parameters that are whole against their rule, or unlike others."""
  mesh, params = step.mesh, _parameters(step)
  if mesh is None:
    return
  if rules is not None:
    specs = jax.tree.leaves(
      rules_lib.resolve(rules, mesh, step.params),
      is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec),
    )
    sharded = lambda spec: jax.sharding.NamedSharding(mesh, spec)
    yield from _of_arrays(
      "replicated state",
      [
        x
        for x, spec in zip(params, specs, strict=True)
        if x.nbytes > dataclasses.replace(x, sharding=sharded(spec)).nbytes
      ],
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
  yield from _of_arrays(
    "replicated state",
    [x for x in params if is_whole(x) and layers[alike(x)] > 0],
    "whole, although other layers are split. Add a rule that splits it, or "
    "pass rules= if it is meant so.",
  )


def _replicated_slots(step: Step) -> Iterator[Finding]:
  """Finds slots, and averages, that are split less than their parameter."""
  if step.params is step.state:
    return
  paths = [path for path, _ in jax.tree.leaves_with_path(step.params)]
  params = dict(zip(paths, _parameters(step), strict=True))
  owners = opt_state_lib.parameters_of(step.state, step.params)
  yield from _of_arrays(
    "replicated state",
    [
      leaf
      for leaf, path in zip(step.state_leaves, owners, strict=True)
      if path is not None
      and leaf.shape == params[path].shape
      and leaf.local_size > params[path].local_size
    ],
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


def _lengths(shape: Sequence[int]) -> tuple[int, ...]:
  """Returns the lengths of an array, however its dimensions are ordered."""
  return tuple(sorted(n for n in shape if n != 1))


def _moved_examples(step: Step) -> Iterator[Finding]:
  """Finds examples, and activations of them, that devices exchange."""
  axes = _batch_axes(step)
  # What is as large as an array of the state is none of them: split parameters
  # are gathered where the model uses them, also of layers that nn.scan stacks
  # along the first dimension.
  sizes = {
    size // length
    for leaf in step.state_leaves
    for size in (math.prod(leaf.shape), leaf.local_size)
    for length in (1, *leaf.shape[:1])
    if length
  }
  moved = [
    one
    for one in step.collectives
    if one.kind in _MOVING and one.along and axes.issuperset(one.along)
    # In jax.shard_map the user writes the collectives. What stands in a
    # conditional is rare, such as a commit of AGN.
    if not one.in_conditional and "shard_map" not in one.op_name
    if not any(array.size in sizes for array in one.results)
  ]
  # As the batch, perhaps transposed: a program does not say what it moves.
  batch = {_lengths(leaf.local_shape) for leaf in step.batch_leaves}
  yield from _of_lines(
    "batch",
    [x for x in moved if any(_lengths(y.dims) in batch for y in x.operands)],
    "devices exchange examples of the batch. Split it along its first "
    "dimension alone, and do not mix this dimension with others in a reshape "
    "or an index.",
  )
  yield from _of_lines(
    "activations",
    [x for x in moved if x.kind == "all-gather" and "jvp(" in x.op_name],
    "devices exchange activations of the examples. Constrain them to the "
    "sharding of the batch with jax.lax.with_sharding_constraint.",
  )


def _float32_gradients(step: Step) -> Iterator[Finding]:
  if step.device.platform == "cpu":
    return
  yield from _of_lines(
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
  yield from _of_arrays(
    "donation",
    kept,
    "not donated, so the old and the new state are in memory together. Jit "
    "the step with donate_argnums=0, or the position of the state.",
  )
  for change, leaves in changed.items():
    yield from _of_arrays("changed state", leaves, change)


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
