"""The fields of a training config: what each may be, and their defaults.

A config is a plain `ml_collections` file with `get_config()`. `check` refuses
what it does not know before anything is built or compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ml_collections

from flaxshard import wrappers
from flaxshard.core import checks
from flaxshard.core.policy import Policy
from flaxshard.partitioning import rules

# A check returns what is allowed, if the value is not.
Check = Callable[[Any], str | None]


def _is_int(value: Any) -> bool:
  return isinstance(value, int) and not isinstance(value, bool)


def _integer(least: int) -> Check:
  def check(value: Any) -> str | None:
    # JAX and Grain count in 32 bits.
    ok = _is_int(value) and least <= value < 2**31
    return None if ok else f"an integer of at least {least}, below 2**31"

  return check


def _positive(value: Any) -> str | None:
  ok = isinstance(value, (int, float)) and not isinstance(value, bool)
  return None if ok and 0 < value < 1e38 else "a positive number"


def _positive_or_zero(value: Any) -> str | None:
  ok = value == 0 and not isinstance(value, bool)
  return None if ok or _positive(value) is None else "a positive number, or 0"


def _named(value: Any) -> str | None:
  ok = _is_dict(value) and isinstance(value.get("name"), str)
  return None if ok else "a dict with a 'name' and the arguments of what it is"


def _one_of(*allowed: str) -> Check:
  return lambda value: (
    None if value in allowed else f"one of {', '.join(map(repr, allowed))}"
  )


def _precision(value: Any) -> str | None:
  try:
    Policy(value)
  except (TypeError, ValueError) as e:
    return str(e).partition("allowed: ")[2].rstrip(".")
  return None


def _steps(value: Any) -> str | None:
  ok = isinstance(value, (tuple, list)) and (
    not value
    or (
      len(value) == 2
      and all(_is_int(v) for v in value)
      and 0 < value[0] <= value[1]
    )
  )
  return None if ok else "(), or (first step, last step)"


def _is_dict(value: Any) -> bool:
  return isinstance(value, (Mapping, ml_collections.ConfigDict))


def _unwrapped(value: Any) -> Any:
  """Returns a dict for a ConfigDict."""
  return value.to_dict() if hasattr(value, "to_dict") else value


def _replicas(value: Any) -> str | None:
  ok = _is_int(value) and (value == -1 or value > 0)
  return None if ok else "a number of replicas, or -1 for as many as fit"


def _axes(value: Any) -> str | None:
  ok = isinstance(value, (tuple, list)) and all(
    isinstance(axis, (tuple, list))
    and len(axis) == 2
    and isinstance(axis[0], str)
    and axis[0] not in ("", "replica")
    and _is_int(axis[1])
    and axis[1] > 0
    for axis in value
  )
  ok = ok and len({axis[0] for axis in value}) == len(value)
  return (
    None
    if ok
    else "pairs (name, size), such as (('model', 2),), of different names that "
    "are not 'replica'"
  )


def _split(value: Any) -> str | None:
  ok = _is_dict(value) and all(
    isinstance(pieces, (tuple, list)) and all(map(_is_int, pieces))
    for pieces in value.values()
  )
  return (
    None if ok else "a dict of pieces by key, such as {'inputs': (1, 2, 4, 1)}"
  )


def _bool(value: Any) -> str | None:
  return None if isinstance(value, bool) else "True or False"


_MESH: dict[str, tuple[Check, Any]] = {
  "replica": (_replicas, -1),
  "logical_devices": (_integer(1), 1),
  "axes": (_axes, ()),
  "rules": (lambda value: None, ()),  # from_config says more
  "split": (_split, {}),
  "per_replica": (_bool, False),
  "virtual_devices": (_integer(0), 0),
}


def _mesh(value: Any) -> str | None:
  return None if _is_dict(value) else f"a dict with {', '.join(_MESH)}"


def _check_mesh(mesh: Any) -> dict[str, Any]:
  """Returns `config.mesh` with its defaults."""
  for name in mesh:
    if name not in _MESH:
      raise ValueError(
        f"config.mesh.{name} is not a field; the fields are "
        f"{', '.join(_MESH)}.{checks.did_you_mean(name, _MESH)}"
      )
  values = {}
  for name, (field_check, default) in _MESH.items():
    value = values[name] = mesh.get(name, default)
    allowed = field_check(value)
    if allowed:
      raise ValueError(
        f"config.mesh.{name} must be {allowed}; got {_unwrapped(value)!r}."
      )
  try:
    rules.from_config(values["rules"], argument="config.mesh.rules")
  except TypeError as e:
    raise ValueError(str(e)) from e
  if values["axes"] and values["logical_devices"] != 1:
    raise ValueError(
      f"config.mesh.logical_devices={values['logical_devices']} must be 1 "
      f"where config.mesh.axes={values['axes']!r} give names and sizes."
    )
  return values


# What `config.best_metric` may be, and which of its values are good.
BEST_MODES = {"eval_accuracy": "max", "eval_loss": "min"}

_REQUIRED: dict[str, Check] = {
  "model": _named,
  "data": _named,
  "batch_size": _integer(1),
  "num_train_steps": _integer(1),
  "learning_rate": _positive,
  "seed": _integer(0),
  "wrappers": lambda value: None,  # from_config says more
  "mesh": _mesh,
  "precision": _precision,
  "log_every_steps": _integer(1),
  "eval_every_steps": _integer(1),
  "checkpoint_every_steps": _integer(1),
}
_OPTIONAL: dict[str, tuple[Check, Any]] = {
  "optimizer": (_named, {"name": "adamw"}),
  "schedule": (_named, {"name": "constant"}),
  "on_nonfinite": (_one_of("stop", "continue"), "stop"),
  "profile_steps": (_steps, ()),
  "writer": (_one_of("tensorboard", "clu", "none"), "tensorboard"),
  "max_to_keep": (_integer(1), 3),
  "checkpoint_every_minutes": (_positive_or_zero, 0),
  "keep_every_steps": (_integer(0), 0),
  "best_metric": (_one_of("none", *BEST_MODES), "none"),
  "keep_best": (_integer(1), 1),
}


def _check_what_is_kept(values: Mapping[str, Any]) -> None:
  """Refuses to keep the best of, or every n-th of, what is never saved."""
  every = values["checkpoint_every_steps"]
  kept = values["keep_every_steps"]
  if kept % every:
    raise ValueError(
      f"config.keep_every_steps={kept} must be a multiple of "
      f"config.checkpoint_every_steps={every}, or 0: others are not saved."
    )
  if values["best_metric"] == "none":
    if values["keep_best"] != 1:
      raise ValueError(
        f"config.keep_best={values['keep_best']} needs config.best_metric, "
        f"one of {', '.join(map(repr, BEST_MODES))}."
      )
  elif every % values["eval_every_steps"]:
    raise ValueError(
      f"config.checkpoint_every_steps={every} must be a multiple of "
      f"config.eval_every_steps={values['eval_every_steps']} with "
      f"config.best_metric={values['best_metric']!r}: a checkpoint is as good "
      "as its evaluation."
    )


def check(config: Any) -> ml_collections.ConfigDict:
  """Returns a locked copy of a config, with the defaults of optional fields.

  Args:
    config: A `ConfigDict`, or a dict.

  Returns:
    A locked `ConfigDict` with every field.

  Raises:
    ValueError: A field is missing, unknown (the message lists near names), or
      has a value that is not allowed.
    TypeError: `config` is no config; `wrappers` has another form.
  """
  if not isinstance(config, (Mapping, ml_collections.ConfigDict)):
    # A flag's config file that could not be loaded says why when it is used.
    getattr(config, "model", None)
    raise TypeError(f"config must be a ConfigDict, got {type(config)}.")
  known = [*_REQUIRED, *_OPTIONAL]
  for name in config:
    if name not in known:
      raise ValueError(
        f"config.{name} is not a field; the fields are {', '.join(known)}."
        f"{checks.did_you_mean(name, known)}"
      )
  values = {}
  for name, field_check in _REQUIRED.items():
    if name not in config:
      raise ValueError(f"config.{name} is missing.")
    values[name] = (field_check, config[name])
  for name, (field_check, default) in _OPTIONAL.items():
    values[name] = (field_check, config.get(name, default))
  for name, (field_check, value) in values.items():
    allowed = field_check(value)
    if allowed:
      raise ValueError(
        f"config.{name} must be {allowed}; got {_unwrapped(value)!r}."
      )
  _check_what_is_kept({name: value for name, (_, value) in values.items()})
  wrappers.from_config(config["wrappers"])
  values["mesh"] = (_mesh, _check_mesh(config["mesh"]))
  # Not frozen: a FrozenConfigDict cannot hold the dicts in `wrappers`.
  checked = ml_collections.ConfigDict(
    {name: _unwrapped(value) for name, (_, value) in values.items()}
  )
  return checked.lock()
