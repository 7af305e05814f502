"""The fields of a training config: types, defaults and meanings.

Each class is a group of fields: a model of pydantic, which checks the values. A
field without a default is required. `check`, `defaults`, `--help=config` and
docs/config.md follow from this declaration. Fields stand in the order in which
they are read.
"""

from __future__ import annotations

from collections.abc import Callable
import inspect
import re
import textwrap
from typing import Annotated, Any, get_args, get_origin, Literal, TypeGuard

import pydantic
from pydantic.fields import FieldInfo

from flaxshard import wrappers as wrappers_lib
from flaxshard.core import checks
from flaxshard.core import parameter_groups
from flaxshard.core import patterns
from flaxshard.core import policy
from flaxshard.core import registry
from flaxshard.partitioning import rules as rules_lib
from flaxshard.sparse import optimizer as sparse_optimizer

# Types of fields: pydantic's, with checks of values that other modules read.


def _readable(read: Callable[[Any, Any], Any]) -> Any:
  """Returns the check that `read(field, value)` does not raise."""

  def check(value: Any, info: pydantic.ValidationInfo) -> Any:
    read(info.field_name, value)
    return value

  return pydantic.AfterValidator(check)


def _where(allowed: str, is_valid: Callable[[Any], bool]) -> Any:
  """Returns the check that `is_valid(value)` is true."""

  def read(field: str, value: Any) -> None:
    if not is_valid(value):
      raise ValueError(f"{field} must be {allowed}, got {value!r}.")

  return _readable(read)


# Integers are int32 on the devices, and schedules compute in float32, whose
# largest number is 3.4e38.
Natural = Annotated[int, pydantic.Field(ge=0, le=checks.INT32_MAX)]
Count = Annotated[int, pydantic.Field(ge=1, le=checks.INT32_MAX)]
Positive = Annotated[float, pydantic.Field(gt=0, lt=1e38)]
NotNegative = Annotated[float, pydantic.Field(ge=0, lt=1e38)]
Mode = Literal["auto", "max", "min"]
Replicas = Annotated[
  int, _where("-1, or at least 1", lambda count: count == -1 or count > 0)
]
# Whether there must be a name is checked with what it stands for.
Named = Annotated[
  dict[str, Any],
  pydantic.BeforeValidator(
    lambda value: {} if value is None else registry.with_name(value)
  ),
]
StepsRange = Annotated[
  tuple[Count, ...],
  _where(
    "() or (first step, last step)",
    lambda steps: not steps or (len(steps) == 2 and steps[0] <= steps[1]),
  ),
]
Axes = Annotated[
  tuple[tuple[str, Count], ...],
  # The strategy adds the axis "replica" itself.
  _where(
    'pairs with different names other than "replica"',
    lambda axes: len(dict(axes).keys() - {"replica"}) == len(axes),
  ),
]
Patterns = Annotated[tuple[str, ...], _readable(patterns.check)]
Pairs = Annotated[tuple[tuple[str, Any], ...], _readable(patterns.check_pairs)]
LearningRates = Annotated[
  tuple[tuple[str, float], ...], _readable(parameter_groups.check_factors)
]
Rules = Annotated[
  Any,
  _readable(lambda field, value: rules_lib.from_config(value, argument=field)),
]
Wrappers = Annotated[
  tuple[Any, ...],
  _readable(lambda field, value: wrappers_lib.from_config(value, field)),
]


# The fields.


class Group(pydantic.BaseModel):
  """Fields of a config, with the docstring of the class for meanings."""

  # Strict: "3" is no number, and True is not 1.
  model_config = pydantic.ConfigDict(
    strict=True, extra="forbid", allow_inf_nan=False
  )

  @classmethod
  def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
    """Takes the attributes in the docstring for the meanings of the fields."""
    doc = inspect.cleandoc(cls.__doc__ or "")
    for name, meaning in re.findall(r"^  (\w+): (.+(?:\n    .+)*)", doc, re.M):
      cls.model_fields[name].description = " ".join(meaning.split())

  def to_dict(self) -> dict[str, Any]:
    """Returns dicts of the fields; their values, of any type, stay."""
    # model_dump would turn the dataclasses among them into dicts.
    return {
      name: value.to_dict() if isinstance(value, Group) else value
      for name, value in self
    }


