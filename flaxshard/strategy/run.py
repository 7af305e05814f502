"""Calls and compiles functions that run once per replica, for `Strategy.run`.

A call has four stages. The arguments are sorted into per-replica and replicated
leaves, and put on the mesh (`arguments`). The function becomes the body of a
`jax.shard_map` over the replicas, its jaxpr is checked, and the results are put
back together (`replica_program`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
import contextvars
import functools
import types
from typing import Any, NamedTuple
import weakref

import jax
import numpy as np

from flaxshard.core import checks
from flaxshard.partitioning import compile_only
from flaxshard.replicas import context as replica_context
from flaxshard.strategy import arguments
from flaxshard.strategy import run_steps
from flaxshard.strategy.arguments import Layout
from flaxshard.strategy.replica_program import ReplicaProgram

PyTree = Any
Function = Callable[..., PyTree]

# The function that is called. The compiled programs look it up when JAX traces
# them: if they referred to it, the cache would keep it alive.
_called: contextvars.ContextVar[Function] = contextvars.ContextVar("called")


class _Compiled(NamedTuple):
  """A program in compiled form.

  Attributes:
    jitted: The jitted program.
    warnings: The warnings that were found when it was traced, by kind.
  """

  jitted: Any
  warnings: dict[str, str]


class _LastCall(NamedTuple):
  """The last call with arguments of one structure.

  Attributes:
    compiled: The compiled program.
    shardings: The shardings that the leaves had; None for what is no JAX array.
    stay: The indices of the leaves that were on the mesh already.
    move: The indices of the leaves that must be put there.
  """

  compiled: _Compiled
  shardings: list[Any]
  stay: list[int]
  move: list[int]


class Program:
  """The compiled forms of one function, by structure of its arguments.

  Args:
    mesh: The strategy's mesh.
    donate_argnums: The positions of arguments that may be overwritten.
    wait: Whether a call blocks until the results are computed.
    transform: Makes the function to run from the one that is called, when that
      is traced.
  """

  def __init__(
    self,
    mesh: jax.sharding.Mesh,
    donate_argnums: Sequence[int] = (),
    wait: bool = False,
    transform: Callable[[Function], Function] | None = None,
  ):
    self._mesh = mesh
    self._donate_argnums = donate_argnums
    self._wait = wait
    self._transform = transform
    self._layouts: dict[Any, Layout] = {}
    self._compiled: dict[Any, _Compiled] = {}
    self._warned: set[str] = set()
    self._last_calls: dict[Any, _LastCall] = {}

  def call(self, fn: Function, args: Any, kwargs: Any) -> PyTree:
    """Calls `fn(*args, **kwargs)` on each replica; see `Strategy.run`."""
    if replica_context.get_replica_context() is not None:
      raise TypeError(
        "run: called inside of run, where this replica's program is traced. "
        "Call the function itself."
      )
    compile_only.check_can_run("run", self._mesh)
    leaves, treedef = jax.tree.flatten((args, kwargs))
    shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
    # In a training loop the shardings are the same objects in each step. Their
    # comparison is then the only work for each leaf.
    last = self._last_calls.get(treedef)
    if (
      last is None
      # A donated array keeps its sharding, so that is checked as well.
      or last.shardings != shardings
      or any([leaves[i].is_deleted() for i in last.stay])
    ):
      compiled, leaves = self._prepare(args, kwargs)
      # An array that had to be moved will be moved in the next call too.
      stays = [
        leaf.sharding == x for leaf, x in zip(leaves, shardings, strict=True)
      ]
      last = _LastCall(
        compiled,
        shardings,
        stay=[i for i, stay in enumerate(stays) if stay],
        move=[i for i, stay in enumerate(stays) if not stay],
      )
    else:
      layout = self._layouts[treedef]
      for i in last.move:
        leaves[i] = arguments.place(self._mesh, leaves[i], layout, i)
    token = _called.set(fn)
    try:
      out = last.compiled.jitted(*leaves)
    finally:
      _called.reset(token)
    if last.compiled.warnings:
      self._warn(last.compiled)
    # Only now: a call that raised must sort its arguments again.
    self._last_calls[treedef] = last
    return jax.block_until_ready(out) if self._wait else out

  def trace(self, fn: Function, args: Any, kwargs: Any) -> jax.stages.Traced:
    """Traces the program for arguments, which may be ShapeDtypeStructs."""
    compiled, leaves = self._prepare(args, kwargs)
    token = _called.set(fn)
    try:
      traced = compiled.jitted.trace(*leaves)
    finally:
      _called.reset(token)
    self._warn(compiled)
    return traced

  def _warn(self, compiled: _Compiled) -> None:
    """Gives the warnings of a program, each kind once for each function."""
    for kind, message in compiled.warnings.items():
      if kind not in self._warned:
        self._warned.add(kind)
        checks.warn(message)
    compiled.warnings.clear()

  def _prepare(self, args: Any, kwargs: Any) -> tuple[_Compiled, list[Any]]:
    """Returns the program for some arguments, and their leaves on the mesh."""
    # Only a call shows how many arguments there are.
    if any(not 0 <= i < len(args) for i in self._donate_argnums):
      raise ValueError(
        f"donate_argnums={tuple(self._donate_argnums)} must be positions of "
        f"arguments, of which there are {len(args)}."
      )
    leaves, treedef = jax.tree.flatten((args, kwargs))
    if treedef not in self._layouts:
      self._layouts[treedef] = arguments.layout_of((args, kwargs))
    layout = self._layouts[treedef]
    unplaced = tuple(
      i
      for i, leaf in enumerate(leaves)
      # jax.jit(...).lower takes shapes without a sharding, which says nothing.
      if isinstance(leaf, (np.ndarray, jax.Array))
      and not isinstance(
        getattr(leaf, "sharding", None), jax.sharding.NamedSharding
      )
      and not layout.replicated[i]
      and not layout.per_replica[i]
    )
    leaves = [
      arguments.place(self._mesh, leaf, layout, i)
      for i, leaf in enumerate(leaves)
    ]
    shardings = tuple(leaf.sharding for leaf in leaves)
    if (treedef, shardings) not in self._compiled:
      self._compiled[treedef, shardings] = self._jit(
        treedef, shardings, unplaced
      )
    return self._compiled[treedef, shardings], leaves

  def _jit(
    self,
    treedef: Any,
    shardings: tuple[Any, ...],
    unplaced: tuple[int, ...],
  ) -> _Compiled:
    """Returns the jitted program for one structure and sharding."""
    layout = self._layouts[treedef]
    tree = jax.tree.unflatten(treedef, shardings)
    arguments.check_wrappers(self._mesh, tree)
    transform = self._transform

    def get_function() -> Function:
      fn = _called.get()
      return fn if transform is None else transform(fn)

    program = ReplicaProgram(
      self._mesh,
      treedef,
      shardings,
      layout,
      get_function,
      unplaced,
      # A loop over batches puts the steps first.
      batch_dim=0 if transform is None else 1,
    )
    # JAX sees the leaves as arguments, not the trees.
    donated = [
      i
      for i, (positional, argument, *_) in enumerate(layout.paths)
      if positional.idx == 0 and argument.idx in self._donate_argnums
    ]
    jitted = jax.jit(program.run, donate_argnums=donated)
    return _Compiled(jitted, program.warnings)


class FunctionCache:
  """The programs by function and options, dropped when it is collected.

  `jax.jit` keeps compiled programs in the same way: a function that was run
  once, and the arrays that it captured, are not kept alive.

  Equal callables share an entry, which dies with the first of them. A bound
  method is a new object at each access, so its entry dies with the object that
  it is bound to.
  """

  def __init__(self) -> None:
    self._by_function: weakref.WeakKeyDictionary[
      Any, dict[Hashable, Program]
    ] = weakref.WeakKeyDictionary()
    self._by_method: dict[tuple[int, Any], dict[Hashable, Program]] = {}

  def __len__(self) -> int:
    """Returns the number of functions with an entry."""
    return len(self._by_function) + len(self._by_method)

  def get(self, fn: Function, *options: Hashable) -> Program:
    """Returns the programs of a function, for arguments of `Program`."""
    if isinstance(fn, types.MethodType):
      programs = self._programs_of_method(fn)
    else:
      programs = self._by_function.setdefault(fn, {})
    if options not in programs:
      programs[options] = Program(*options)  # type: ignore[arg-type]
    return programs[options]

  def _programs_of_method(
    self, fn: types.MethodType
  ) -> dict[Hashable, Program]:
    # By identity, as bound methods compare: the object may not be hashable.
    key = id(fn.__self__), fn.__func__
    if key not in self._by_method:
      self._by_method[key] = {}
      # The number of a dead object may be given to a new one.
      finalizer = weakref.finalize(fn.__self__, self._by_method.pop, key, None)
      finalizer.atexit = False
    return self._by_method[key]


class CompiledFunction:
  """The result of `Strategy.jit` and `Strategy.jit_steps`.

  Args:
    fn: The function.
    program: Its compiled forms.
    steps: Whether it is a step, which is called with a state and batches.
  """

  def __init__(self, fn: Function, program: Program, steps: bool = False):
    functools.update_wrapper(self, fn)
    self._fn = fn
    self._program = program
    self._arguments = _stack_batches if steps else _as_given

  def __call__(self, *args: Any, **kwargs: Any) -> PyTree:
    """Runs the function on each replica."""
    return self._program.call(self._fn, *self._arguments(*args, **kwargs))

  def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
    """Lowers the program, as `jax.jit(...).lower` does."""
    return self.trace(*args, **kwargs).lower()

  def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
    """Traces the program, as `jax.jit(...).trace` does."""
    return self._program.trace(self._fn, *self._arguments(*args, **kwargs))


def _as_given(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
  return args, kwargs


def _stack_batches(state: PyTree, batches: PyTree) -> tuple[Any, Any]:
  return (state, run_steps.stack(batches)), {}
