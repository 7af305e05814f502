"""Plans a train step: memory, traffic and cost, without running it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import html
import importlib.metadata
import math
import textwrap
from typing import Any

import jax
import numpy as np

from flaxshard.analysis import charts
from flaxshard.analysis import chips
from flaxshard.analysis import compilation as compilation_lib
from flaxshard.analysis import cost as cost_lib
from flaxshard.analysis import device_names
from flaxshard.analysis import memory as memory_lib
from flaxshard.analysis import tables
from flaxshard.analysis import traffic as traffic_lib
from flaxshard.analysis.cost import Cost
from flaxshard.analysis.findings import Findings
from flaxshard.analysis.memory import Memory
from flaxshard.compiled.buffers import Buffer
from flaxshard.compiled.buffers import largest_buffers
from flaxshard.compiled.collectives import Collective
from flaxshard.compiled.collectives import collectives
from flaxshard.core import trees
from flaxshard.wrappers.accumulate import Accumulate
from flaxshard.wrappers.agn import AGN

PyTree = Any


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
  """Memory, traffic and cost of one step. All bytes are per device.

  `str()` is a table; a notebook shows it as HTML.

  Attributes:
    topology: The devices, such as `"v5e:2x4"`.
    device_kind: JAX's name of the devices.
    mesh: Sizes of the mesh axes by name; empty for one device without a mesh.
    compiler: Versions of JAX and the compiler; None if it is not installed.
    seconds: Seconds for tracing and compiling the step.
    batch_size: Length of the first dimension of the batch's arrays; None if
      they have several.
    memory: The memory.
    traffic: The collectives of the program; None if unknown.
    period: Batches in a commit of AGN or an update of Accumulate, over which
      its collectives are averaged; 1 without both.
    cost: FLOPs and times; None if unknown.
    notes: Sentences on what the figures do not say.
    findings: What `check` finds in the step of a config; None if it was not
      checked.
  """

  topology: str
  device_kind: str
  mesh: Mapping[str, int]
  compiler: str | None
  seconds: float
  batch_size: int | None
  memory: Memory
  traffic: tuple[Collective, ...] | None = None
  period: int = 1
  cost: Cost | None = None
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
    peak = memory_lib.format_bytes(self.memory.peak)
    return f"Plan({self.title}, peak={peak})"

  def __str__(self) -> str:
    return self.text()

  def text(self, *, verbose: bool = False) -> str:
    """Returns the plan as tables.

    Args:
      verbose: Whether each collective has a row of its own.
    """
    parts = [table.text() for table in self._tables(verbose)]
    lines = [f"plan of a step on {self.title}", *parts, *self.notes]
    if self.findings is not None:
      lines += ["check for mistakes", textwrap.indent(str(self.findings), "  ")]
    return "\n".join(lines)

  def to_dict(self) -> dict[str, Any]:
    """Returns the plan as dicts, lists, strings and numbers, as in JSON."""
    values: dict[str, Any] = _to_plain(dataclasses.asdict(self))
    values["memory"]["excess"] = self.memory.excess
    if self.cost is not None:
      values["cost"] |= {
        name: getattr(self.cost, name) for name in cost_lib.RESULTS
      }
    for entry, collective in zip(
      values["traffic"] or (), self.traffic or (), strict=True
    ):
      entry["link_bytes"] = collective.link_bytes
    return values

  def plot(self, path: str | None = None) -> Any:
    """Draws the memory, the traffic and the times.

    Args:
      path: File to write a PNG to; None writes none.

    Returns:
      The `matplotlib.figure.Figure`, which a notebook shows.

    Raises:
      ImportError: matplotlib is not installed.
    """
    return charts.plot_plans({self.topology: self}, path)

  def _repr_html_(self) -> str:
    lines = [f"<h3>plan of a step on {html.escape(self.title)}</h3>"]
    lines += [table.html() for table in self._tables(verbose=False)]
    lines += [f"<p>{html.escape(note)}</p>" for note in self.notes]
    if self.findings is not None:
      lines.append("<h4>check for mistakes</h4>")
      found = str(self.findings).split("\n")
      lines += [f"<p>{html.escape(line)}</p>" for line in found]
    lines.append(charts.svg_if_possible({self.topology: self}))
    return "\n".join(lines)

  def _tables(self, verbose: bool) -> list[tables.Table]:
    shown = memory_lib.tables_of(self.memory)
    if self.traffic is not None:
      rows = traffic_lib.rows_of(self.traffic, self.period, each=verbose)
      shown.append(traffic_lib.table_of(rows, self.period))
    if self.cost is not None:
      shown.append(cost_lib.table_of(self.cost))
    return shown


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
    >>> import flax.linen as nn, jax.numpy as jnp, optax
    >>> import flaxshard as fs
    >>> strategy = fs.Strategy(devices=jax.devices()[:1])
    >>> x = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    >>> state = fs.create_train_state(
    ...   nn.Dense(2), jax.random.key(0), x, optax.adam(1e-3),
    ...   strategy=strategy, abstract=True)
    >>> def step(state, x):
    ...   return state.minimize(
    ...     lambda params: state.apply_fn({"params": params}, x).sum())
    >>> memory = plan(step, state, x).memory
    >>> memory.state["params"], memory.state["opt_state"], memory.batch
    (40, 84, 128)
  """
  for name, tree in {"state": state, "batch": batch, "args": args}.items():
    trees.check_arrays(name, tree)
  jitted = compilation_lib.jit_step(step, donate_argnums)
  arguments = (state, batch, *args)
  device, _ = _devices_of(arguments)
  compilation = compilation_lib.compile_step(
    lambda: jitted.trace(*arguments), device
  )
  return plan_compiled(compilation, arguments)


