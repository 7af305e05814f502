"""Compares plans: of several meshes, rules, wrappers, topologies or batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import html
import itertools
import logging
import math
from typing import Any

import jax
import ml_collections

from flaxshard.analysis import chips
from flaxshard.analysis import cost as cost_lib
from flaxshard.analysis import memory as memory_lib
from flaxshard.analysis import plan as plan_lib
from flaxshard.analysis import tables
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


@dataclasses.dataclass(frozen=True)
class Candidate:
  """One row of a comparison.

  Attributes:
    choices: What was chosen, by option: `{"rules": "fsdp"}`.
    plan: The plan; None if there is none.
    error: Why there is no plan.
  """

  choices: Mapping[str, str]
  plan: Plan | None
  error: str | None = None

  @property
  def name(self) -> str:
    """The choices in one line."""
    return ", ".join(value for value in self.choices.values() if value)

  @property
  def fits(self) -> bool | None:
    """Whether it fits the devices; None if unknown."""
    return False if self.plan is None else self.plan.memory.fits

  @property
  def step_seconds(self) -> float | None:
    """The roofline's time of a step."""
    if self.plan is None or self.plan.cost is None:
      return None
    return self.plan.cost.step_seconds

  @property
  def examples_per_second(self) -> float | None:
    """Examples per second of all devices at the roofline's time."""
    step = self.step_seconds
    if self.plan is None or self.plan.batch_size is None or not step:
      return None
    return self.plan.batch_size / step


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison:
  """Plans beside each other, the best first.

  First come those that fit, then those of which that is unknown, then those
  that do not fit, then those that cannot be built. Each group is ordered by
  examples per second at the roofline's time, or by the time of a step if the
  size of a batch is unknown, or by memory if the time is.

  `str()` is a table; a notebook shows it with a picture.

  Attributes:
    candidates: The plans, the best first.
  """

  candidates: tuple[Candidate, ...]

  @property
  def best(self) -> Candidate | None:
    """The first candidate, if it fits and its time is known."""
    first = self.candidates[0]
    return first if first.fits and first.step_seconds is not None else None

  def __getitem__(self, name: str) -> Plan:
    """Returns the plan of a name.

    Raises:
      KeyError: There is no such name, or its plan could not be made.
    """
    for candidate in self.candidates:
      if candidate.name == name:
        if candidate.plan is None:
          raise KeyError(f"{name!r} has no plan: {candidate.error}")
        return candidate.plan
    names = [candidate.name for candidate in self.candidates]
    raise KeyError(
      f"{name!r} is not one of {', '.join(map(repr, names))}."
      f"{checks.did_you_mean(name, names)}"
    )

  def __str__(self) -> str:
    return self._table().text()

  def __repr__(self) -> str:
    best = "none" if self.best is None else self.best.name
    return f"Comparison({len(self.candidates)} plans, best: {best})"

  def to_dict(self) -> list[dict[str, Any]]:
    """Returns the rows as dicts, lists, strings and numbers, as in JSON."""
    return [
      {
        "name": c.name,
        "choices": dict(c.choices),
        "best": c is self.best,
        "error": c.error,
        "plan": None if c.plan is None else c.plan.to_dict(),
      }
      for c in self.candidates
    ]

  def plot(self, path: str | None = None) -> Any:
    """Draws memory, traffic and time of the plans beside each other.

    Args:
      path: File to write a PNG to; None writes none.

    Returns:
      The `matplotlib.figure.Figure`, which a notebook shows.
    """
    # matplotlib is not needed for the table.
    from flaxshard.analysis import charts

    return charts.plot_plans(self._plans_by_name(), path)

  def _plans_by_name(self) -> dict[str, Plan]:
    return {c.name: c.plan for c in self.candidates if c.plan is not None}

  def _repr_html_(self) -> str:
    from flaxshard.analysis import charts

    note = "" if self.best is None else f"best: {html.escape(self.best.name)}"
    picture = charts.svg_if_possible(self._plans_by_name())
    return f"{self._table().html()}<p>{note}</p>{picture}"

  def _table(self) -> tables.Table:
    options = list(self.candidates[0].choices)
    header = [
      "", *options, "devices", "state", "temporaries", "peak", "of HBM", "ICI",
      "DCN", "step", "bound", "MFU", "examples/s", "",
    ]  # fmt: skip
    rows = [self._row(candidate, options) for candidate in self.candidates]
    # An empty column says nothing.
    kept = [
      i
      for i, name in enumerate(header)
      if i == 0 or name in options or any(row[i] for row in rows)
    ]
    first = 1 + len(options)
    return tables.Table(
      "plans per step and device, the best first"
      if self.best
      else "plans per step and device",
      [[row[i] for i in kept] for row in rows],
      header=[header[i] for i in kept],
      numbers=frozenset(
        position
        for position, i in enumerate(kept)
        if first < i < len(header) - 1 and header[i] != "bound"
      ),
      bold=frozenset({0} if self.best else ()),
    )

  def _row(self, candidate: Candidate, options: Sequence[str]) -> list[str]:
    mark = "*" if candidate is self.best else ""
    cells = [mark, *(candidate.choices[option] for option in options)]
    plan = candidate.plan
    if plan is None:
      return [*cells, *[""] * 11, candidate.error or ""]
    memory, cost = plan.memory, plan.cost
    at_least = ">=" if memory.peak_is_lower_bound else ""
    share = ""
    if memory.peak is not None and memory.hbm:
      share = f"{at_least}{memory.peak / memory.hbm:.0%}"
    over = f"over by {at_least}{memory_lib.format_bytes(memory.excess)}"
    cells += [
      plan.topology,
      memory_lib.format_bytes(memory.state_bytes),
      memory_lib.format_bytes(memory.temporaries),
      at_least + memory_lib.format_bytes(memory.peak),
      share,
    ]
    if cost is None:
      cells += [""] * 6
    else:
      rate = candidate.examples_per_second
      cells += [
        _sent(plan, "ici"),
        _sent(plan, "dcn"),
        cost_lib.format_seconds(cost.step_seconds),
        cost.bound or "",
        "" if cost.mfu is None else f"{cost.mfu:.1%}",
        "" if rate is None else chips.format_rate(rate, "").strip(),
      ]
    return [*cells, over if memory.fits is False else ""]