class InitFrom(Group):
  """Parameters of a checkpoint to begin a run with.

  A run that resumes does not read them. See `flaxshard.checkpoint.init_from`.

  Attributes:
    path: A workdir, a checkpoint of Orbax or Flax, or a safetensors file, on a
      file system or in a bucket; empty initializes the model by itself.
    step: Step to read of a workdir or of a directory of steps; -1 is the
      newest.
    item: Name of the item of an Orbax checkpoint; empty looks for the train
      state.
    subtree: Path of the part of the file to read, such as `"params/encoder"`.
    rename: Each is applied with `re.sub` to the paths of the file, in this
      order: `(("^encoder/", "backbone/"),)`.
    keep: Paths of the model that keep their initial values: `("^head/",)`.
    ignore: Paths of the file, before `rename`, that are not used.
    transpose: Order of the dimensions of the file's arrays in the model, by
      paths of the model: `(("kernel$", (1, 0)),)` for kernels of PyTorch.
    reshape: Paths of the model whose arrays get the shape that they have in the
      model, after `transpose`: `("query/",)`.
    cast: Whether to round arrays to dtypes that cannot hold all their values.
  """

  path: str = ""
  step: Annotated[int, pydantic.Field(ge=-1)] = -1
  item: str = ""
  subtree: str = ""
  rename: Pairs = ()
  keep: Patterns = ()
  ignore: Patterns = ()
  transpose: Pairs = ()
  reshape: Patterns = ()
  cast: bool = False


class Lora(Group):
  """Low-rank factors to train in place of parameters.

  See `flaxshard.LoRA`.

  Attributes:
    rank: Rank of the factors that are trained; 0 trains the parameters
      themselves.
    alpha: The product of the factors is multiplied by `alpha / rank`.
    patterns: Paths of the parameters that get factors.
    train: Paths of parameters that are trained as they are, such as a new head.
      All others are frozen.
    batch_dims: How many of the first dimensions of parameters count layers or
      experts, each of which has factors of its own: `(("^layers/", 1),)`.
  """

  rank: Natural = 0
  alpha: Positive = 16.0
  patterns: Patterns = ("kernel$",)
  train: Patterns = ()
  batch_dims: Pairs = ()


class Mesh(Group):
  """The devices, and how arrays are split over them.

  Attributes:
    replica: Number of replicas, which share a batch; -1 uses as many as fit the
      devices.
    logical_devices: Devices of each replica.
    axes: Named logical axes, such as `(("model", 2),)`, instead of a number of
      logical devices.
    rules: How parameters are split: `("fsdp",)`, `(("kernel$", (None,
      "model")),)`; see `flaxshard.partitioning.rules.from_config`.
    split: Pieces that an array of the batch is split into over the logical
      devices, by key, one number for each dimension: `{"inputs": (1, 2, 4,
      1)}`.
    per_replica: Runs the step once per replica, as `Strategy.run` does.
    virtual_devices: Number of virtual CPU devices to run on where there is no
      GPU or TPU; 0: the CPU is one device. `JAX_PLATFORMS=cpu` runs on them
      although there is a GPU or TPU. It is the number over all processes: each
      gets an equal share.
  """

  replica: Replicas = -1
  logical_devices: Count = 1
  axes: Axes = ()
  rules: Rules = ()
  split: dict[str, tuple[int, ...]] = {}
  per_replica: bool = False
  virtual_devices: Natural = 0


class EarlyStopping(Group):
  """Ends the run, with a checkpoint, when evaluations no longer improve.

  Attributes:
    metric: A metric of the evaluation, such as `"eval_loss"`; `"none"` turns
      early stopping off.
    mode: Whether smaller (`"min"`) or larger (`"max"`) values are better;
      `"auto"` is `"min"` for `eval_loss` and `"max"` for `eval_accuracy`.
    patience: Evaluations in a row that need not improve; the run ends at the
      next one that does not, as with `flax.training.early_stopping`.
    min_delta: An evaluation improves if it is better than the best one by more
      than this.
  """

  metric: str = "none"
  mode: Mode = "auto"
  patience: Natural = 3
  min_delta: NotNegative = 0.0


