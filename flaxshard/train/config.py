"""The fields of a training config: allowed values and defaults.

A config is a plain `ml_collections` file with a `get_config()` function, such
as `configs/digits.py`. `check` rejects unknown fields and invalid values before
anything is built or compiled.

Fields that every config has:

- `model`: `{"name": ..., **arguments}`; see `flaxshard.models.create`.
- `data`: `{"name": ..., **arguments}`; see `flaxshard.data.load`.
- `batch_size`: Examples in a batch, over all replicas and processes.
- `num_train_steps`: Step at which training ends.
- `learning_rate`: Peak of the learning-rate schedule.
- `seed`: Seed of the initialization, the data order and dropout.
- `wrappers`: `(name, arguments)` pairs, outermost first; see
  `flaxshard.wrappers.from_config`.
- `mesh`: The devices, and how arrays are split over them; see below.
- `precision`: `"float32"`, `"mixed_float16"` or `"mixed_bfloat16"`.
- `log_every_steps`, `eval_every_steps`, `checkpoint_every_steps`: Steps between
  two rows of metrics, two evaluations, two checkpoints.

Fields with a default:

- `optimizer` (`{"name": "adamw"}`), `schedule` (`{"name": "constant"}`): see
  `flaxshard.core.optimizer.create`.
- `on_nonfinite` (`"stop"`): What a run does that diverges: `"stop"` with an
  error, or `"continue"`. It diverges at a non-finite loss when no wrapper skips
  the step, at a non-finite evaluation, with non-finite parameters at a save,
  and after 20 skipped steps in a row with a loss scale at its floor.
- `profile_steps` (`()`): `(first, last)` step to trace into `workdir/profile`.
- `writer` (`"tensorboard"`): Event writer; also `"clu"` or `"none"`.
- `max_to_keep` (3): Number of newest checkpoints to keep.
- `checkpoint_every_minutes` (0): Saves at the next row of metrics when the last
  save is at least this many minutes old; 0 turns it off.
- `keep_every_steps` (0): Also keeps checkpoints at multiples of this; 0 keeps
  none of them.
- `best_metric` (`"none"`): Also keeps the checkpoints that are best by
  `"eval_accuracy"` or `"eval_loss"`.
- `keep_best` (1): Number of best checkpoints to keep.
- `resume` (`"auto"`): What to do in a workdir with a finished run: `"auto"`
  returns its state if the config is the same, and is an error otherwise;
  `"extend"` trains on to a later `num_train_steps`.

Fields of `mesh`, all with a default:

- `replica` (-1): Number of replicas; -1 uses as many as fit the devices.
- `logical_devices` (1): Devices of each replica.
- `axes` (`()`): `(name, size)` pairs: named logical axes instead of a number
  of logical devices.
- `rules` (`()`): How parameters are split; see
  `flaxshard.partitioning.rules.from_config`.
- `split` (`{}`): Pieces that an array of the batch is split into over the
  logical devices, by key: one number for each dimension.
- `per_replica` (False): Runs the step once per replica, as `Strategy.run` does.
- `virtual_devices` (0): Number of virtual CPU devices to run on instead of the
  devices of this machine. It is the number over all processes: each gets an
  equal share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import functools
from typing import Any, NamedTuple

import ml_collections

from flaxshard import wrappers
from flaxshard.core import checks
from flaxshard.core import policy
from flaxshard.partitioning import rules

# Whether a larger or a smaller value of a `config.best_metric` is better.
BEST_MODES = {"eval_accuracy": "max", "eval_loss": "min"}


def _is_int(value: Any) -> bool:
  return isinstance(value, int) and not isinstance(value, bool)


def _check_positive(field: str, value: Any) -> float:
  # Below float32's largest number, 3.4e38: schedules compute in float32.
  return checks.number(field, value, above=0, below=1e38)


def _check_not_negative(field: str, value: Any) -> float:
  return checks.number(field, value, minimum=0, below=1e38)


def _check_named(field: str, value: Any) -> Any:
  if not isinstance(value, dict) or not isinstance(value.get("name"), str):
    raise ValueError(
      f"{field} must be a dict with a 'name' and the arguments of what it "
      f"names, got {value!r}."
    )
  return value


def _check_profile_steps(field: str, value: Any) -> Any:
  is_range = isinstance(value, (tuple, list)) and (
    len(value) == 0
    or (len(value) == 2 and all(map(_is_int, value)) and value[0] > 0)
  )
  if not is_range or list(value) != sorted(value):
    raise ValueError(
      f"{field} must be () or (first step, last step), got {value!r}."
    )
  return value


def _check_replicas(field: str, value: Any) -> int:
  if not _is_int(value) or not (value == -1 or value > 0):
    raise ValueError(
      f"{field} must be a number of replicas, or -1 for as many as fit, got "
      f"{value!r}."
    )
  return value


def _is_axis(value: Any) -> bool:
  return (
    isinstance(value, (tuple, list))
    and len(value) == 2
    and isinstance(value[0], str)
    # The strategy adds the axis "replica" itself.
    and value[0] not in ("", "replica")
    and _is_int(value[1])
    and value[1] > 0
  )


def _check_axes(field: str, value: Any) -> Any:
  if (
    not isinstance(value, (tuple, list))
    or not all(map(_is_axis, value))
    or len({name for name, _ in value}) < len(value)
  ):
    raise ValueError(
      f"{field} must be (name, size) pairs such as (('model', 2),), with "
      f"different names other than 'replica', got {value!r}."
    )
  return value


def _check_split(field: str, value: Any) -> Any:
  if not isinstance(value, dict) or not all(
    isinstance(pieces, (tuple, list)) and all(map(_is_int, pieces))
    for pieces in value.values()
  ):
    raise ValueError(
      f"{field} must be a dict from keys of the batch to numbers of pieces, "
      f"such as {{'inputs': (1, 2, 4, 1)}}, got {value!r}."
    )
  return value


def _check_rules(field: str, value: Any) -> Any:
  try:
    rules.from_config(value, argument=field)
  except TypeError as e:
    # Every invalid field is a ValueError.
    raise ValueError(str(e)) from e
  return value


def _check_mesh(field: str, value: Any) -> dict[str, Any]:
  if not isinstance(value, dict):
    raise ValueError(
      f"{field} must be a dict with {', '.join(_MESH_FIELDS)}, got {value!r}."
    )
  mesh = _check_fields(field, _MESH_FIELDS, value)
  if mesh["axes"] and mesh["logical_devices"] != 1:
    raise ValueError(
      f"{field}.logical_devices={mesh['logical_devices']} must be 1 if "
      f"{field}.axes={mesh['axes']!r} names the axes of the logical devices."
    )
  return mesh


# The default of a field that every config must have.
_REQUIRED: Any = object()


class _Field(NamedTuple):
  """A field: `check(name, value)` returns the value or raises."""

  check: Callable[[str, Any], Any]
  default: Any = _REQUIRED


_ONE_OR_MORE = functools.partial(checks.integer, minimum=1)
_ZERO_OR_MORE = functools.partial(checks.integer, minimum=0)


def _one_of(*allowed: str) -> Callable[[str, Any], Any]:
  return functools.partial(checks.one_of, allowed=allowed)


_MESH_FIELDS = {
  "replica": _Field(_check_replicas, -1),
  "logical_devices": _Field(_ONE_OR_MORE, 1),
  "axes": _Field(_check_axes, ()),
  "rules": _Field(_check_rules, ()),
  "split": _Field(_check_split, {}),
  "per_replica": _Field(checks.boolean, False),
  "virtual_devices": _Field(_ZERO_OR_MORE, 0),
}

_FIELDS = {
  "model": _Field(_check_named),
  "data": _Field(_check_named),
  "batch_size": _Field(_ONE_OR_MORE),
  "num_train_steps": _Field(_ONE_OR_MORE),
  "learning_rate": _Field(_check_positive),
  "seed": _Field(_ZERO_OR_MORE),
  # `wrappers.from_config` checks them: a wrong type is a TypeError.
  "wrappers": _Field(lambda field, value: value),
  "mesh": _Field(_check_mesh),
  "precision": _Field(_one_of(*policy.NAMES)),
  "log_every_steps": _Field(_ONE_OR_MORE),
  "eval_every_steps": _Field(_ONE_OR_MORE),
  "checkpoint_every_steps": _Field(_ONE_OR_MORE),
  "optimizer": _Field(_check_named, {"name": "adamw"}),
  "schedule": _Field(_check_named, {"name": "constant"}),
  "on_nonfinite": _Field(_one_of("stop", "continue"), "stop"),
  "profile_steps": _Field(_check_profile_steps, ()),
  "writer": _Field(_one_of("tensorboard", "clu", "none"), "tensorboard"),
  "max_to_keep": _Field(_ONE_OR_MORE, 3),
  "checkpoint_every_minutes": _Field(_check_not_negative, 0),
  "keep_every_steps": _Field(_ZERO_OR_MORE, 0),
  "best_metric": _Field(_one_of("none", *BEST_MODES), "none"),
  "keep_best": _Field(_ONE_OR_MORE, 1),
  "resume": _Field(_one_of("auto", "extend"), "auto"),
}


def check(config: Any) -> ml_collections.ConfigDict:
  """Checks a config and fills in the defaults.

  Args:
    config: A `ConfigDict` or a dict.

  Returns:
    A locked copy with every field of this module's docstring.

  Raises:
    ValueError: A field is missing or unknown (the message lists similar names),
      or its value is not allowed.
    TypeError: `config` is not a config, or `wrappers` is not a sequence of
      names and `(name, arguments)` pairs.

  Example:
    >>> config = check({
    ...   "model": {"name": "cnn"}, "data": {"name": "digits"},
    ...   "batch_size": 64, "num_train_steps": 100, "learning_rate": 1e-3,
    ...   "seed": 0, "wrappers": (), "mesh": {}, "precision": "float32",
    ...   "log_every_steps": 10, "eval_every_steps": 50,
    ...   "checkpoint_every_steps": 50})
    >>> config.optimizer.name, config.mesh.replica
    ('adamw', -1)
  """
  if not isinstance(config, (Mapping, ml_collections.ConfigDict)):
    # absl's flag holds a config file that failed to load as an object that
    # raises the file's error when any attribute is read.
    getattr(config, "model", None)
    raise TypeError(f"config must be a ConfigDict, got {type(config)}.")
  given = {name: _to_dict(config[name]) for name in config}
  checked = _check_fields("config", _FIELDS, given)
  _check_kept_checkpoints(checked)
  wrappers.from_config(checked["wrappers"])
  # Locked, not frozen: a FrozenConfigDict cannot hold the dicts in `wrappers`.
  return ml_collections.ConfigDict(checked).lock()


def _check_fields(
  where: str, fields: Mapping[str, _Field], given: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the checked value or the default of each field."""
  for name in given:
    if name not in fields:
      raise ValueError(
        f"{where}.{name} is not a field; the fields are {', '.join(fields)}."
        f"{checks.did_you_mean(name, fields)}"
      )
  values = {}
  for name, field in fields.items():
    value = given.get(name, field.default)
    if value is _REQUIRED:
      raise ValueError(f"{where}.{name} is missing.")
    values[name] = field.check(f"{where}.{name}", value)
  return values


