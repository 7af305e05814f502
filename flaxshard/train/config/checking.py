"""Checks configs, and fills in their defaults."""

from __future__ import annotations

from collections.abc import Mapping
import operator
from typing import Any

import ml_collections
from ml_collections import config_dict
import pydantic

from flaxshard import data
from flaxshard import models
from flaxshard import tasks
from flaxshard import wrappers
from flaxshard.core import checks
from flaxshard.core import optimizer
from flaxshard.core import registry
from flaxshard.train.config import definition
from flaxshard.train.config.definition import FIELDS

# Whether a larger or a smaller value is better, with a mode of "auto".
_BEST_MODES = {"eval_accuracy": "max", "eval_loss": "min"}
# What the fields with a name may name, besides `"package.module:attribute"`.
_BUILTIN: dict[str, Mapping[str, Any]] = {
  "task": tasks.BUILTIN,
  "model": models.MODELS,
  "data": data.FACTORIES,
  "schedule": optimizer.SCHEDULES,
  "optimizer": optimizer.OPTIMIZERS,
}
# The first field of each turns the others on.
_SWITCHES = (
  ("best_metric", "best_mode", "keep_best"),
  ("sparse", "sparse_semantics"),
  *(
    tuple(path for path in FIELDS if path.startswith(f"{group}."))
    for group in ("early_stopping", "init_from", "lora")
  ),
)


def resolve_mode(metric: str, mode: str) -> str:
  """Returns `"max"` or `"min"`: whether larger or smaller values are better.

  Args:
    metric: Name of a metric of the evaluation.
    mode: `"max"`, `"min"`, or `"auto"`: `"min"` for `eval_loss`, else `"max"`.
  """
  return _BEST_MODES.get(metric, "max") if mode == "auto" else mode


def defaults(config: Any = None) -> ml_collections.ConfigDict:
  """Returns a config with every field, to start your own from.

  Required fields are None, or `{}` where a dict is to be set. `check` raises if
  they stay so.

  Args:
    config: A `ConfigDict` or a dict, with the fields that are not to have their
      defaults. A `ConfigDict` is changed in place, to keep its references to
      fields.

  Returns:
    An unlocked config. Its fields take values of any type: `check` checks them.

  Example:
    >>> import flaxshard as fs
    >>> config = fs.config.defaults()
    >>> config.model = {"name": "cnn"}
    >>> config.mesh.replica = 2
    >>> config.optimizer.name, config.batch_size
    ('adamw', None)
  """
  if not isinstance(config, ml_collections.ConfigDict):
    config = ml_collections.ConfigDict(config, type_safe=False)
  config.unlock()
  for path, field in FIELDS.items():
    parent, _, name = path.rpartition(".")
    group = config[parent] if parent else config
    # `check` reports what is no group.
    if not registry.is_dict(group) or name in group:
      continue
    if field.is_required():
      group[name] = config_dict.placeholder(field.annotation)
    elif definition.is_group(field.annotation):
      group[name] = {}
    else:
      group[name] = field.get_default()
  return config


def check(config: Any, task: Any = None) -> ml_collections.ConfigDict:
  """Checks a config and fills in the defaults.

  What a name such as `"my_package.my_module:my_model"` stands for is not
  imported: the run checks that.

  Args:
    config: A `ConfigDict` or a dict, with some or all of the fields.
    task: A task object, in place of the one that `config.task` names.

  Returns:
    A locked copy with every field; `task` has the class of a task object.

  Raises:
    ValueError: A field is missing or unknown (the message lists similar names),
      or its value is not allowed.
    TypeError: `config` is not a config, or a value has the wrong type; then it
      is a ValueError as well.

  Example:
    >>> import flaxshard as fs
    >>> config = fs.config.check({
    ...   "model": {"name": "cnn"}, "data": {"name": "digits"},
    ...   "batch_size": 64, "num_train_steps": 100, "learning_rate": 1e-3})
    >>> config.optimizer.name, config.mesh.replica
    ('adamw', -1)
  """
  if not registry.is_dict(config):
    raise TypeError(
      "config must be a ConfigDict or a dict of its fields, got "
      f"{checks.describe(config)}. flaxshard.config.read(name) reads one."
    )
  # A copy: changing the checked config leaves the given one as it is.
  given = registry.to_plain(config)
  if task is not None:
    cls = type(tasks.adapt(task).task)
    name = {"name": f"<{cls.__module__}.{cls.__qualname__}>"}
    named = registry.with_name(given.get("task", "classification"))
    if named not in ({"name": "classification"}, name):
      raise ValueError(
        f"config.task={named!r} and task={name['name']} are both given: give "
        "one of them."
      )
    given["task"] = name
  try:
    model = definition.Config.model_validate(given)
  except pydantic.ValidationError as e:
    raise _first_error(e) from None
  values = {path: operator.attrgetter(path)(model) for path in FIELDS}
  _check_names(values)
  _check_combinations(values)
  checked = model.to_dict()
  if ":" not in checked["optimizer"]["name"] + checked["schedule"]["name"]:
    optimizer.create(checked)
  # Locked, not frozen: a FrozenConfigDict cannot hold the dicts in `wrappers`.
  return ml_collections.ConfigDict(checked).lock()


