"""The cost of a step: arithmetic, HBM, links, and the roofline of the three.

The roofline is the time of a step in which arithmetic, HBM and each network
work at their peak rate and at the same time: the longest of their times. No
step is faster; one whose program cannot overlap them takes up to their sum.
Source: S. Williams et al., Roofline, https://doi.org/10.1145/1498765.1498785
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
import dataclasses
from typing import Any

import jax

from flaxshard.analysis import chips
from flaxshard.analysis import links
from flaxshard.analysis import model_flops as model_flops_lib
from flaxshard.analysis import tables
from flaxshard.compiled import hlo
from flaxshard.compiled import work as work_lib
from flaxshard.compiled.collectives import Collective
from flaxshard.state import summary

# Properties of a `Cost` that are results of its fields.
RESULTS = (
  "ici_seconds", "dcn_seconds", "link_seconds", "step_seconds",
  "serial_seconds", "bound", "mfu",
)  # fmt: skip

# From HLO's dtypes of operands to the rates of a chip.
_RATES = {
  "bf16": "bf16", "f16": "f16", "f32": "f32", "s8": "int8", "u8": "int8",
  "f8e4m3fn": "fp8", "f8e4m3": "fp8", "f8e5m2": "fp8",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Cost:
  """The cost of one step on one device. None stands for unknown.

  Attributes:
    chip: The chip, such as "TPU v5e".
    flops: Operations of matrix products and convolutions that the program runs,
      by the dtype of their operands.
    model_flops: Operations of the matrix products of the step as it is written,
      divided by the devices: without those that rematerialization or copies of
      the same work on several devices repeat.
    hbm_bytes: Bytes read from and written to HBM.
    link_times: Bytes and seconds on the links, by mesh axes and network.
    compute_seconds: Seconds of the matrix products at the peak rates.
    hbm_seconds: Seconds of the HBM traffic at the peak bandwidth.
    peak_flops: Peak FLOP/s of a device for the dtype of most operations.
    notes: Sentences on what the figures leave out.
  """

  chip: str | None
  flops: Mapping[str, float]
  model_flops: float | None
  hbm_bytes: float
  link_times: tuple[links.LinkTime, ...]
  compute_seconds: float | None
  hbm_seconds: float | None
  peak_flops: float | None
  notes: tuple[str, ...] = ()

  @property
  def total_flops(self) -> float:
    """Operations of all dtypes."""
    return sum(self.flops.values())

  def network_seconds(self, network: str) -> float | None:
    """Returns the seconds on the links of a network; None: unknown.

    Args:
      network: "ici", between the chips of a slice, or "dcn", between slices.
    """
    times = [t.seconds for t in self.link_times if t.network == network]
    return None if None in times else float(sum(t for t in times if t))

  @property
  def ici_seconds(self) -> float | None:
    """Seconds on the links between the chips of a slice."""
    return self.network_seconds("ici")

  @property
  def dcn_seconds(self) -> float | None:
    """Seconds on the network between slices."""
    return self.network_seconds("dcn")

  @property
  def link_seconds(self) -> float | None:
    """Seconds on all networks together."""
    ici, dcn = self.ici_seconds, self.dcn_seconds
    return None if ici is None or dcn is None else ici + dcn

  @property
  def seconds_by_part(self) -> dict[str, float | None]:
    """Seconds of "compute", "HBM", "ICI" and "DCN"."""
    return {
      "compute": self.compute_seconds,
      "HBM": self.hbm_seconds,
      "ICI": self.ici_seconds,
      "DCN": self.dcn_seconds,
    }

  @property
  def step_seconds(self) -> float | None:
    """The roofline's time of a step, a lower bound; None: a part is unknown."""
    parts = self.seconds_by_part.values()
    return None if None in parts else max(p for p in parts if p is not None)

  @property
  def serial_seconds(self) -> float | None:
    """Seconds of a step that overlaps nothing: the sum of all parts."""
    parts = self.seconds_by_part.values()
    return None if None in parts else sum(p for p in parts if p is not None)

  @property
  def bound(self) -> str | None:
    """The part that takes longest: "compute", "HBM", "ICI" or "DCN"."""
    step = self.step_seconds
    if not step:
      return None
    return next(k for k, v in self.seconds_by_part.items() if v == step)

  @property
  def mfu(self) -> float | None:
    """Model FLOPs utilization at the roofline's time: an upper bound."""
    step = self.step_seconds
    if not step or self.model_flops is None or not self.peak_flops:
      return None
    return self.model_flops / (step * self.peak_flops)