def _sent(plan: Plan, network: str) -> str:
  """Returns the bytes that a device sends over a network, as text."""
  assert plan.cost is not None
  times = plan.cost.link_times
  nbytes = sum(time.nbytes for time in times if time.network == network)
  return memory_lib.format_bytes(round(nbytes)) if nbytes else ""


def compare_plans(
  plans: Mapping[str, Plan] | Build | ml_collections.ConfigDict,
  topologies: Sequence[str | Topology] = (),
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
    topologies: Names of topologies, such as `"v5e:4x4"`.
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
    return _sort([Candidate({"plan": k}, p) for k, p in _check(plans).items()])
  axes: dict[str, dict[str, Any]] = {
    "topology": {_name(t): t for t in topologies}
  }
  axes["mesh"] = _label("meshes", meshes) if meshes else {"": None}
  if not axes["topology"]:
    if isinstance(plans, ml_collections.ConfigDict):
      raise ValueError("compare_plans: a config needs topologies.")
    # The devices of this machine.
    axes["topology"] = {"": None}
  axes |= {name: _label(name, values) for name, values in options.items()}
  if isinstance(plans, ml_collections.ConfigDict):
    make = _config_planner(plans)
  elif callable(plans):
    make = _build_planner(plans)
  else:
    raise TypeError(
      "compare_plans: plans must be plans by name, a build function or a "
      f"config, got {checks.describe(plans)}."
    )
  candidates = list(_plan_all(make, axes))
  if all(candidate.plan is None for candidate in candidates):
    raise ValueError(
      "compare_plans: none of the combinations could be built: "
      f"{candidates[0].name}: {candidates[0].error}"
    )
  return _sort(candidates)


def _plan_all(
  make: Callable[..., Plan], axes: Mapping[str, Mapping[str, Any]]
) -> Iterator[Candidate]:
  shown = [
    n for n, values in axes.items() if len(values) > 1 or n == "topology"
  ]
  combinations = list(itertools.product(*(v.items() for v in axes.values())))
  for i, combination in enumerate(combinations):
    labels = {n: k for n, (k, _) in zip(axes, combination, strict=True)}
    # The devices are a column of the table already.
    choices = {n: labels[n] for n in shown if len(axes[n]) > 1} or {
      "plan": labels["topology"]
    }
    _log.info("plan %d of %d: %s", i + 1, len(combinations), choices)
    values = {n: value for n, (_, value) in zip(axes, combination, strict=True)}
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
  from flaxshard.train import config as config_lib

  checked = config_lib.check(config)

  def make(topology: str, mesh: Any, **fields: Any) -> Plan:
    # `check` returns a copy. The result is checked again, with its new fields.
    changed = config_lib.check(checked).unlock()
    fields |= {f"mesh.{name}": value for name, value in (mesh or {}).items()}
    changed.update_from_flattened_dict(fields)
    return config_plan.plan_config(changed, topology)

  return make


def _check(plans: Mapping[str, Any]) -> dict[str, Plan]:
  if not plans:
    raise ValueError("compare_plans: there are no plans.")
  for name, plan in plans.items():
    if not isinstance(plan, Plan):
      raise TypeError(
        f"compare_plans: {name!r} must be a plan, the result of fs.plan, got "
        f"{checks.describe(plan)}."
      )
  return dict(plans)


def _name(topology: Any) -> str:
  return topology if isinstance(topology, str) else repr(topology)


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


def _describe(value: Any) -> str:
  if isinstance(value, Mapping):
    return " ".join(f"{k}={v}" for k, v in value.items())
  if isinstance(value, (tuple, list)):
    return ", ".join(map(_describe, value)) or "none"
  return "none" if value is None else str(value)


def _sort(candidates: list[Candidate]) -> Comparison:
  known = [c for c in candidates if c.plan is not None]
  by_rate = all(
    c.examples_per_second is not None for c in known if c.step_seconds
  )

  def key(candidate: Candidate) -> tuple[float, ...]:
    if candidate.plan is None:
      return (3, 0, 0)
    group = {True: 0, None: 1, False: 2}[candidate.fits]
    step, rate = candidate.step_seconds, candidate.examples_per_second
    time = math.inf if step is None else step
    if by_rate and rate is not None:
      time = 1 / rate
    memory = candidate.plan.memory
    nbytes = memory.state_bytes if memory.peak is None else memory.peak
    return (group, time, nbytes)

  return Comparison(tuple(sorted(candidates, key=key)))