def _first_error(errors: pydantic.ValidationError) -> ValueError:
  """Returns an error that names the field, the value and what is allowed."""
  # A misspelled field comes before one that is missing.
  error = min(errors.errors(), key=lambda e: e["type"] != "extra_forbidden")
  *parents, field = ("config", *map(str, error["loc"]))
  if error["type"] == "extra_forbidden":
    return ValueError(_unknown_field(".".join([*parents[1:], field])))
  message = f"{field}: {error['msg']}"
  if error["type"] != "missing":
    message += f", got {error['input']!r}"
  # Those of our own checks begin with the field.
  cause = error.get("ctx", {}).get("error", f"{message}.")
  is_type = isinstance(cause, TypeError) or error["type"].endswith("_type")
  kind = checks.ArgumentTypeError if is_type else ValueError
  return kind(".".join([*parents, str(cause)]))


def _unknown_field(path: str) -> str:
  """Returns the message of a field that is not defined."""
  group, _, name = path.rpartition(".")
  known = [p.rpartition(".") for p in FIELDS]
  names = [n for g, _, n in known if g == group]
  places = [f"config.{p}" for p in FIELDS if p.split(".")[-1] == name]
  hint = f" Did you mean {' or '.join(places)}?" if places else ""
  return (
    f"config.{path} is not a field.{hint or checks.did_you_mean(name, names)} "
    f"The fields are {', '.join(names)}."
  )


def _check_names(values: Mapping[str, Any]) -> None:
  """Raises if a name is missing or unknown.

  What a name of a module stands for is not imported.
  """
  named = {field: (values[field], known) for field, known in _BUILTIN.items()}
  if values["task"].get("name") not in tasks.BUILTIN:
    # Other tasks than flaxshard's may create their own.
    del named["model"], named["data"]
  named |= {f"hooks[{i}]": (hook, {}) for i, hook in enumerate(values["hooks"])}
  for field, (value, known) in named.items():
    name = value.get("name")
    # A task that was given as an object is `<module.Class>`.
    if not isinstance(name, str) or not (":" in name or name.startswith("<")):
      registry.lookup(f"config.{field}.name", name, known)


def _check_combinations(values: Mapping[str, Any]) -> None:
  """Raises if fields that are valid by themselves contradict each other."""

  def show(path: str) -> str:
    return f"config.{path}={values[path]!r}"

  if values["mesh.axes"] and values["mesh.logical_devices"] != 1:
    raise ValueError(
      f"{show('mesh.logical_devices')} must be 1 if {show('mesh.axes')} names "
      "the axes of the logical devices."
    )
  every = values["checkpoint_every_steps"]
  if values["keep_every_steps"] % every:
    raise ValueError(
      f"{show('keep_every_steps')} must be 0 or a multiple of "
      f"{show('checkpoint_every_steps')}: other steps are not saved."
    )
  if values["best_metric"] != "none" and every % values["eval_every_steps"]:
    raise ValueError(
      f"{show('checkpoint_every_steps')} must be a multiple of "
      f"{show('eval_every_steps')} with {show('best_metric')}: a checkpoint is "
      "rated by the evaluation of its step."
    )
  for switch, *others in _SWITCHES:
    changed = [p for p in others if values[p] != FIELDS[p].default]
    if changed and values[switch] == FIELDS[switch].default:
      raise ValueError(f"{show(changed[0])} has no effect with {show(switch)}.")
  for metric, mode in (
    ("best_metric", "best_mode"),
    ("early_stopping.metric", "early_stopping.mode"),
  ):
    is_known = values[metric] in ("none", *_BEST_MODES)
    if values[mode] == "auto" and not is_known:
      raise ValueError(
        f"{show(mode)} is not known for {show(metric)}: it must be 'min' if "
        "smaller values are better, or 'max'."
      )
  given = wrappers.from_config(values["wrappers"])
  if any(isinstance(w, wrappers.Accumulate) for w in given):
    raise ValueError(
      "config.wrappers: 'accumulate' is not a wrapper of a training config; "
      "set config.accumulate_steps, which the schedule depends on as well."
    )
  names = [w.name for w in given if w.reduces in ("self", "local")]
  if names and values["mesh.replica"] != 1 and not values["mesh.per_replica"]:
    raise ValueError(
      f"config.wrappers: {', '.join(names)} reduces the gradients of the "
      "replicas, which config.mesh.per_replica=False does not keep apart; set "
      "config.mesh.per_replica=True, or config.mesh.replica=1."
    )
