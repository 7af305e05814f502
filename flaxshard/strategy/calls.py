"""Calls and compiles functions that run once per replica, for `Strategy.run`.

The arguments of a call are sorted into those that each replica has for itself
and those that all share, and put on the mesh (`arguments`). The function
becomes one program for all replicas, which is checked (`program`).
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
import types
from typing import Any, NamedTuple
import weakref

import jax

from flaxshard.core import checks
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.strategy import arguments
from flaxshard.strategy import program
from flaxshard.strategy.program import Function
from flaxshard.strategy.program import Options

PyTree = Any


def waits(mesh: jax.sharding.Mesh) -> bool:
  """Returns whether a call blocks until it is done; see `Strategy.waits`."""
  return mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"


class _LastCall(NamedTuple):
  """The last call with arguments of one structure.

  Attributes:
    jitted: The jitted program.
    shardings: The shardings that the leaves had; None for what is no JAX array.
    moved: The leaves that were not on the mesh already, by their numbers. They
      have to be moved in the next call too.
  """

  jitted: Any
  shardings: list[Any]
  moved: dict[int, arguments.Leaf]


@dataclasses.dataclass(eq=False)
class CompiledForms:
  """The compiled forms of one function, by structure of its arguments.

  Attributes:
    get_function: Returns the function, when a program is traced. It is a weak
      reference: the cache must not keep the function alive.
    options: How it is compiled.
  """

  get_function: Callable[[], Function | None]
  options: Options
  _compiled: dict[Any, Any] = dataclasses.field(default_factory=dict)
  _last_calls: dict[Any, _LastCall] = dataclasses.field(default_factory=dict)

  def call(self, args: Any, kwargs: Any) -> PyTree:
    """Calls the function on each replica; see `Strategy.run`."""
    mesh = self.options.mesh
    values, treedef = jax.tree.flatten((args, kwargs))
    shardings = [getattr(x, "sharding", None) for x in values]
    last = self._last_calls.get(treedef)
    # In a training loop the shardings are the same objects in each step. Their
    # comparison is then the only work for each leaf.
    if last is not None and last.shardings == shardings:
      for i, leaf in last.moved.items():
        values[i] = arguments.place(mesh, values[i], leaf)
      if last.moved:
        args, kwargs = jax.tree.unflatten(treedef, values)
    else:
      last = None
    # A donated array keeps its sharding, and JAX 0.10.2 crashes on it.
    if last is None or any([x.is_deleted() for x in values]):
      mesh_lib.check_can_run("run", mesh)
      jitted, (args, kwargs), moved = self._prepare(args, kwargs)
      last = _LastCall(jitted, shardings, moved)
    # A jax.shard_map that leaves axes to XLA must be compiled.
    with jax.disable_jit(False):
      out = last.jitted(*args, **kwargs)
    # Only now: a call that raised must sort its arguments again.
    self._last_calls[treedef] = last
    return jax.block_until_ready(out) if waits(mesh) else out

  def trace(self, args: Any, kwargs: Any) -> jax.stages.Traced:
    """Traces the program for arguments, which may be ShapeDtypeStructs."""
    jitted, (args, kwargs), _ = self._prepare(args, kwargs)
    return jitted.trace(*args, **kwargs)

  def _prepare(
    self, args: Any, kwargs: Any
  ) -> tuple[Any, tuple[Any, Any], dict[int, arguments.Leaf]]:
    """Puts arguments on the mesh.

    Returns:
      The jitted program for arguments like these, `args` and `kwargs` on the
      mesh, and the leaves, by number, that were not on the mesh already.
    """
    mesh, donate_argnums, _ = self.options
    # Only a call shows how many arguments there are.
    if not set(donate_argnums) <= set(range(len(args))):
      raise ValueError(
        f"donate_argnums={donate_argnums} must be positions of arguments, of "
        f"which there are {len(args)}."
      )
    arguments.refuse_modules((args, kwargs))
    leaves, placed, moved = [], [], {}
    for i, (leaf, x) in enumerate(arguments.flatten((args, kwargs))):
      placed.append(arguments.place(mesh, x, leaf))
      # jax.jit(...).lower takes shapes without a sharding.
      is_placed = isinstance(x, jax.ShapeDtypeStruct) or isinstance(
        getattr(x, "sharding", None), jax.sharding.NamedSharding
      )
      leaves.append(
        leaf._replace(sharding=placed[i].sharding, is_placed=is_placed)
      )
      if placed[i] is not x:
        moved[i] = leaves[i]
    treedef = jax.tree.structure((args, kwargs))
    key = treedef, tuple([leaf.sharding for leaf in leaves])
    if key not in self._compiled:
      run = functools.partial(
        program.run, self.get_function, self.options, leaves
      )
      self._compiled[key] = jax.jit(run, donate_argnums=donate_argnums)
    return self._compiled[key], jax.tree.unflatten(treedef, placed), moved


# The compiled forms, by options, of each function, and of each method of an
# object: by the number of the function or the object. One cache for all
# strategies: equal meshes share what is compiled.
_forms: dict[Any, CompiledForms] = {}


def compiled_forms(fn: Function, options: Options) -> CompiledForms:
  """Returns the compiled forms of a function, which are dropped with it.

  `jax.jit` keeps compiled programs in the same way: a function that was run
  once, and the arrays that it captured, are not kept alive. A bound method is a
  new object at each access, so its entry dies with the object that it is bound
  to.

  Args:
    fn: The function.
    options: How it is compiled.

  Raises:
    TypeError: `fn` is no function, or an object without weak references.
  """
  owner: Any = fn
  function: Any = None
  reference: type = weakref.ref
  if isinstance(fn, types.MethodType):
    owner, function, reference = fn.__self__, fn.__func__, weakref.WeakMethod
  key = id(owner), function, options
  if key not in _forms:
    if not callable(fn):
      raise TypeError(f"run: fn must be a function, got {checks.describe(fn)}.")
    # The number of a dead object may be given to a new one. First: it raises if
    # the object takes no weak reference.
    weakref.finalize(owner, _forms.pop, key, None).atexit = False
    _forms[key] = CompiledForms(reference(fn), options)
  return _forms[key]


class CompiledFunction:
  """The result of `Strategy.jit` and `Strategy.jit_steps`.

  Args:
    fn: The function.
    options: How it is compiled.
    get_arguments: Returns the arguments of a call, by position and by name.
  """

  def __init__(
    self,
    fn: Function,
    options: Options,
    get_arguments: Callable[..., tuple[Any, Any]] = lambda *a, **k: (a, k),
  ):
    functools.update_wrapper(self, fn)
    self._forms = compiled_forms(fn, options)
    self._arguments = get_arguments

  def __call__(self, *args: Any, **kwargs: Any) -> PyTree:
    """Runs the function on each replica."""
    return self._forms.call(*self._arguments(*args, **kwargs))

  def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
    """Lowers the program, as `jax.jit(...).lower` does."""
    return self.trace(*args, **kwargs).lower()

  def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
    """Traces the program, as `jax.jit(...).trace` does."""
    return self._forms.trace(*self._arguments(*args, **kwargs))
