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
from flaxshard.analysis import step_arrays
from flaxshard.analysis import step_facts
from flaxshard.analysis.findings import Finding
from flaxshard.analysis.findings import Findings
from flaxshard.core import checks
from flaxshard.core import trees
from flaxshard.core.policy import Policy
from flaxshard.partitioning import rules as rules_lib

PyTree = Any

_TOO_BIG = (
  "The step does not fit the devices: what its program moves and overwrites "
  "was not checked."
)
_NO_COMPILER = (
  "There is no compiler for these devices here: what the program moves and "
  "overwrites was not checked."
)
_NO_NEW_STATE = (
  "The step returns no state with the paths of the given one: its donation, "
  "shardings and dtypes were not checked."
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
  - `changed state`: the new state has another sharding, shape or (weak) dtype,
    so the second step compiles again.
  - `donation`: the new state does not overwrite the old one.
  - `repeated work`: all devices along a mesh axis compute the same.
  - `gathered parameter`: a parameter or slot is gathered whole. That FSDP
    gathers parameters where the model uses them is expected.
  - `activations`: devices exchange examples of the batch. Sums over examples,
    and tokens on the way to experts that are split, are expected.
  - `rematerialization`: the compiler gathers an array to change its sharding.
  - `float32`: a matrix product has float32 operands in a model of 16 bits.
  - `collective in loop`: a loop repeats a collective that could run once. That
    FSDP gathers parameters and cuts gradients in a loop over microbatches is
    expected.

  Collectives that the user wrote, in `jax.shard_map` or `Strategy.run`, are
  only looked at in loops.

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
  minimum = checks.integer("min_bytes", min_bytes, minimum=0)
  if isinstance(ignore, str) or not all(isinstance(x, str) for x in ignore):
    raise TypeError(f"ignore must be a sequence of texts, got {ignore!r}.")
  if not isinstance(policy, Policy | None):
    policy = Policy(policy)
  jitted = compilation_lib.jit_step(step, donate_argnums)
  arguments = (state, batch, *args)
  compilation = None
  if _can_compile(arguments):
    compilation = compilation_lib.compile_step(lambda: jitted.trace(*arguments))
  result = check_compiled(
    arguments,
    compilation,
    rules=rules,
    policy=policy,
    min_bytes=minimum,
    ignore=ignore,
  )
  if raises and result.findings:
    raise ValueError(f"check: {len(result)} findings:\n{result}")
  return result


def check_compiled(
  arguments: Sequence[PyTree],
  compilation: compilation_lib.Compilation | None,
  *,
  rules: rules_lib.Rules = None,
  policy: Policy | None = None,
  min_bytes: int = 2**20,
  ignore: Sequence[str] = (),
) -> Findings:
  """Checks a step that is compiled already; see `check`.

  Args:
    arguments: The arguments of the step, the state first.
    compilation: The compiled step; None if nothing can compile it here.
    rules: As in `check`, like the following three.
    policy: See there.
    min_bytes: See there.
    ignore: See there.
  """
  facts = step_facts.collect(arguments, compilation)
  params = step_arrays.params_of(arguments[0])
  moved = check_collectives.check_collectives(facts, min_bytes)
  # One cause, one finding: examples are moved, and that in a loop.
  lines = {finding.source for finding in moved if finding.source}
  loops = check_loops.check_loops(facts, min_bytes)
  found: list[Finding] = [
    *check_state.check_parameters(facts, params, rules, min_bytes),
    *check_state.check_slots(facts, min_bytes),
    *check_state.check_new_state(facts),
    *check_state.check_donation(facts, min_bytes),
    *check_state.check_axes(facts, min_bytes),
    *moved,
    *(finding for finding in loops if finding.source not in lines),
  ]
  if compilation is not None:
    found += check_precision.check_precision(
      compilation.traced.jaxpr, policy, min_bytes
    )
  kept = [x for x in found if not any(text in str(x) for text in ignore)]
  kept.sort(key=lambda finding: finding.nbytes, reverse=True)
  notes = []
  if compilation is None:
    notes.append(_NO_COMPILER)
  elif compilation.compiled is None:
    notes.append(_TOO_BIG)
  elif facts.outputs is None:
    notes.append(_NO_NEW_STATE)
  return Findings(tuple(kept), tuple(notes))


def _can_compile(arguments: Sequence[PyTree]) -> bool:
  """Returns whether the devices of the arguments are real, or a compiler's."""
  for leaf in jax.tree.leaves(tuple(arguments)):
    sharding = getattr(leaf, "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    if isinstance(mesh, jax.sharding.AbstractMesh):
      return False
    if isinstance(sharding, jax.sharding.Sharding):
      return isinstance(next(iter(sharding.device_set)), jax.Device)
  return True
