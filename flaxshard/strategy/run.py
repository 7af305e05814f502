"""Calls and compiles functions that run once per replica, for `Strategy.run`.

A call has four stages. The arguments are sorted into per-replica and replicated
leaves, and put on the mesh (`arguments`). The function becomes the body of a
`jax.shard_map` over the replicas, its jaxpr is checked, and the results are put
back together (`replica_program`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import contextvars
import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from flaxshard.core import checks
from flaxshard.core import trees
from flaxshard.data import padding
from flaxshard.partitioning import compile_only
from flaxshard.replicas import context as replica_context
from flaxshard.strategy import arguments
from flaxshard.strategy import function_cache
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
    unread: The indices of bool leaves that a train step does not read.
  """

  jitted: Any
  warnings: dict[str, str]
  unread: list[int]


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
    self._calls = 0
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
    for i in last.compiled.unread:
      # Only now: most steps never see a batch that is padded.
      if padding.marks_padding(leaves[i]):
        path = trees.path_string(self._layouts[treedef].paths[i][1:])
        last.compiled.warnings["padding"] = (
          f"run: the batch has padding, which argument {path} marks, and the "
          "step does not read this mask: the repeated examples count as real "
          "ones. Divide the sum of the real losses by their number, over all "
          "replicas: (losses * mask).sum() / context.all_reduce('mean', "
          "mask.sum()); or leave out the batch with drop_remainder=True."
        )
    if last.compiled.warnings:
      self._warn(last.compiled)
    if self._calls < 2:
      self._calls += 1
      _count_call(fn, self._calls)
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
    if any(i >= len(args) for i in self._donate_argnums):
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
    return _Compiled(jitted, program.warnings, program.unread)


_one_time_functions = function_cache.OneTimeFunctions()


def _count_call(fn: Function, calls: int) -> None:
  """Warns if a function is one of several that are called once each.

  Args:
    fn: The function.
    calls: 1 in its first call, 2 in its second one.
  """
  if calls > 1:
    _one_time_functions.remove(fn)
  elif _one_time_functions.add(fn) == 3:
    inner: Any = function_cache.inner_function(fn)
    code = inner.__code__
    checks.warn(
      f"run: the function {inner.__qualname__} ({code.co_filename}:"
      f"{code.co_firstlineno}) was compiled for the third time, because each "
      "call is given a new function object. Define it once, outside of the "
      "loop, and pass what changes as args.",
    )


class CompiledFunction:
  """The result of `Strategy.jit`: a function that runs once per replica."""

  def __init__(self, fn: Function, program: Program):
    functools.update_wrapper(self, fn)
    self._fn = fn
    self._program = program

  def __call__(self, *args: Any, **kwargs: Any) -> PyTree:
    """Runs the function on each replica."""
    return self._program.call(self._fn, args, kwargs)

  def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
    """Lowers the program, as `jax.jit(...).lower` does."""
    return self.trace(*args, **kwargs).lower()

  def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
    """Traces the program, as `jax.jit(...).trace` does."""
    return self._program.trace(self._fn, args, kwargs)


class CompiledSteps:
  """The result of `Strategy.jit_steps`: a loop over batches."""

  def __init__(self, step_fn: Function, program: Program):
    self._step_fn = step_fn
    self._program = program

  def __call__(self, state: PyTree, batches: PyTree) -> tuple[PyTree, PyTree]:
    """Runs a step for each batch, on each replica."""
    args = state, run_steps.stack(batches)
    return self._program.call(self._step_fn, args, {})

  def lower(self, state: PyTree, batches: PyTree) -> jax.stages.Lowered:
    """Lowers the loop, as `jax.jit(...).lower` does."""
    return self.trace(state, batches).lower()

  def trace(self, state: PyTree, batches: PyTree) -> jax.stages.Traced:
    """Traces the loop, as `jax.jit(...).trace` does."""
    args = state, run_steps.stack(batches)
    return self._program.trace(self._step_fn, args, {})
