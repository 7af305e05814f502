"""Compares plans: of several meshes, rules, wrappers, topologies or batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import itertools
import logging
from typing import Any

import jax
import ml_collections

from flaxshard.analysis import plan as plan_lib
from flaxshard.analysis.comparison import Candidate
from flaxshard.analysis.comparison import Comparison
from flaxshard.analysis.comparison import rank
from flaxshard.analysis.plan import Plan
from flaxshard.core import checks
from flaxshard.partitioning.topology import Topology
from flaxshard.strategy.strategy import Strategy

_log = logging.getLogger(__name__)

# What a combination raises that cannot be built, such as a batch that the
# replicas do not divide.
_ERRORS = (
  ValueError, TypeError, NotImplementedError, jax.errors.JaxRuntimeError,
)  # fmt: skip

Build = Callable[..., tuple[Any, ...]]


def compare_plans(
  plans: Mapping[str, Plan] | Build | ml_collections.ConfigDict,
  topologies: Sequence[str | Topology] | Mapping[str, Any] = (),
  *,
  meshes: Sequence[Any] | Mapping[str, Any] = (),
  **options: Sequence[Any] | Mapping[str, Any],
) -> Comparison:
  """Compares plans in one table, the best first.

  The plans are given, or they are made: of all combinations of topologies,
  meshes and further options. A combination that cannot be built, or does not
  fit, is a row that says why.

  Args:
    plans: Plans by name; or a function `build(strategy, **options)` that
      returns `(step, state, batch)`, the arguments of `fs.plan`; or a config,
      whose train step is planned.
    topologies: Names of topologies, such as `["v5e:4x4", "v5p:2x2x4"]`. By
      default the devices of this machine; a config needs some.
    meshes: The `mesh_shape` of each strategy, such as
      `{"replica": -1, "model": 4}`; for a config, fields of `config.mesh`. By
      default the strategy's or the config's own.
    **options: The values of each further argument of `build`, such as
      `rules=[None, fs.FSDP()]` or `batch_size=[256, 512]`; for a config the
      values of each field, such as `**{"model.embed_dim": [512, 1024]}`. Values
      may have names: `rules={"dp": None, "fsdp": fs.FSDP()}`.

  Returns:
    The comparison. `print` shows it, `.plot("plans.png")` draws it, and
    `.best.plan` is the plan of the best.

  Raises:
    TypeError: `plans` is none of these, or an option is not a sequence or a
      mapping.
    ValueError: An option is empty, topologies or options are given for plans
      that are made already, or no combination could be built.

  Example:
    >>> import flax.linen as nn, jax.numpy as jnp, optax
    >>> import flaxshard as fs
    >>> def build(strategy, batch_size):
    ...   x = jax.ShapeDtypeStruct((batch_size, 4), jnp.float32)
    ...   state = fs.create_train_state(
    ...     nn.Dense(2), jax.random.key(0), x, optax.adam(1e-3),
    ...     strategy=strategy, abstract=True)
    ...   def step(state, x):
    ...     return state.minimize(
    ...       lambda params: state.apply_fn({"params": params}, x).sum())
    ...   return step, state, strategy.shard_batch(x)
    >>> comparison = compare_plans(  # doctest: +SKIP
    ...   build, ["v5e:2x2"], batch_size=[8, 10])
    >>> print(comparison)  # doctest: +SKIP
  """
  if isinstance(plans, Mapping):
    if topologies or meshes or options:
      raise ValueError(
        "compare_plans: topologies, meshes and options need a build function "
        "or a config; plans that are made already have theirs."
      )
    return rank(
      Candidate({"plan": str(name)}, plan)
      for name, plan in _check_plans(plans).items()
    )
  for name in ("topology", "mesh"):
    if name in options:
      raise TypeError(
        f"compare_plans: {name} is no option."
        f"{checks.did_you_mean(name, ['topologies', 'meshes'])}"
      )
  if isinstance(plans, ml_collections.ConfigDict):
    if not topologies:
      raise ValueError("compare_plans: a config needs topologies.")
    make = _config_planner(plans)
  elif callable(plans):
    make = _build_planner(plans)
  else:
    raise TypeError(
      "compare_plans: plans must be plans by name, a build function or a "
      f"config, got {checks.describe(plans)}."
    )
  axes = {
    "topology": _label("topologies", topologies or {"this machine": None}),
    "mesh": _label_meshes(meshes or {"default": None}),
  } | {name: _label(name, values) for name, values in options.items()}
  candidates = list(_plan_all(make, axes))
  if all(candidate.plan is None for candidate in candidates):
    raise ValueError(
      "compare_plans: none of the combinations could be built: "
      f"{candidates[0].name}: {candidates[0].error}"
    )
  return rank(candidates)


def _plan_all(
  make: Callable[..., Plan], axes: Mapping[str, Mapping[str, Any]]
) -> Iterator[Candidate]:
  # What is the same in all rows is in none, but a row needs a name.
  shown = [name for name, values in axes.items() if len(values) > 1]
  combinations = list(itertools.product(*(v.items() for v in axes.values())))
  for i, combination in enumerate(combinations):
    labels = {n: k for n, (k, _) in zip(axes, combination, strict=True)}
    values = {n: value for n, (_, value) in zip(axes, combination, strict=True)}
    choices = {n: labels[n] for n in shown} or {"plan": labels["topology"]}
    _log.info("plan %d of %d: %s", i + 1, len(combinations), choices)
    try:
      yield Candidate(choices, make(**values))
    except _ERRORS as e:
      yield Candidate(choices, None, str(e).partition("\n")[0])


def _build_planner(build: Build) -> Callable[..., Plan]:
  def make(topology: Any, mesh: Any, **options: Any) -> Plan:
    return plan_lib.plan(*build(Strategy(topology, mesh_shape=mesh), **options))

  return make


def _config_planner(config: ml_collections.ConfigDict) -> Callable[..., Plan]:
  # The loop and its packages are only needed for configs.
  from flaxshard.analysis import config_plan

  def make(topology: str, mesh: Any, **fields: Any) -> Plan:
    fields |= {f"mesh.{name}": value for name, value in (mesh or {}).items()}
    changed = config_plan.replace_fields(config, fields)
    return config_plan.plan_config(changed, topology)

  config_plan.replace_fields(config, {})  # raises if the config is invalid
  return make


def _check_plans(plans: Mapping[str, Any]) -> dict[str, Plan]:
  if not plans:
    raise ValueError("compare_plans: there are no plans.")
  for name, plan in plans.items():
    if not isinstance(plan, Plan):
      raise TypeError(
        f"compare_plans: {name!r} must be a plan, the result of fs.plan, got "
        f"{checks.describe(plan)}."
      )
  return dict(plans)


def _label(
  name: str, values: Sequence[Any] | Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the values of an option by what the table calls them."""
  if isinstance(values, Mapping):
    labels = {str(label): value for label, value in values.items()}
  elif isinstance(values, Sequence) and not isinstance(values, str):
    labels = {_describe(value): value for value in values}
  else:
    raise TypeError(
      f"compare_plans: {name} must be the values to compare, a list or a dict "
      f"with their names, got {values!r}."
    )
  if not labels:
    raise ValueError(f"compare_plans: {name} has no values.")
  if len(labels) < len(values):
    raise ValueError(
      f"compare_plans: {name} has two values that look the same; give them "
      f"names in a dict: {values!r}."
    )
  return labels


def _label_meshes(values: Any) -> dict[str, Any]:
  labels = _label("meshes", values)
  for label, mesh in labels.items():
    if not isinstance(mesh, Mapping | None):
      raise TypeError(
        "compare_plans: meshes must be a list of mesh shapes, such as "
        "[{'replica': -1}, {'replica': 2, 'model': 2}], or a dict with their "
        f"names, got {mesh!r} for {label!r}."
      )
  return labels


def _describe(value: Any) -> str:
  if isinstance(value, Topology) and value.name is not None:
    return value.name
  if isinstance(value, Mapping):
    return " ".join(f"{k}={v}" for k, v in value.items())
  if isinstance(value, (tuple, list)):
    return ", ".join(map(_describe, value)) or "none"
  return "none" if value is None else str(value)