def plan_compiled(
  compilation: compilation_lib.Compilation,
  arguments: Sequence[PyTree],
  *,
  batch_argnum: int = 1,
  topology: str | None = None,
) -> Plan:
  """Plans one call of a compiled step.

  Args:
    compilation: The step, as far as it could be compiled.
    arguments: The arguments that it was compiled for; the first is the state.
    batch_argnum: Position of the batch.
    topology: Name of the devices; None: it is made from the devices.
  """
  device, mesh = _devices_of(arguments, compilation.compiled)
  traffic, cost, period = None, None, _commit_period(arguments[0])
  buffers: tuple[Buffer, ...] = ()
  program = compilation.program
  if program is not None:
    # One device alone has no collectives.
    traffic = () if mesh is None else collectives(program, mesh)
    buffers = _name_arguments(largest_buffers(program), arguments, batch_argnum)
    cost = cost_lib.read_cost(
      program,
      mesh or jax.sharding.Mesh([device], ("device",)),
      traffic,
      jaxpr=compilation.traced.jaxpr,
      period=period,
    )
  hbm = chips.usable_hbm_bytes(device)
  return Plan(
    topology=topology or device_names.name_devices(device, mesh),
    device_kind=device.device_kind,
    mesh={} if mesh is None else dict(mesh.shape),
    compiler=_compiler_versions(device),
    seconds=compilation.seconds,
    batch_size=_batch_size(arguments[batch_argnum]),
    memory=memory_lib.read_memory(
      arguments, batch_argnum, compilation, hbm, buffers
    ),
    traffic=traffic,
    period=period,
    cost=cost,
    notes=tuple(_notes(device, mesh, compilation)),
  )


def _devices_of(
  arguments: PyTree, compiled: Any = None
) -> tuple[Any, jax.sharding.Mesh | None]:
  """Returns a device of a step, and the mesh if there is one.

  Args:
    arguments: The arguments of the step.
    compiled: The compiled step, which may split arguments by itself.
  """
  shardings = [
    getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(arguments)
  ]
  if compiled is not None:
    shardings += jax.tree.leaves(compiled.input_shardings)
  for sharding in shardings:
    mesh = getattr(sharding, "mesh", None)
    if isinstance(mesh, jax.sharding.Mesh):
      return mesh.devices.flat[0], mesh
  for sharding in shardings:
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
      return next(iter(sharding.device_set)), None
  return jax.devices()[0], None


def _name_arguments(
  buffers: Sequence[Buffer], arguments: Sequence[PyTree], batch_argnum: int
) -> tuple[Buffer, ...]:
  """Names the arguments of a program of `Strategy.jit` by their paths.

  The program takes the leaves of all arguments: `leaves[0]`, `leaves[1]`, ....
  """
  paths = jax.tree.flatten_with_path(tuple(arguments))[0]
  names = {0: "state", batch_argnum: "batch"}
  origins = {}
  for i, (path, _) in enumerate(paths):
    number = path[0].idx
    name = names.get(number, f"args[{number}]")
    origins[f"leaves[{i}]"] = name + jax.tree_util.keystr(path[1:])
  return tuple(
    dataclasses.replace(b, origin=origins.get(b.origin, b.origin))
    for b in buffers
  )


def _batch_size(batch: PyTree) -> int | None:
  lengths = {np.shape(x)[0] for x in jax.tree.leaves(batch) if np.ndim(x)}
  return lengths.pop() if len(lengths) == 1 else None


def _commit_period(state: PyTree) -> int:
  wrappers = getattr(state, "wrappers", ())
  periods = [w.communication_period for w in wrappers if isinstance(w, AGN)]
  # Around AGN, each of its steps takes several batches.
  periods += [w.steps for w in wrappers if isinstance(w, Accumulate)]
  return math.prod(periods)


def _compiler_versions(device: Any) -> str | None:
  """Returns the versions of JAX and the compiler; None if there is none."""
  if not isinstance(device, jax.Device):
    return None
  compiler = "libtpu" if device.platform == "tpu" else "jaxlib"
  return f"jax {jax.__version__}, {compiler} {_version(compiler)}"


def _version(package: str) -> str:
  try:
    return importlib.metadata.version(package)
  # TPU_LIBRARY_PATH may name a library that no package installed.
  except importlib.metadata.PackageNotFoundError:
    return "of unknown version"


def _notes(
  device: Any,
  mesh: jax.sharding.Mesh | None,
  compilation: compilation_lib.Compilation,
) -> list[str]:
  if compilation.error is not None:
    reason = compilation.error.partition("\n")[0]
    notes = [f"The compiler refused the program: {reason}"]
    if compilation.needed is not None:
      notes.append("It gave up at this many bytes; the peak may be higher.")
    return notes
  if compilation.compiled is None:
    return [
      "Temporaries, peak, traffic and cost are unknown: the compiler of "
      f"{device.device_kind} is not installed (pip install 'flaxshard[tpu]')."
    ]
  notes = [
    f"Figures of the compiler ({_compiler_versions(device)}), not of a run."
  ]
  if device.platform == "cpu" and mesh is not None and mesh.size > 1:
    notes.append(
      "The temporaries are those of virtual CPU devices: those of other "
      "devices may be several times larger or smaller."
    )
  return notes


def _to_plain(value: Any) -> Any:
  if isinstance(value, Mapping):
    return {str(key): _to_plain(item) for key, item in value.items()}
  if isinstance(value, (tuple, list)):
    return [_to_plain(item) for item in value]
  return value
