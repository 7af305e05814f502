"""Plans a train step: memory, traffic and cost, without running it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any

import jax

from flaxshard.analysis import compilation as compilation_lib
from flaxshard.analysis import memory as memory_lib
from flaxshard.analysis.memory import Memory
from flaxshard.core import checks
from flaxshard.core import trees
from flaxshard.state import summary

PyTree = Any


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
  """What one call of a step needs on each device. All bytes are per device.

  `str()` is a table; a notebook shows it as HTML.

  Attributes:
    topology: The devices, such as `"v5e:2x4"`.
    device_kind: JAX's name of the devices.
    mesh: Sizes of the mesh axes by name.
    compiler: Name and version of the compiler; None if nothing was compiled.
    seconds: Seconds for tracing and compiling the step.
    memory: The memory.
    traffic: The collectives of the program; None if unknown.
    period: Calls for each execution of a collective in a conditional: the
      communication period of AGN, otherwise 1.
    cost: FLOPs and times; None if unknown.
    notes: Sentences on what the figures leave out.
  """

  topology: str
  device_kind: str
  mesh: Mapping[str, int]
  compiler: str | None
  seconds: float
  memory: Memory
  traffic: tuple[Any, ...] | None = None
  period: int = 1
  cost: Any = None
  notes: tuple[str, ...] = ()

  def __repr__(self) -> str:
    peak = self.memory.peak
    text = "unknown" if peak is None else summary.format_bytes(peak)
    return f"Plan({self.topology}, mesh={dict(self.mesh)}, peak={text})"

  def to_dict(self) -> dict[str, Any]:
    """Returns the plan as a tree of dicts, lists, strings and numbers."""
    values = dataclasses.asdict(self)
    values["memory"]["excess"] = self.memory.excess
    return values


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
    step: `step(state, batch, *args)`, a function or the result of `jax.jit` or
      `Strategy.jit`.
    state: The state, arrays or `jax.ShapeDtypeStruct`s.
    batch: The batch, arrays or `jax.ShapeDtypeStruct`s.
    *args: Further arguments of the step.
    donate_argnums: Positions of the arguments whose memory the step may
      overwrite, for a function that is not jitted. None: the state.

  Returns:
    The plan. A step that does not fit the devices has a plan, too.

  Raises:
    TypeError: `step` is not a function, or an argument has leaves that are not
      arrays.
    ValueError: `donate_argnums` is given for a step that is jitted already.
  """
  if not callable(step):
    raise TypeError(f"step must be a function, got {step!r}.")
  trees_by_name = {"state": state, "batch": batch, "args": args}
  for name, tree in trees_by_name.items():
    trees.check_arrays(name, tree)
  donated = _check_donated(step, donate_argnums)
  device, mesh = _devices_of((state, batch, args))
  compilation = None
  if isinstance(device, jax.Device):
    compilation = compilation_lib.compile_step(
      step, (state, batch, *args), donated
    )
  return Plan(
    topology=device.device_kind,
    device_kind=device.device_kind,
    mesh={} if mesh is None else dict(mesh.shape),
    compiler=None,
    seconds=0.0 if compilation is None else compilation.seconds,
    memory=memory_lib.read_memory(state, batch, args, compilation, None),
  )


def _check_donated(
  step: Any, donate_argnums: int | Sequence[int] | None
) -> tuple[int, ...]:
  if donate_argnums is None:
    return (0,)
  if compilation_lib.is_jitted(step):
    raise ValueError(
      f"donate_argnums={donate_argnums!r} must be None for a step that is "
      "jitted already: give it to jax.jit or Strategy.jit."
    )
  if isinstance(donate_argnums, int):
    donate_argnums = (donate_argnums,)
  return tuple(
    checks.integer("donate_argnums", i, minimum=0) for i in donate_argnums
  )


def _devices_of(tree: PyTree) -> tuple[Any, jax.sharding.Mesh | None]:
  """Returns a device of the arguments, and their mesh if they have one."""
  for leaf in jax.tree.leaves(tree):
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, jax.sharding.NamedSharding) and isinstance(
      sharding.mesh, jax.sharding.Mesh
    ):
      return sharding.mesh.devices.flat[0], sharding.mesh
  return jax.devices()[0], None