def _to_dict(value: Any) -> Any:
  # A deep copy: changing the checked config leaves the given one as it is.
  if isinstance(value, ml_collections.ConfigDict):
    return value.to_dict()
  if isinstance(value, Mapping):
    return {key: _to_dict(item) for key, item in value.items()}
  return value


def _check_kept_checkpoints(config: Mapping[str, Any]) -> None:
  """Raises if a checkpoint is to be kept that is never saved or rated."""
  every = config["checkpoint_every_steps"]
  keep_every = config["keep_every_steps"]
  if keep_every % every:
    raise ValueError(
      f"config.keep_every_steps={keep_every} must be 0 or a multiple of "
      f"config.checkpoint_every_steps={every}: other steps are not saved."
    )
  if config["best_metric"] == "none":
    if config["keep_best"] != 1:
      raise ValueError(
        f"config.keep_best={config['keep_best']} needs config.best_metric, "
        f"one of {', '.join(map(repr, BEST_MODES))}."
      )
  elif every % config["eval_every_steps"]:
    raise ValueError(
      f"config.checkpoint_every_steps={every} must be a multiple of "
      f"config.eval_every_steps={config['eval_every_steps']} with "
      f"config.best_metric={config['best_metric']!r}: a checkpoint is rated by "
      "the evaluation of its step."
    )
