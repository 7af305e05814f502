"""Checks configs, and fills in their defaults."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import ml_collections
from ml_collections import config_dict

from flaxshard import models
from flaxshard import tasks
from flaxshard import wrappers
from flaxshard.core import checks
from flaxshard.core import optimizer
from flaxshard.core import registry
from flaxshard.data import factories
from flaxshard.train import fine_tuning
from flaxshard.train.config import definition
from flaxshard.train.config.definition import Field
from flaxshard.wrappers import base
from flaxshard.wrappers import config as wrappers_config
from flaxshard.wrappers import stack


def defaults() -> ml_collections.ConfigDict:
  """Returns a config with every field, to start your own from.

  Required fields are None, or `{}` where a dict is to be set. `check` raises if
  they stay so.

  Returns:
    An unlocked config. Its fields take values of any type: `check` checks them.

  Example:
    >>> config = defaults()
    >>> config.model = {"name": "cnn"}
    >>> config.mesh.replica = 2
    >>> config.optimizer.name, config.batch_size
    ('adamw', None)
  """
  return ml_collections.ConfigDict(
    {field.name: _default(field) for field in definition.FIELDS},
    # A field may have several types: `config.mesh.rules = "fsdp"`.
    type_safe=False,
  )


def check(config: Any) -> ml_collections.ConfigDict:
  """Checks a config and fills in the defaults.

  What a name such as `"my_package.my_module:my_model"` stands for is not
  imported: the run checks that.

  Args:
    config: A `ConfigDict` or a dict, with some or all of the fields.

  Returns:
    A locked copy with every field.

  Raises:
    ValueError: A field is missing or unknown (the message lists similar names),
      or its value is not allowed.
    TypeError: `config` is not a config, or `wrappers` is not a sequence of
      names and `(name, arguments)` pairs.

  Example:
    >>> config = check({
    ...   "model": {"name": "cnn"}, "data": {"name": "digits"},
    ...   "batch_size": 64, "num_train_steps": 100, "learning_rate": 1e-3})
    >>> config.optimizer.name, config.mesh.replica
    ('adamw', -1)
  """
  if not isinstance(config, (Mapping, ml_collections.ConfigDict)):
    # absl's flag holds a config file that failed to load as an object that
    # raises the file's error when any attribute is read.
    getattr(config, "model", None)
    hint = ""
    if isinstance(config, str):
      hint = f" flaxshard.config.read({config!r}) reads a config by its name."
    raise TypeError(
      "config must be a ConfigDict or a dict of its fields, got "
      f"{checks.describe(config)}.{hint}"
    )
  given = {name: _to_dict(config[name]) for name in config}
  # Before missing fields, which may be misspelt.
  _check_names("config", definition.FIELDS, given)
  _check_model_and_data(given)
  checked = _check_fields("config", definition.FIELDS, given)
  _check_builtin_names(checked)
  _check_mesh(checked["mesh"])
  _check_kept_checkpoints(checked)
  _check_early_stopping(checked["early_stopping"])
  fine_tuning.check(checked)
  _check_wrappers(checked)
  # Locked, not frozen: a FrozenConfigDict cannot hold the dicts in `wrappers`.
  return ml_collections.ConfigDict(checked).lock()


def add_defaults(
  config: Mapping[str, Any] | ml_collections.ConfigDict,
) -> ml_collections.ConfigDict:
  """Returns a config, unlocked, with the defaults of the fields that it lacks.

  Args:
    config: A `ConfigDict` or a dict, with some or all of the fields. A
      `ConfigDict` is changed in place, to keep its references to fields.

  Raises:
    ValueError: It has a field that is not defined.
  """
  if not isinstance(config, ml_collections.ConfigDict):
    config = ml_collections.ConfigDict(config, type_safe=False)
  config.unlock()
  _add_defaults("config", definition.FIELDS, config)
  return config


def _add_defaults(where: str, fields: Sequence[Field], config: Any) -> None:
  _check_names(where, fields, config)
  for field in fields:
    if field.name not in config:
      config[field.name] = _default(field)
    # A value of another type is reported by `check`.
    elif field.fields and isinstance(
      config[field.name], ml_collections.ConfigDict
    ):
      _add_defaults(f"{where}.{field.name}", field.fields, config[field.name])


def _default(field: Field) -> Any:
  """Returns the value of a field in `defaults`."""
  if field.fields:
    return {inner.name: _default(inner) for inner in field.fields}
  if field.default is not definition.REQUIRED:
    return _to_dict(field.default)
  # A ConfigDict holds a dict that replaces a placeholder as a plain dict.
  is_dict = field.kind.type is dict
  return {} if is_dict else config_dict.placeholder(field.kind.type)


def _check_fields(
  where: str, fields: Sequence[Field], given: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the checked value or the default of each field."""
  _check_names(where, fields, given)
  values = {}
  for field in fields:
    place = f"{where}.{field.name}"
    value = given.get(field.name, _to_dict(field.default))
    if field.default is definition.REQUIRED and (
      # As in `defaults`.
      value is definition.REQUIRED or value is None or value == {}
    ):
      raise ValueError(
        f"{place} is missing, and has no default: it must be "
        f"{field.kind.allowed}."
      )
    value = field.kind.check(place, value)
    if field.fields:
      value = _check_fields(place, field.fields, value)
    values[field.name] = value
  return values


def _check_names(
  where: str, fields: Sequence[Field], given: Iterable[str]
) -> None:
  """Raises if a name is not that of a field."""
  names = [field.name for field in fields]
  for name in given:
    if name not in names:
      places = " or ".join(_places("config", definition.FIELDS, name))
      hint = f" Did you mean {places}?" if places else ""
      raise ValueError(
        f"{where}.{name} is not a field."
        f"{hint or checks.did_you_mean(name, names)} The fields are "
        f"{', '.join(names)}."
      )


