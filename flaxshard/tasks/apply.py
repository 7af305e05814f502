"""Applies the model of a train state in a task's loss and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import functools
import inspect
from typing import Any
import zlib

import flax
from flax import linen as nn
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
import jax

from flaxshard.core import trees
from flaxshard.replicas import context as replica_context
from flaxshard.state import fields as fields_lib
from flaxshard.state import lora
from flaxshard.state import nnx_adapter
from flaxshard.state.train_state import TrainState

# Arguments by which models are told the mode, and their values in training.
_MODE_ARGUMENTS = {
  "train": True,
  "training": True,
  "is_training": True,
  "deterministic": False,
  "use_running_average": False,
}


@flax.struct.dataclass(eq=False)
class Rngs(Mapping[str, jax.Array]):
  """PRNG keys by stream name: one for every name that is asked for.

  `rngs["noise"]` is another key than `rngs["dropout"]`, at every step, and on
  every replica in the mode `mesh.per_replica`. In evaluation the keys are the
  same for every evaluation of a run, and differ between batches.

  As a dict it has "dropout" and "params". Linen's `make_rng` draws streams that
  it is not given from "params".

  Attributes:
    key: The key of the stream "dropout".
  """

  key: jax.Array

  def __getitem__(self, name: str) -> jax.Array:
    """Returns the key of a stream."""
    if name == "dropout":
      return self.key
    # CRC-32: Python's hashes of strings differ between processes.
    return jax.random.fold_in(self.key, zlib.crc32(name.encode()))

  def __iter__(self) -> Iterator[str]:
    """Iterates over the streams that a model gets by default."""
    return iter(("dropout", "params"))

  def __len__(self) -> int:
    """Returns the number of streams that a model gets by default."""
    return 2


@flax.struct.dataclass
class Apply:
  """Applies the model; the training loop makes it for a loss.

  It already knows the collections of the state, the mode (training or
  evaluation) and the random streams. It is a pytree, so that it can be an
  argument of a jitted function.

  Attributes:
    collections: The collections of the state.
    default_rngs: The streams of a call that passes none.
    apply_fn: `apply` of the Linen module, or that of the NNX module.
    train: Whether the model is in training mode.
  """

  collections: dict[str, Any]
  default_rngs: Rngs
  apply_fn: Callable[..., Any] = flax.struct.field(pytree_node=False)
  train: bool = flax.struct.field(pytree_node=False)

  def __call__(
    self,
    params: Any,
    *args: Any,
    rngs: Mapping[str, jax.Array] | None = None,
    collections: Mapping[str, Any] | None = None,
    mutable: Sequence[str] = (),
    method: str | Callable[..., Any] | None = None,
    **kwargs: Any,
  ) -> tuple[Any, dict[str, Any]]:
    """Calls the model.

    `train`, `training`, `is_training`, `deterministic` and
    `use_running_average` are passed if the signature of the call has them. An
    NNX module is put in training or evaluation mode.

    Args:
      params: The parameters.
      *args: Arguments of the model's call.
      rngs: Random streams by name; None is those of the loss.
      collections: Values of collections in place of those of the state, such
        as the ones that an earlier call returned.
      mutable: Names of further collections to return, such as sown losses.
      method: The method to call, or its name; None for `__call__`.
      **kwargs: Keyword arguments of the model's call.

    Returns:
      `(outputs, collections)`: in training the new values of the collections of
      the state, and those that `mutable` names; in evaluation the latter alone.
    """
    given = {**self.collections, **(collections or {})}
    if unknown := given.keys() - self.collections.keys():
      raise ValueError(
        f"apply_fn: collections={sorted(unknown)}; the state has "
        f"{sorted(self.collections)}."
      )
    mutable = [mutable] if isinstance(mutable, str) else list(mutable)
    # A call adds what it sows to the values that are there.
    for name in mutable:
      given.pop(name, None)
    # With Flax's fp8 layers, params holds two collections, by name.
    is_fp8 = OVERWRITE_WITH_GRADIENT in params
    variables = dict(params) if is_fp8 else {"params": params}
    variables |= fold_in_replica(given) if self.train else given
    rngs = dict(self.default_rngs if rngs is None else rngs)
    model_apply = lora.model_apply(self.apply_fn)
    if isinstance(model_apply, nnx_adapter.Apply):
      kwargs["method"] = _nnx_method(method, self.train, rngs)
      kwargs["mode"] = "train" if self.train else "eval"
    else:
      model = getattr(model_apply, "__self__", None)
      mode = {"train": self.train}
      if isinstance(model, nn.Module):
        mode = mode_arguments(_method_of(model, method), self.train, args)
      kwargs = {**mode, **kwargs, "rngs": rngs}
      if method is not None:
        kwargs["method"] = method
    outputs, new = self.apply_fn(
      variables,
      *args,
      mutable=[*(self.collections if self.train else ()), *mutable],
      **kwargs,
    )
    return outputs, _restore_keys(dict(new), given)


def apply_in(state: TrainState, *, train: bool, rngs: Rngs) -> Apply:
  """Returns a function that applies the model of a state.

  Args:
    state: The train state.
    train: Whether the model is in training mode.
    rngs: The streams of a call that passes none.
  """
  return Apply(fields_lib.collections(state), rngs, state.apply_fn, train)


def _nnx_method(
  method: str | Callable[..., Any] | None,
  train: bool,
  rngs: Mapping[str, jax.Array],
) -> Callable[..., Any]:
  """Returns a function that calls a method of an NNX module in a mode."""

  def call(module: nnx.Module, *args: Any, **kwargs: Any) -> Any:
    function = _method_of(module, method)
    given = mode_arguments(function, train, args) | kwargs
    takes = inspect.signature(function).parameters
    if "rngs" in takes and "rngs" not in given:
      # NNX draws streams that it is not given from "default".
      default = {"default": rngs["params"]} if "params" in rngs else {}
      given["rngs"] = nnx.Rngs(**{**default, **rngs})
    return function(*args, **given)

  return call


def _method_of(
  module: Any, method: str | Callable[..., Any] | None
) -> Callable[..., Any]:
  """Returns the method to call, bound to its module."""
  if not callable(method):
    function: Callable[..., Any] = getattr(module, method or "__call__")
    return function
  # A bound method, such as `module.encode`, or one of the class.
  return functools.partial(getattr(method, "__func__", method), module)


def mode_arguments(
  function: Callable[..., Any],
  train: bool,
  args: Sequence[Any],
  *,
  required: bool = False,
) -> dict[str, Any]:
  """Returns the keyword arguments that tell a model's call the mode.

  Args:
    function: The call of a model.
    train: Whether the mode is that of training.
    args: The positional arguments of the call, which may have the mode already.
    required: Whether to leave out arguments with a default value.
  """
  parameters = inspect.signature(function).parameters
  by_position = list(parameters)[: len(args)]
  return {
    name: value if train else not value
    for name, value in _MODE_ARGUMENTS.items()
    if name in parameters
    and name not in by_position
    and not (
      required and parameters[name].default is not inspect.Parameter.empty
    )
  }


def fold_in_replica(tree: Any) -> Any:
  """Folds the replica into the PRNG keys of a tree.

  Otherwise all replicas would drop the same units. NNX modules carry their keys
  in a collection.

  Args:
    tree: A tree of arrays and keys.
  """
  context = replica_context.current.get()
  if context is None:
    return tree
  is_key = trees.is_prng_key
  return jax.tree.map(lambda x: context.fold_in(x) if is_key(x) else x, tree)


def _restore_keys(new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
  """Undoes `fold_in_replica`: the state must be the same on all replicas."""
  if replica_context.current.get() is None:
    return new
  in_state = {name: value for name, value in new.items() if name in old}
  return new | jax.tree.map(
    lambda x, before: before if trees.is_prng_key(before) else x,
    in_state,
    {name: old[name] for name in in_state},
  )
