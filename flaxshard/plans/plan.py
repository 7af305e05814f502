"""Plans a train step: memory and traffic of each device, without running it."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import importlib.metadata
import math
import re
import textwrap
from typing import Any

from flax.training import train_state
import jax

from flaxshard.core import checks
from flaxshard.plans import step as step_lib
from flaxshard.plans.findings import Findings
from flaxshard.plans.traffic import Collective
from flaxshard.wrappers.accumulate import Accumulate
from flaxshard.wrappers.agn import AGN

PyTree = Any

# GiB that a program on a TPU can use, by the kind of device and its cores.
# libtpu 0.0.42 names them when a program is too large: "exceeds available HBM
# (15.75G)". The rest of a chip's memory is the system's.
_HBM = {
  ("TPU v2", 1): 7.48,
  ("TPU v3", 1): 15.48,
  ("TPU v4", 1): 15.25,
  ("TPU v4", 2): 30.75,
  ("TPU v5 lite", 1): 15.75,
  ("TPU v5e", 1): 15.75,
  ("TPU v5", 2): 95.74,
  ("TPU v5p", 2): 95.74,
  ("TPU v6 lite", 1): 31.25,
  ("TPU v6e", 1): 31.25,
  ("TPU7x", 1): 94.75,
}
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)B?"
# libtpu stops before it assigns memory, with the bytes that arguments and
# temporaries need at least, or afterwards.
_NEEDED = re.compile(
  rf"(?:HLO temporaries \(|Used ){_SIZE}(?:\) exceeds available HBM \(| of )"
  rf"{_SIZE}"
)


@dataclasses.dataclass(frozen=True)
class Memory:
  """Bytes on one device while a step runs.

  What only a compiled program tells is 0 if the compiler refuses the step.

  Attributes:
    state: Bytes of each field of the state, such as `params` and `opt_state`;
      the state of each wrapper is a field of its own.
    batch: Bytes of the batch.
    arguments: Bytes of the further arguments of the step.
    unused: Bytes of those of them all that the program does not read, which
      JAX leaves out.
    padding: Bytes that the layout of the device adds to the arguments.
    outputs: Bytes of the results that do not overwrite a donated argument.
    program: Bytes of the machine code.
    temporaries: Bytes of all other values.
    peak: Bytes in all. Of a step that the compiler refuses, those that it has
      counted until it gave up; None if its message has no number.
    hbm: Bytes that a device has for programs; None if unknown.
    refused: Whether the compiler refuses the step for its memory.
  """

  state: Mapping[str, int]
  batch: int
  arguments: int = 0
  unused: int = 0
  padding: int = 0
  outputs: int = 0
  program: int = 0
  temporaries: int = 0
  peak: int | None = None
  hbm: int | None = None
  refused: bool = False

  @property
  def state_bytes(self) -> int:
    """Bytes of the whole state."""
    return sum(self.state.values())

  @property
  def fits(self) -> bool | None:
    """Whether the step fits the device; None if unknown."""
    if self.refused:
      return False
    return None if self.excess is None else not self.excess

  @property
  def excess(self) -> int | None:
    """Bytes that the step needs more than a device has; None if unknown."""
    if self.peak is None or self.hbm is None:
      return None
    return max(self.peak - self.hbm, 0)


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
  """Memory and traffic of one step. All bytes are per device.

  `str()` is a table.

  Attributes:
    topology: The devices, such as `"v5e:2x4"` or `"8 devices"`.
    device_kind: JAX's name of the devices.
    mesh: Sizes of the mesh axes by name; empty for one device without a mesh.
    compiler: Versions of JAX and the compiler.
    memory: The memory.
    traffic: The collectives of the program.
    period: Batches in a commit of AGN or an update of Accumulate, over which
      its collectives are averaged; 1 without both.
    notes: Sentences on what the figures do not say.
    findings: What `check` finds in the step of a config; None if it was not
      checked.
  """

  topology: str
  device_kind: str
  mesh: Mapping[str, int]
  compiler: str
  memory: Memory
  traffic: tuple[Collective, ...] = ()
  period: int = 1
  notes: tuple[str, ...] = ()
  findings: Findings | None = None

  @property
  def title(self) -> str:
    """The devices and their mesh, in a line."""
    axes = ", ".join(f"{name}={size}" for name, size in self.mesh.items())
    return (
      f"{self.topology} ({self.device_kind}){f', mesh {axes}' if axes else ''}"
    )

  def __repr__(self) -> str:
    return f"Plan({self.title}, peak={_show_size(self.memory.peak)})"

  def __str__(self) -> str:
    lines = [f"plan of a step on {self.title}", "memory per device"]
    memory = checks.table(_rows_of(self.memory), numbers=[1])
    lines.append(textwrap.indent(memory, "  "))
    if not self.memory.refused:
      lines += self._traffic_lines()
    lines += self.notes
    if self.findings is not None:
      lines += ["check for mistakes", textwrap.indent(str(self.findings), "  ")]
    return "\n".join(lines)

  def to_dict(self) -> dict[str, Any]:
    """Returns the plan as dicts, lists, strings and numbers, as in JSON."""
    values = dataclasses.asdict(self)
    values["memory"] |= {
      "fits": self.memory.fits,
      "excess": self.memory.excess,
    }
    for entry, collective in zip(values["traffic"], self.traffic, strict=True):
      entry["payload_bytes"] = collective.payload_bytes
      entry["link_bytes"] = collective.link_bytes
    return values

  def _traffic_lines(self) -> list[str]:
    """Returns the traffic as a table, the most bytes first."""
    title = "traffic per step and device"
    if self.period > 1:
      title += f", that of commits and updates divided by {self.period} batches"
    groups: dict[tuple[object, ...], list[Collective]] = {}
    for c in self.traffic:
      key = (c.kind, c.axes, c.network, c.in_conditional, c.in_commit)
      groups.setdefault(key, []).append(c)
    rows = [self._row(group) for group in groups.values()]
    rows.sort(key=lambda row: -row[0])
    header = ("kind", "axes", "links", "count", "bytes", "sent", "from")
    sent = checks.format_bytes(round(sum(sent for sent, _ in rows)))
    total = ("total", "", "", "", "", sent, "")
    cells = [header, *(row for _, row in rows), total]
    table = checks.table(cells, numbers=[3, 4, 5])
    return [title, textwrap.indent(table, "  ")]

  def _row(self, group: Sequence[Collective]) -> tuple[float, tuple[str, ...]]:
    """Returns the bytes that collectives send, and their row."""
    counts = [c.executions_per_step(self.period) for c in group]
    pairs = list(zip(counts, group, strict=True))
    sent = sum(n * c.link_bytes for n, c in pairs)
    first = group[0]
    lines = list(dict.fromkeys(c.source for c in group if c.source))
    shown = checks.listed(lines, most=1)
    return sent, (
      first.kind,
      ", ".join(first.axes) or "other groups",
      first.network.upper() if first.network != "none" else "none",
      f"{sum(counts):.4g}" + (" if" if first.in_conditional else ""),
      checks.format_bytes(round(sum(n * c.payload_bytes for n, c in pairs))),
      checks.format_bytes(round(sent)),
      shown,
    )


def plan(
  step: Callable[..., Any],
  state: PyTree,
  batch: PyTree,
  *args: PyTree,
  donate_argnums: int | Sequence[int] | None = None,
) -> Plan:
  """Plans one call of a train step on the devices of its state.

  The step is compiled for the devices of the state's shardings and not run.
  With `Strategy("v5e:2x4")` these are devices that this machine does not have.

  Args:
    step: `step(state, batch, *args)`, a function or the result of `jax.jit`,
      `nnx.jit` or `Strategy.jit`.
    state: The state, arrays or `jax.ShapeDtypeStruct`s.
    batch: The batch, arrays or `jax.ShapeDtypeStruct`s.
    *args: Further arguments of the step.
    donate_argnums: Positions of the arguments whose memory the step may
      overwrite, for a function that is not jitted. None: the state.

  Returns:
    The plan. A step that does not fit the devices has a plan, too: its memory
    says by how much.

  Raises:
    TypeError: `step` is not a function, or an argument has leaves that are not
      arrays.
    ValueError: `donate_argnums` is given for a step that is jitted already.

  Example:
    >>> import flaxshard as fs, flax.linen as nn, jax, jax.numpy as jnp, optax
    >>> strategy = fs.Strategy(devices=jax.devices()[:1])
    >>> x = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    >>> state = fs.create_train_state(
    ...   nn.Dense(2), jax.random.key(0), x, optax.adam(1e-3),
    ...   strategy=strategy, abstract=True)
    >>> def step(state, x):
    ...   return state.minimize(
    ...     lambda params: state.apply_fn({"params": params}, x).sum())
    >>> memory = fs.plan(step, state, x).memory
    >>> memory.state["params"], memory.state["opt_state"], memory.batch
    (40, 84, 128)
  """
  return plan_step(
    step_lib.compile_call(step, (state, batch, *args), donate_argnums)
  )


def plan_step(step: step_lib.Step, topology: str | None = None) -> Plan:
  """Plans one call of a compiled step.

  Args:
    step: The step.
    topology: Name of the devices; None: their number.
  """
  device, mesh = step.device, step.mesh
  compiler = "libtpu" if device.platform == "tpu" else "jaxlib"
  versions = f"jax {jax.__version__}, {compiler} {_version(compiler)}"
  return Plan(
    topology=topology or f"{1 if mesh is None else mesh.size} devices",
    device_kind=device.device_kind,
    mesh={} if mesh is None else dict(mesh.shape),
    compiler=versions,
    memory=_read_memory(step),
    traffic=step.collectives,
    period=_commit_period(step.state),
    notes=tuple(_notes(step, versions)),
  )


def _read_memory(step: step_lib.Step) -> Memory:
  """Returns the memory of a step."""
  hbm = _usable_hbm(step.device)
  total = sum(leaf.nbytes for leaf in step.leaves)
  state = _bytes_of_fields(step)
  batch = sum(leaf.nbytes for leaf in step.batch_leaves)
  further = total - batch - sum(state.values())
  if step.compiled is None:
    needed, available = None, hbm
    if match := _NEEDED.search(step.error):
      needed = int(float(match[1]) * _UNITS[match[2]])
      available = int(float(match[3]) * _UNITS[match[4]])
    return Memory(
      state, batch, further, peak=needed, hbm=available, refused=True
    )
  unused = sum(leaf.nbytes for leaf in step.leaves if not leaf.is_read)
  stats = step.compiled.memory_analysis()
  given, temporaries = stats.argument_size_in_bytes, stats.temp_size_in_bytes
  outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
  program = stats.generated_code_size_in_bytes
  return Memory(
    state,
    batch,
    further,
    unused=unused,
    padding=given - (total - unused),
    outputs=outputs,
    program=program,
    temporaries=temporaries,
    peak=given + outputs + program + temporaries,
    hbm=hbm,
  )


def _bytes_of_fields(step: step_lib.Step) -> dict[str, int]:
  """Returns the bytes of each field of a state, and of each wrapper."""
  if not isinstance(step.state, train_state.TrainState):
    return {"state": sum(leaf.nbytes for leaf in step.state_leaves)}
  fields: dict[str, int] = collections.defaultdict(int)
  for leaf in step.state_leaves:
    name, *rest = leaf.path.split("/")
    if name == "wrapper_states":
      name = rest[0]
      # A collection of the model may have the name of a wrapper.
      if hasattr(step.state, name):
        name = f"wrapper_states/{name}"
    fields[name] += leaf.nbytes
  return dict(fields)


def _usable_hbm(device: jax.Device) -> int | None:
  """Returns the bytes that a program on a device can use; None: unknown.

  On a device of this machine that is the limit of JAX's allocator, which a GPU
  sets by XLA_PYTHON_CLIENT_MEM_FRACTION. Else it is the figure of the table.
  """
  try:
    stats = device.memory_stats() or {}
  # Devices that exist only for the compiler have no allocator.
  except Exception:
    stats = {}
  if "bytes_limit" in stats:
    return int(stats["bytes_limit"])
  cores = getattr(device, "num_cores", None) or 1
  gigabytes = _HBM.get((device.device_kind, cores))
  return None if gigabytes is None else int(gigabytes * 2**30)


def _commit_period(state: PyTree) -> int:
  wrappers = getattr(state, "wrappers", ())
  periods = [w.communication_period for w in wrappers if isinstance(w, AGN)]
  # Around AGN, each of its steps takes several batches.
  periods += [w.steps for w in wrappers if isinstance(w, Accumulate)]
  return math.prod(periods)


def _version(package: str) -> str:
  try:
    return importlib.metadata.version(package)
  # TPU_LIBRARY_PATH may name a library that no package installed.
  except importlib.metadata.PackageNotFoundError:
    return "of unknown version"


def _notes(step: step_lib.Step, versions: str) -> list[str]:
  if step.compiled is None:
    reason = step.error.partition("\n")[0]
    return [
      f"The compiler refused the program: {reason}",
      "It gave up at this many bytes; the peak may be higher.",
    ]
  notes = [f"Figures of the compiler ({versions}), not of a run."]
  if not all(c.trip_count_known for c in step.collectives):
    notes.append(
      "A loop's number of turns is not in the program: its collectives count "
      "as in one turn."
    )
  if step.device.platform == "cpu" and step.mesh and step.mesh.size > 1:
    notes.append(
      "The temporaries are those of virtual CPU devices: those of other "
      "devices may be several times larger or smaller."
    )
  return notes


def _rows_of(memory: Memory) -> list[tuple[str, str]]:
  """Returns the names and the sizes of a table of the memory."""
  rows = [(name, _show_size(n)) for name, n in memory.state.items()]
  rows.append(("batch", _show_size(memory.batch)))
  optional = {
    "other arguments": memory.arguments,
    "not read by the step": -memory.unused,
    "padding of the arguments": memory.padding,
    "new outputs": memory.outputs,
    "program": memory.program,
  }
  rows += [(name, _show_size(n)) for name, n in optional.items() if n]
  at_least = "at least " if memory.refused else ""
  if not memory.refused:
    rows.append(("temporaries", _show_size(memory.temporaries)))
  rows.append(("peak", at_least + _show_size(memory.peak)))
  if memory.hbm is not None:
    share = f" ({memory.peak / memory.hbm:.0%} used)" if memory.peak else ""
    rows.append(("HBM for programs", _show_size(memory.hbm) + share))
  if memory.fits is False:
    rows.append(("DOES NOT FIT, over by", at_least + _show_size(memory.excess)))
  return rows


def _show_size(nbytes: int | None) -> str:
  """Returns a number of bytes as text; "unknown" for None."""
  if nbytes is None:
    return "unknown"
  sign = "-" if nbytes < 0 else ""
  return sign + checks.format_bytes(abs(nbytes))