def _places(where: str, fields: Sequence[Field], name: str) -> Iterator[str]:
  """Yields the paths of the fields of a name."""
  for field in fields:
    if field.name == name:
      yield f"{where}.{name}"
    yield from _places(f"{where}.{field.name}", field.fields, name)


def _to_dict(value: Any) -> Any:
  # A deep copy: changing the checked config leaves the given one as it is.
  if isinstance(value, ml_collections.ConfigDict):
    return value.to_dict()
  if isinstance(value, Mapping):
    return {key: _to_dict(item) for key, item in value.items()}
  return value


def _check_model_and_data(config: Mapping[str, Any]) -> None:
  """Raises if the model or the data of a built-in task is missing."""
  task = config.get("task", "classification")
  name = task.get("name") if isinstance(task, dict) else task
  if name in tasks.BUILTIN:  # others may create their own
    for field in ("model", "data"):
      if config.get(field) in (None, {}):
        raise ValueError(
          f"config.{field} is missing: config.task={name!r} needs a dict with "
          "a 'name' and arguments."
        )


def _check_builtin_names(config: Mapping[str, Any]) -> None:
  """Raises if a name is none of flaxshard's, or the optimizer is wrong."""
  task = config["task"]
  name = task if isinstance(task, str) else task["name"]
  known: dict[str, tuple[Any, Mapping[str, Any]]] = {
    "data": (config["data"].get("name"), factories.FACTORIES),
    "schedule": (config["schedule"]["name"], optimizer.SCHEDULES),
    "optimizer": (config["optimizer"]["name"], optimizer.OPTIMIZERS),
  }
  if not name.startswith("<"):  # that of an object, see `tasks.load.record`
    known["task"] = (name, tasks.BUILTIN)
  if name in tasks.BUILTIN:  # others may create their own
    known["model"] = (config["model"]["name"], models.MODELS)
  for field, (name, builtin) in known.items():
    # Code of the user is not imported.
    if name is not None and ":" not in name:
      registry.lookup(f"config.{field}.name", name, builtin)
  if all(":" not in known[field][0] for field in ("optimizer", "schedule")):
    optimizer.create(config)


def _check_mesh(mesh: Mapping[str, Any]) -> None:
  if mesh["axes"] and mesh["logical_devices"] != 1:
    raise ValueError(
      f"config.mesh.logical_devices={mesh['logical_devices']} must be 1 if "
      f"config.mesh.axes={mesh['axes']!r} names the axes of the logical "
      "devices."
    )


def _check_kept_checkpoints(config: Mapping[str, Any]) -> None:
  """Raises if a checkpoint is to be kept that is never saved or rated."""
  every = config["checkpoint_every_steps"]
  keep_every = config["keep_every_steps"]
  if keep_every % every:
    raise ValueError(
      f"config.keep_every_steps={keep_every} must be 0 or a multiple of "
      f"config.checkpoint_every_steps={every}: other steps are not saved."
    )
  metric, mode = config["best_metric"], config["best_mode"]
  if metric == "none":
    for name, default in (("keep_best", 1), ("best_mode", "auto")):
      if config[name] != default:
        raise ValueError(
          f"config.{name}={config[name]!r} needs config.best_metric, such as "
          f"{' or '.join(map(repr, definition.BEST_MODES))}."
        )
  elif not metric.startswith("eval_"):
    raise ValueError(
      "config.best_metric must be a metric of the evaluation, such as "
      f"{' or '.join(map(repr, definition.BEST_MODES))}, or 'none', got "
      f"{metric!r}.{checks.did_you_mean(metric, definition.BEST_MODES)}"
    )
  elif mode == "auto" and metric not in definition.BEST_MODES:
    raise ValueError(
      f"config.best_metric={metric!r} needs config.best_mode, 'max' or 'min': "
      "whether larger or smaller values are better."
      f"{checks.did_you_mean(metric, definition.BEST_MODES)}"
    )
  elif every % config["eval_every_steps"]:
    raise ValueError(
      f"config.checkpoint_every_steps={every} must be a multiple of "
      f"config.eval_every_steps={config['eval_every_steps']} with "
      f"config.best_metric={config['best_metric']!r}: a checkpoint is rated by "
      "the evaluation of its step."
    )


def _check_early_stopping(rule: Mapping[str, Any]) -> None:
  if rule["metric"] == "none":
    for field in definition.EARLY_STOPPING:
      if rule[field.name] != field.default:
        raise ValueError(
          f"config.early_stopping.{field.name}={rule[field.name]!r} needs "
          "config.early_stopping.metric, such as 'eval_loss'."
        )
  elif rule["mode"] == "auto" and rule["metric"] not in definition.BEST_MODES:
    raise ValueError(
      f"config.early_stopping.mode='auto' is not known for the metric "
      f"{rule['metric']!r}: it must be 'min' if smaller values are better, or "
      "'max'."
    )


def _check_wrappers(config: Mapping[str, Any]) -> None:
  """Raises if wrappers do not fit each other, or the mesh."""
  given = wrappers.from_config(config["wrappers"])
  per_replica = config["mesh"]["per_replica"]
  wrappers_config.add_accumulation(
    given, config["accumulate_steps"], per_replica=per_replica
  )
  if per_replica or config["mesh"]["replica"] == 1:
    return
  names = [base.name_of(w) for w in given if stack.reduces_gradients((w,))]
  if names:
    raise ValueError(
      f"config.wrappers: {', '.join(names)} reduces the gradients of the "
      "replicas, which config.mesh.per_replica=False does not keep apart; set "
      "config.mesh.per_replica=True, or config.mesh.replica=1."
    )
