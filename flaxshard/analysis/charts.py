"""Pictures of plans: memory, traffic and time, as PNG or in a notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import importlib.util
import io
import textwrap
from typing import Any, Protocol

from flaxshard.analysis import traffic as traffic_lib
from flaxshard.analysis.cost import Cost
from flaxshard.analysis.memory import Memory
from flaxshard.compiled.collectives import Collective
from flaxshard.core import files

_COLORS = (
  "#3060a0", "#c05020", "#509040", "#8060b0", "#c0a030", "#409090", "#b05080",
  "#707070", "#90b0e0", "#e0a080",
)  # fmt: skip
_TEMPORARIES = "#b0b0b0"
_TIME_COLORS = {
  "compute": "#3060a0", "HBM": "#c0a030", "ICI": "#509040", "DCN": "#c05020",
}  # fmt: skip
_BYTE_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_TIME_UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
# Characters of a plan's name in a line.
_NAME_WIDTH = 24


class Figures(Protocol):
  """The figures of a `Plan` that a picture shows."""

  @property
  def memory(self) -> Memory:
    """Bytes per device."""

  @property
  def traffic(self) -> Sequence[Collective] | None:
    """Collectives of a step; None if unknown."""

  @property
  def period(self) -> int:
    """Steps between two commits of AGN."""

  @property
  def cost(self) -> Cost | None:
    """Times of a step; None if unknown."""


def plot_plans(plans: Mapping[str, Figures], path: str | None = None) -> Any:
  """Draws memory, traffic and time of plans, one row for each plan.

  Args:
    plans: The plans by name.
    path: File to write a PNG to; None writes none.

  Returns:
    The `matplotlib.figure.Figure`.

  Raises:
    ImportError: matplotlib is not installed.
    ValueError: There are no plans.
  """
  if importlib.util.find_spec("matplotlib") is None:
    raise ImportError(
      "A picture of plans needs matplotlib, not installed: pip install "
      "'flaxshard[train]'"
    )
  if not plans:
    raise ValueError("There is no plan to draw.")
  # Not pyplot, which picks a GUI backend and keeps every figure alive.
  from matplotlib import figure

  names = [
    textwrap.fill(name, _NAME_WIDTH, break_on_hyphens=False) for name in plans
  ]
  lines = sum(max(name.count("\n") + 1, 2) for name in names)
  canvas = figure.Figure(figsize=(13, 2.2 + 0.3 * lines), layout="constrained")
  memory, traffic, time = canvas.subplots(
    1, 3, sharey=True, width_ratios=(5, 4, 3)
  )
  found = list(plans.values())
  _draw_memory(memory, found)
  _draw_traffic(traffic, found)
  _draw_times(time, found)
  memory.set_yticks(range(len(names)), names)
  memory.set_ylim(len(names) - 0.5, -0.5)
  for ax in (memory, traffic, time):
    ax.grid(alpha=0.3, axis="x")
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_xlim(left=0)
  if path is not None:
    png = io.BytesIO()
    canvas.savefig(png, dpi=120, format="png")
    with files.add_filename_to_oserror(path):
      files.write_bytes(path, png.getvalue())
  return canvas


def svg_if_possible(plans: Mapping[str, Figures]) -> str:
  """Returns the picture as SVG; "" without plans or without matplotlib."""
  if not plans or importlib.util.find_spec("matplotlib") is None:
    return ""
  svg = io.StringIO()
  plot_plans(plans).savefig(svg, format="svg")
  # A page can have the element alone, not the header of an XML file.
  return svg.getvalue()[svg.getvalue().index("<svg") :]


def memory_parts(plan: Figures) -> dict[str, int]:
  """Returns the bytes of each part of a plan's memory, the state first.

  Args:
    plan: The plan. The parts add up to its peak, if that is known.
  """
  memory = plan.memory
  parts = dict(memory.state) | {"batch": memory.batch}
  if memory.temporaries is not None:
    others = (memory.outputs, memory.program, memory.padding, memory.arguments)
    rest = sum(n or 0 for n in others) - (memory.unused or 0)
    # Arguments that the program does not read are not on the device.
    parts["outputs, program, padding"] = max(rest, 0)
    parts["temporaries"] = memory.temporaries
  elif memory.peak is not None:
    parts["temporaries"] = max(memory.peak - sum(parts.values()), 0)
  return {name: nbytes for name, nbytes in parts.items() if nbytes}


def traffic_parts(plan: Figures) -> dict[tuple[str, str], float]:
  """Returns the bytes that a device sends, by network and purpose."""
  parts: dict[tuple[str, str], float] = {}
  for row in traffic_lib.rows_of(plan.traffic or (), plan.period):
    if row.link_bytes:
      key = (row.network.upper(), row.purpose)
      parts[key] = parts.get(key, 0.0) + row.link_bytes
  return parts


def _draw_memory(ax: Any, plans: list[Figures]) -> None:
  parts = _merge_small([memory_parts(plan) for plan in plans])
  largest = max(sum(p.values()) for p in parts)
  limits = {plan.memory.hbm for plan in plans if plan.memory.hbm}
  # HBM that is far from all bars would make them too short to read.
  shown = [limit for limit in limits if limit < 6 * largest]
  unit, size = _unit(max([largest, *shown]), _BYTE_UNITS)
  # The temporaries come last and are gray.
  names = [n for p in parts for n in p if n != "temporaries"]
  colors = dict(zip(dict.fromkeys(names), _COLORS * 3, strict=False))
  colors["temporaries"] = _TEMPORARIES
  _draw_stacks(ax, parts, colors, size)
  label = "HBM"
  for i, plan in enumerate(plans):
    memory = plan.memory
    if memory.hbm in shown:
      x = memory.hbm / size
      ax.plot([x, x], [i - 0.42, i + 0.42], color="#c02020", lw=2, label=label)
      # Lines whose labels begin so are not in the legend again.
      label = "_HBM"
    total = sum(parts[i].values()) / size
    ax.annotate(
      _memory_note(plan),
      (total, i),
      xytext=(4, 0),
      textcoords="offset points",
      va="center",
      fontsize=9,
      color="#c02020" if memory.fits is False else "black",
      # Readable where it stands on the line of the HBM.
      bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 1},
    )
  ax.set_title("memory per device")
  ax.set_xlabel(unit)
  # Space for the notes at the right of the longest bars.
  ax.set_xlim(right=max([largest, *shown]) / size * 1.25)
  _add_legend(ax)


def _merge_small(parts: list[dict[str, int]]) -> list[dict[str, int]]:
  """Adds parts that are too small to see in any plan into one."""
  least = max(sum(p.values()) for p in parts) / 300
  large = {name for p in parts for name, nbytes in p.items() if nbytes >= least}
  merged = []
  for p in parts:
    rest = sum(nbytes for name, nbytes in p.items() if name not in large)
    kept = {name: nbytes for name, nbytes in p.items() if name in large}
    merged.append(kept | ({"others": rest} if rest >= least else {}))
  return merged


def _memory_note(plan: Figures) -> str:
  memory = plan.memory
  if memory.peak is None:
    return "temporaries unknown"
  at_least = "≥ " if memory.peak_is_lower_bound else ""
  if memory.hbm is None:
    return ""
  share = f"{at_least}{memory.peak / memory.hbm:.0%} of HBM"
  return f"{share}: too large" if memory.fits is False else share


def _draw_traffic(ax: Any, plans: list[Figures]) -> None:
  parts = [traffic_parts(plan) for plan in plans]
  # A purpose has the same color on both networks. ICI comes first.
  keys = sorted({key for part in parts for key in part})
  purposes = dict.fromkeys(purpose for _, purpose in keys)
  by_purpose = dict(zip(purposes, _COLORS, strict=False))
  colors = {
    f"{network}: {purpose}": by_purpose[purpose]
    for network, purpose in sorted(keys, key=lambda key: key[0], reverse=True)
  }
  labeled = [
    {f"{n}: {p}": nbytes for (n, p), nbytes in part.items()} for part in parts
  ]
  largest = max((sum(p.values()) for p in labeled), default=0.0)
  unit, size = _unit(largest, _BYTE_UNITS)
  _draw_stacks(ax, labeled, colors, size, hatched="DCN")
  for i, plan in enumerate(plans):
    if not parts[i]:
      note = "unknown" if plan.traffic is None else "none"
      ax.annotate(note, (0, i), (4, 0), textcoords="offset points", va="center")
  ax.set_title("sent per step and device")
  ax.set_xlabel(unit)
  _add_legend(ax)


def _draw_times(ax: Any, plans: list[Figures]) -> None:
  parts = [
    {} if plan.cost is None else plan.cost.seconds_by_part for plan in plans
  ]
  known = [seconds for part in parts for seconds in part.values() if seconds]
  unit, size = _unit(max(known, default=0.0), _TIME_UNITS)
  names = [n for n in _TIME_COLORS if any(part.get(n) for part in parts)]
  height = 0.7 / max(len(names), 1)
  for k, name in enumerate(names):
    # One below the other: they can overlap in time, and the longest counts.
    offset = (k - (len(names) - 1) / 2) * height
    places = [i + offset for i in range(len(plans))]
    values = [(part.get(name) or 0) / size for part in parts]
    ax.barh(places, values, height, color=_TIME_COLORS[name], label=name)
  for i, plan in enumerate(plans):
    if plan.cost is None or plan.cost.step_seconds is None:
      ax.annotate(
        "unknown", (0, i), (4, 0), textcoords="offset points", va="center"
      )
  ax.set_title("time at peak rates")
  ax.set_xlabel(unit)
  _add_legend(ax)


def _draw_stacks(
  ax: Any,
  parts: list[dict[str, Any]],
  colors: Mapping[str, str],
  size: float,
  hatched: str = "no part",
) -> None:
  """Draws a bar for each dict, of one part after the other."""
  starts = [0.0] * len(parts)
  for name, color in colors.items():
    widths = [part.get(name, 0) / size for part in parts]
    if any(widths):
      hatch = "///" if name.startswith(hatched) else None
      ax.barh(
        range(len(parts)), widths, 0.6, starts, color=color, label=name,
        hatch=hatch, edgecolor="white", linewidth=0.5,
      )  # fmt: skip
    starts = [a + b for a, b in zip(starts, widths, strict=True)]


def _unit(
  largest: float, units: tuple[tuple[str, float], ...]
) -> tuple[str, float]:
  return next((u for u in units if largest >= u[1]), units[-1])


def _add_legend(ax: Any) -> None:
  if ax.get_legend_handles_labels()[0]:
    from matplotlib import transforms

    # Below: in the panel it would cover bars.
    below = transforms.offset_copy(
      ax.transAxes, ax.figure, y=-36, units="points"
    )
    ax.legend(
      frameon=False,
      fontsize=9,
      loc="upper center",
      bbox_to_anchor=(0.5, 0),
      bbox_transform=below,
      borderpad=0,
      ncols=3 if ax.get_title().startswith("memory") else 2,
    )
