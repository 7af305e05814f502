"""Checks the arguments that a model is initialized with, before any tracing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import inspect
from typing import Any

from flax import linen as nn
from flax import nnx

from flaxshard.core import checks

# Arguments of `create_train_state` that a misspelt name may mean.
_CREATE_NAMES = (
  "rng",
  "wrappers",
  "strategy",
  "rules",
  "strict",
  "abstract",
  "lora",
)
# Keyword arguments of Linen's `init` beside those of the model's call.
_INIT_NAMES = ("method", "mutable", "capture_intermediates")


def positional(sample_input: Any) -> tuple[Any, ...]:
  """Returns the positional arguments that a `sample_input` stands for."""
  # `type(...) is`: a NamedTuple is one argument.
  return sample_input if type(sample_input) is tuple else (sample_input,)


def check_linen(
  model: nn.Module, inputs: tuple[Any, ...], init_kwargs: Mapping[str, Any]
) -> None:
  """Raises a TypeError unless a Linen module can be called with arguments.

  Args:
    model: The module.
    inputs: The positional arguments of its call.
    init_kwargs: The keyword arguments of `model.init`.
  """
  method = init_kwargs.get("method")
  if method is None:
    method = "__call__"
  if isinstance(method, str):
    call = getattr(model, method, None)
    name = f"{type(model).__name__}.{method}"
  else:
    # A function of the module and the arguments.
    call, inputs = method, (model, *inputs)
    name = getattr(method, "__qualname__", repr(method))
  kwargs = {k: x for k, x in init_kwargs.items() if k not in _INIT_NAMES}
  _check_call(name, call, inputs, kwargs, check_required=True)


def check_nnx(
  module: nnx.Module, sample_input: Any, init_kwargs: Mapping[str, Any]
) -> None:
  """Raises a TypeError unless an NNX module's call takes keyword arguments.

  The initialization does not call the module, so that its required arguments
  may be missing.

  Args:
    module: The module.
    sample_input: Its input; None if it is not to be called.
    init_kwargs: The keyword arguments of its call.
  """
  if not init_kwargs:
    return
  name = f"{type(module).__name__}.__call__"
  inputs = () if sample_input is None else positional(sample_input)
  call = getattr(module, "__call__", None)  # noqa: B004
  _check_call(name, call, inputs, dict(init_kwargs), check_required=False)
  if sample_input is None:
    raise TypeError(
      f"{', '.join(init_kwargs)} would be passed to {name}, which is called "
      "with a sample_input alone. Pass a sample_input as well, or neither."
    )


def _check_call(
  name: str,
  call: Callable[..., Any] | None,
  inputs: tuple[Any, ...],
  kwargs: Mapping[str, Any],
  *,
  check_required: bool,
) -> None:
  try:
    # `call` is None where the model has no such method.
    parameters = inspect.signature(call).parameters  # type: ignore[arg-type]
  except (TypeError, ValueError):
    return  # `init` reports what it cannot call
  named = {
    k: p
    for k, p in parameters.items()
    if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
  }
  takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
  by_position = [
    p
    for p in parameters.values()
    if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
  ]
  given = [p.name for p in by_position[: len(inputs)]]
  for key in kwargs:
    if key in given:
      raise TypeError(
        f"{name} gets {key} twice: from sample_input, whose positional "
        f"arguments are ({', '.join(given)}), and as {key}=."
      )
    if key in named:
      continue
    # With `**kwargs` the model takes any name, also a misspelt `wrapers`.
    hint = checks.did_you_mean(
      key,
      [*_CREATE_NAMES] if takes_any else [*named, *_CREATE_NAMES],
      cutoff=0.8 if takes_any else 0.6,
    )
    if hint or not takes_any:
      raise TypeError(
        f"{key} is neither an argument of create_train_state nor of {name}, "
        f"which takes {', '.join(parameters) or 'none'}.{hint}"
      )
  if not check_required:
    return
  missing = [
    p.name
    for p in [
      *by_position[len(inputs) :],
      *(p for p in named.values() if p.kind is p.KEYWORD_ONLY),
    ]
    if p.default is p.empty and p.name not in kwargs
  ]
  if missing:
    values = ", ".join(f"{n}={_example_value(n)}" for n in missing)
    raise TypeError(
      f"{name} needs {', '.join(missing)} as well. Pass it by name: "
      f"create_train_state(..., {values})."
    )


def _example_value(name: str) -> str:
  """Returns a value for an argument, for an error message."""
  if name.startswith(("train", "is_train")):
    return "False"
  if name in ("deterministic", "use_running_average", "eval"):
    return "True"
  return "..."