def read_cost(
  compiled: hlo.HasText | hlo.Program | str,
  mesh: jax.sharding.Mesh,
  traffic: Iterable[Collective],
  *,
  jaxpr: Any = None,
  period: float = 1,
) -> Cost:
  """Returns what one call of a compiled step costs each device.

  Args:
    compiled: The compiled step, or its HLO text.
    mesh: The mesh that it was compiled for.
    traffic: Its collectives.
    jaxpr: The traced step, for the model FLOPs; None leaves them unknown.
    period: Calls for each commit of AGN. What AGN's conditional runs counts at
      one call of a period.

  Example:
    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> x = jax.ShapeDtypeStruct((8, 8), "float32")
    >>> compiled = jax.jit(lambda x: x @ x).lower(x).compile()
    >>> cost = read_cost(compiled, mesh, ())
    >>> cost.total_flops, cost.step_seconds  # a CPU's speed is not known
    (1024.0, None)
  """
  program = hlo.parse(compiled)
  device = chips.find_device(mesh.devices.flat[0])
  work = work_lib.count_work(program, period)
  model = None if jaxpr is None else model_flops_lib.count_flops(jaxpr)
  dtype = max(work.flops, key=lambda k: work.flops[k], default="bf16")
  bandwidth = None if device is None else device.hbm_bandwidth
  return Cost(
    chip=None if device is None else device.chip.name,
    flops=work.flops,
    model_flops=None if model is None else model.model / mesh.devices.size,
    hbm_bytes=work.hbm_bytes,
    link_times=links.link_times(traffic, mesh, device, period),
    compute_seconds=_compute_seconds(work.flops, device),
    hbm_seconds=work.hbm_bytes / bandwidth if bandwidth else None,
    peak_flops=None if device is None else device.flops(_RATES.get(dtype, "")),
    notes=tuple(_notes(work, model, device)),
  )


def table_of(cost: Cost) -> tables.Table:
  """Returns the cost of a step as a table."""
  rows = [
    (f"{dtype} products", tables.format_rate(flops, "FLOP"), "", "")
    for dtype, flops in sorted(cost.flops.items())
  ]
  if rows:
    rows[-1] = (*rows[-1][:3], tables.format_seconds(cost.compute_seconds))
  hbm_seconds = tables.format_seconds(cost.hbm_seconds)
  rows.append(("HBM", _format_bytes(cost.hbm_bytes), "", hbm_seconds))
  for time in cost.link_times:
    axes = ", ".join(time.axes) or "groups of no axis"
    name = f"{time.network.upper()} ({axes})"
    seconds = tables.format_seconds(time.seconds)
    rows.append((name, _format_bytes(time.nbytes), time.links, seconds))
  bold = {len(rows)}
  bound = f"bound by {cost.bound}" if cost.bound else ""
  step = tables.format_seconds(cost.step_seconds)
  rows.append(("roofline, at least", "", bound, step))
  serial = tables.format_seconds(cost.serial_seconds)
  rows.append(("without any overlap", "", "", serial))
  if cost.mfu is not None:
    rows.append(("model FLOPs utilization, at most", "", "", f"{cost.mfu:.1%}"))
  return tables.Table(
    f"cost per step and device ({cost.chip or 'unknown chip'})",
    rows,
    numbers=frozenset({1, 3}),
    bold=frozenset(bold),
  )


def _format_bytes(nbytes: float) -> str:
  return summary.format_bytes(round(nbytes))


def _compute_seconds(
  flops: Mapping[str, float], device: chips.Device | None
) -> float | None:
  if device is None:
    return None
  rates = [(n, device.flops(_RATES.get(k, ""))) for k, n in flops.items()]
  if not all(rate for _, rate in rates) or not device.flops("bf16"):
    return None
  return float(sum(n / rate for n, rate in rates if rate))


def _notes(
  work: work_lib.Work,
  model: model_flops_lib.Flops | None,
  device: chips.Device | None,
) -> Iterable[str]:
  if device is None:
    yield "The speeds of this kind of device are not known: no times."
  if not work.trip_counts_known or (model and not model.exact):
    yield (
      "A loop's number of turns is not in the program: FLOPs, HBM bytes and "
      "times count one turn of it."
    )
  if work.has_kernels:
    yield "FLOPs of custom kernels, such as those of Pallas, are not counted."