class Work(Group):
  """Task, model and data.

  Attributes:
    task: The loss, the metrics and the evaluation: `"classification"`,
      `"language_modeling"` or `"package.module:Class"`; with arguments
      `{"name": ..., **arguments}`. See
      https://flaxshard.github.io/flaxshard/guides/tasks.html.
    model: The model and its arguments; see `flaxshard.models.create`. A task
      that creates its own model gets them, and needs no name.
    data: The data and its arguments; see `flaxshard.data.load`. Only a task
      that loads its own data needs none.
    batch_size: Examples in a batch, over all replicas and processes.
    num_train_steps: Step at which training ends.
    seed: Seed of the initialization, the data order and dropout.
  """

  task: Named = {"name": "classification"}
  model: Named = {}
  data: Named = {}
  batch_size: Count
  num_train_steps: Count
  seed: Natural = 0


class Optimization(Group):
  """Optimization.

  Attributes:
    learning_rate: Peak of the learning-rate schedule.
    schedule: The learning rate over the steps: `"constant"`, `"cosine"` (with
      `warmup_steps`) or `"package.module:function"`; see
      `flaxshard.core.optimizer.create`.
    optimizer: An optax optimizer and its arguments, or
      `"package.module:function"`; `clip_by_global_norm` is the largest norm of
      all gradients together. See `flaxshard.core.optimizer.create`.
    accumulate_steps: Number of batches in an update, which takes the mean of
      their gradients: `batch_size * accumulate_steps` examples.
      `num_train_steps` and the other numbers of steps count batches. The
      schedule counts updates: its length is `num_train_steps //
      accumulate_steps`, and `warmup_steps` are updates. See
      `flaxshard.Accumulate`.
    freeze: Regular expressions, searched in paths such as
      `encoder/layer0/kernel`: these parameters are not trained; see
      `flaxshard.freeze`.
    learning_rates: Factors of the learning rate by pattern: `(("^head/",
      10.0),)`. The first pattern that is found in the path of a parameter
      counts; see `flaxshard.scale_learning_rates`. Rows of metrics have the
      rate of each pattern, as `learning_rate/^head/`.
    sparse: Regular expressions, searched in paths such as `embed/embedding`:
      gradients and updates of these tables have the rows that a step used; see
      `flaxshard.sparse_rows`.
    sparse_semantics: What happens to the rows of `sparse` tables that a step
      did not use; see `flaxshard.sparse_rows`.
    precision: Dtype of the computation; parameters are float32.
    wrappers: Wrappers of the optimizer, outermost first: `(("loss_scale",
      {"scale": "dynamic"}),)`; see `flaxshard.wrappers.from_config`.
  """

  learning_rate: Positive
  schedule: Named = {"name": "constant"}
  optimizer: Named = {"name": "adamw"}
  accumulate_steps: Count = 1
  freeze: Patterns = ()
  learning_rates: LearningRates = ()
  sparse: Patterns = ()
  sparse_semantics: sparse_optimizer.Semantics = "lazy"
  precision: policy.Name = "float32"
  wrappers: Wrappers = ()


class FineTuning(Group):
  """Fine-tuning."""

  init_from: InitFrom = InitFrom()
  lora: Lora = Lora()


class Devices(Group):
  """Devices."""

  mesh: Mesh = Mesh()


class Metrics(Group):
  """Metrics and evaluation.

  Attributes:
    log_every_steps: Steps between two rows of metrics.
    eval_every_steps: Steps between two evaluations. The last step is evaluated
      as well.
    writer: Event writer.
    profile_steps: `(first, last)` step to trace into `workdir/profile`.
  """

  log_every_steps: Count = 100
  eval_every_steps: Count = 1000
  writer: Literal["tensorboard", "none"] = "tensorboard"
  profile_steps: StepsRange = ()


class Checkpoints(Group):
  """Checkpoints.

  Attributes:
    checkpoint_every_steps: Steps between two checkpoints. The last step is
      saved as well.
    checkpoint_every_minutes: Also saves with a row of metrics when the last
      save is at least this many minutes old; 0 turns it off.
    max_to_keep: Number of newest checkpoints to keep.
    keep_every_steps: Also keeps checkpoints at multiples of this; 0 keeps none
      of them.
    best_metric: Also keeps the checkpoints that are best by this metric of the
      evaluation, such as `"eval_loss"`; `"none"` keeps none of them.
    best_mode: Whether the largest or the smallest `best_metric` is best.
      `"auto"` is `"min"` for `eval_loss` and `"max"` for `eval_accuracy`.
    keep_best: Number of best checkpoints to keep.
  """

  checkpoint_every_steps: Count = 1000
  checkpoint_every_minutes: NotNegative = 0.0
  max_to_keep: Count = 3
  keep_every_steps: Natural = 0
  best_metric: str = "none"
  best_mode: Mode = "auto"
  keep_best: Count = 1


class Run(Group):
  """The run.

  Attributes:
    hooks: Functions to call after each row of metrics with `(step, state,
      metrics)`: `"package.module:name"`, or a dict with a `"name"` and
      arguments; see `flaxshard.train.hooks`.
    resume: What to do in a workdir with a finished run: `"auto"` returns its
      state if the config is the same, and is an error otherwise; `"extend"`
      trains on to a later `num_train_steps`.
    on_nonfinite: What a run does that diverges: `"stop"` with an error, or
      `"continue"`. It diverges at a non-finite loss when no wrapper skips the
      step, at a non-finite evaluation, with non-finite parameters at a save,
      and after 20 skipped steps in a row with a loss scale at its floor.
  """

  early_stopping: EarlyStopping = EarlyStopping()
  hooks: tuple[Named, ...] = ()
  resume: Literal["auto", "extend"] = "auto"
  on_nonfinite: Literal["stop", "continue"] = "stop"


# Fields are read from the last base to the first.
class Config(
  Run, Checkpoints, Metrics, Devices, FineTuning, Optimization, Work
):
  """A training config: the fields of all sections."""


def fields_of(group: type[Group], prefix: str = "") -> dict[str, FieldInfo]:
  """Returns the fields of a class by path.

  A group is a field too, and comes before its fields.

  Example:
    >>> list(fields_of(Devices))[:2]
    ['mesh', 'mesh.replica']
  """
  fields = {}
  for name, field in group.model_fields.items():
    path = prefix + name
    fields[path] = field
    if is_group(field.annotation):
      fields |= fields_of(field.annotation, f"{path}.")
  return fields


def is_group(kind: Any) -> TypeGuard[type[Group]]:
  """Returns whether values of a type are dicts with fields of their own."""
  return isinstance(kind, type) and issubclass(kind, Group)


SECTIONS = tuple(reversed(Config.__bases__))
FIELDS = fields_of(Config)
# These do not change what a run of given data computes.
FREE_FIELDS = frozenset(
  Devices.model_fields | Metrics.model_fields | Checkpoints.model_fields
) | {"hooks", "on_nonfinite", "resume"}


# Their text, for the help and for the docs.


def help_text() -> str:
  """Returns all fields as text for a terminal."""
  intro = (
    "The fields of a config. A config file has what differs from the defaults; "
    "--config.FIELD=VALUE sets a field on the command line. A name stands for "
    'a dict with this "name". As a page: '
    "https://flaxshard.github.io/flaxshard/config.html"
  )
  return "\n\n".join(
    textwrap.fill(text, 79, break_on_hyphens=False, break_long_words=False)
    for text in [intro, *markdown().split("\n\n")]
  )


def markdown() -> str:
  """Returns all fields in Markdown, a heading each, for docs/config.md."""
  lines = []
  for section in SECTIONS:
    lines.append(f"## {_about(section).rstrip('.')}")
    for path, field in fields_of(section).items():
      level = "#" * (3 + path.count("."))
      meaning = field.description or _about(field.annotation)
      lines += [f"{level} `{path}`", meaning, _facts(field)]
  return "\n\n".join(lines)


def _about(group: object) -> str:
  """Returns the docstring of a group without the attributes, as one line."""
  return " ".join((group.__doc__ or "").split("Attributes:")[0].split())


def _facts(field: FieldInfo) -> str:
  """Returns what is allowed, and the default, in Markdown."""
  kind: Any = field.annotation
  if is_group(kind):
    return "A dict of the fields below."
  if get_origin(kind) is Literal:
    facts = [" or ".join(map(repr, get_args(kind)))]
  else:
    facts = [(get_origin(kind) or kind).__name__]
  for bound, words in (("ge", "at least"), ("gt", "above")):
    limits = [getattr(x, bound) for x in field.metadata if hasattr(x, bound)]
    facts += [f"{words} {limit}" for limit in limits]
  required = field.is_required()
  facts.append("required" if required else f"default `{field.default!r}`")
  return f"Allowed: {', '.join(facts)}."
