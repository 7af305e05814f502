"""The fields of a training config: types, defaults and meanings.

`check`, `defaults`, the flags of the command line, `--help=config` and
docs/config.md all follow from this table. Fields stand in the order in which
they are read.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from flaxshard.core import policy
from flaxshard.sparse import optimizer as sparse_optimizer
from flaxshard.train.config import kinds
from flaxshard.train.config.kinds import Kind

# Whether a larger or a smaller value is better, with `best_mode` "auto".
BEST_MODES = {"eval_accuracy": "max", "eval_loss": "min"}


def resolve_mode(metric: str, mode: str) -> str:
  """Returns `"max"` or `"min"`: whether larger or smaller values are better.

  Args:
    metric: Name of a metric of the evaluation.
    mode: `"max"`, `"min"`, or `"auto"`: `"min"` for `eval_loss`, else `"max"`.
  """
  return BEST_MODES.get(metric, "max") if mode == "auto" else mode


# The default of a field that every config must have.
REQUIRED: Any = object()


@dataclasses.dataclass(frozen=True)
class Field:
  """A field of a config.

  Attributes:
    name: The name.
    kind: The values that are allowed.
    default: The value if a config does not spell the field, or `REQUIRED`.
    meaning: What the field does, in Markdown.
    fields: The fields of a dict with fixed fields.
  """

  name: str
  kind: Kind
  default: Any
  meaning: str
  fields: tuple[Field, ...] = ()


MESH = (
  Field(
    "replica",
    kinds.REPLICAS,
    -1,
    "Number of replicas, which share a batch; -1 uses as many as fit the "
    "devices.",
  ),
  Field("logical_devices", kinds.integer(1), 1, "Devices of each replica."),
  Field(
    "axes",
    kinds.AXES,
    (),
    'Named logical axes, such as `(("model", 2),)`, instead of a number of '
    "logical devices.",
  ),
  Field(
    "rules",
    kinds.RULES,
    (),
    'How parameters are split: `("fsdp",)`, `(("kernel$", (None, "model")),)`; '
    "see `flaxshard.partitioning.rules.from_config`.",
  ),
  Field(
    "split",
    kinds.SPLIT,
    {},
    "Pieces that an array of the batch is split into over the logical devices, "
    'by key, one number for each dimension: `{"inputs": (1, 2, 4, 1)}`.',
  ),
  Field(
    "per_replica",
    kinds.BOOLEAN,
    False,
    "Runs the step once per replica, as `Strategy.run` does.",
  ),
  Field(
    "virtual_devices",
    kinds.integer(0),
    0,
    "Number of virtual CPU devices to run on where there is no GPU or TPU; 0: "
    "the CPU is one device. `JAX_PLATFORMS=cpu` runs on them although there is "
    "a GPU or TPU. It is the number over all processes: each gets an equal "
    "share.",
  ),
)

EARLY_STOPPING = (
  Field(
    "metric",
    kinds.EVALUATION_METRIC,
    "none",
    'A metric of the evaluation, such as `"eval_loss"`; `"none"` turns early '
    "stopping off.",
  ),
  Field(
    "mode",
    kinds.one_of("auto", "min", "max"),
    "auto",
    'Whether smaller (`"min"`) or larger (`"max"`) values are better; `"auto"` '
    'is `"min"` for `eval_loss` and `"max"` for `eval_accuracy`.',
  ),
  Field(
    "patience",
    kinds.integer(0),
    3,
    "Evaluations in a row that need not improve; the run ends at the next one "
    "that does not, as with `flax.training.early_stopping`.",
  ),
  Field(
    "min_delta",
    kinds.NOT_NEGATIVE,
    0.0,
    "An evaluation improves if it is better than the best one by more than "
    "this.",
  ),
)

INIT_FROM = (
  Field(
    "path",
    kinds.TEXT,
    "",
    "A workdir, a checkpoint of Orbax or Flax, or a safetensors file, on a "
    "file system or in a bucket; empty initializes the model by itself.",
  ),
  Field(
    "step",
    kinds.integer(-1),
    -1,
    "Step to read of a workdir or of a directory of steps; -1 is the newest.",
  ),
  Field(
    "item",
    kinds.TEXT,
    "",
    "Name of the item of an Orbax checkpoint; empty looks for the train state.",
  ),
  Field(
    "subtree",
    kinds.TEXT,
    "",
    'Path of the part of the file to read, such as `"params/encoder"`.',
  ),
  Field(
    "rename",
    kinds.sequence("(pattern, replacement) pairs"),
    (),
    "Each is applied with `re.sub` to the paths of the file, in this order: "
    '`(("^encoder/", "backbone/"),)`.',
  ),
  Field(
    "keep",
    kinds.sequence("patterns"),
    (),
    'Paths of the model that keep their initial values: `("^head/",)`.',
  ),
  Field(
    "ignore",
    kinds.sequence("patterns"),
    (),
    "Paths of the file, before `rename`, that are not used.",
  ),
  Field(
    "transpose",
    kinds.sequence("(pattern, axes) pairs"),
    (),
    "Order of the dimensions of the file's arrays in the model, by paths of "
    'the model: `(("kernel$", (1, 0)),)` for kernels of PyTorch.',
  ),
  Field(
    "reshape",
    kinds.sequence("patterns"),
    (),
    "Paths of the model whose arrays get the shape that they have in the "
    'model, after `transpose`: `("query/",)`.',
  ),
  Field(
    "cast",
    kinds.BOOLEAN,
    False,
    "Whether to round arrays to dtypes that cannot hold all their values.",
  ),
)

LORA = (
  Field(
    "rank",
    kinds.integer(0),
    0,
    "Rank of the factors that are trained; 0 trains the parameters themselves.",
  ),
  Field(
    "alpha",
    kinds.POSITIVE,
    16.0,
    "The product of the factors is multiplied by `alpha / rank`.",
  ),
  Field(
    "patterns",
    kinds.sequence("patterns"),
    ("kernel$",),
    "Paths of the parameters that get factors.",
  ),
  Field(
    "train",
    kinds.sequence("patterns"),
    (),
    "Paths of parameters that are trained as they are, such as a new head. All "
    "others are frozen.",
  ),
  Field(
    "batch_dims",
    kinds.sequence("(pattern, number) pairs"),
    (),
    "How many of the first dimensions of parameters count layers or experts, "
    'each of which has factors of its own: `(("^layers/", 1),)`.',
  ),
)


def _group(name: str, fields: tuple[Field, ...], meaning: str) -> Field:
  """Returns a field that is a dict with these fields."""
  kind = kinds.fields(*(field.name for field in fields))
  return Field(name, kind, {}, meaning, fields)


# Titles, and the fields below them.
SECTIONS: dict[str, tuple[Field, ...]] = {
  "Task, model and data": (
    Field(
      "task",
      kinds.TASK,
      "classification",
      'The loss, the metrics and the evaluation: `"classification"`, '
      '`"language_modeling"` or `"package.module:Class"`; with arguments '
      '`{"name": ..., **arguments}`. See docs/guides/tasks.md.',
    ),
    Field(
      "model",
      kinds.MODEL,
      {},
      "The model and its arguments; see `flaxshard.models.create`. A task that "
      "creates its own model gets them, and needs no name.",
    ),
    Field(
      "data",
      kinds.OPTIONAL_NAMED,
      {},
      "The data and its arguments; see `flaxshard.data.load`. Only a task "
      "that loads its own data needs none.",
    ),
    Field(
      "batch_size",
      kinds.integer(1),
      REQUIRED,
      "Examples in a batch, over all replicas and processes.",
    ),
    Field(
      "num_train_steps",
      kinds.integer(1),
      REQUIRED,
      "Step at which training ends.",
    ),
    Field(
      "seed",
      kinds.integer(0),
      0,
      "Seed of the initialization, the data order and dropout.",
    ),
  ),
  "Optimization": (
    Field(
      "learning_rate",
      kinds.POSITIVE,
      REQUIRED,
      "Peak of the learning-rate schedule.",
    ),
    Field(
      "schedule",
      kinds.NAMED,
      {"name": "constant"},
      'The learning rate over the steps: `"constant"`, `"cosine"` (with '
      '`warmup_steps`) or `"package.module:function"`; see '
      "`flaxshard.core.optimizer.create`.",
    ),
    Field(
      "optimizer",
      kinds.NAMED,
      {"name": "adamw"},
      'An optax optimizer and its arguments, or `"package.module:function"`; '
      "`clip_by_global_norm` is the largest norm of all gradients together. "
      "See `flaxshard.core.optimizer.create`.",
    ),
    Field(
      "accumulate_steps",
      kinds.integer(1),
      1,
      "Number of batches in an update, which takes the mean of their "
      "gradients: `batch_size * accumulate_steps` examples. `num_train_steps` "
      "and the other numbers of steps count batches. The schedule counts "
      "updates: its length is `num_train_steps // accumulate_steps`, and "
      "`warmup_steps` are updates. See `flaxshard.Accumulate`.",
    ),
    Field(
      "freeze",
      kinds.PATTERNS,
      (),
      "Regular expressions, searched in paths such as `encoder/layer0/kernel`: "
      "these parameters are not trained; see `flaxshard.freeze`.",
    ),
    Field(
      "learning_rates",
      kinds.LEARNING_RATES,
      (),
      'Factors of the learning rate by pattern: `(("^head/", 10.0),)`. The '
      "first pattern that is found in the path of a parameter counts; see "
      "`flaxshard.scale_learning_rates`. Rows of metrics have the rate of each "
      "pattern, as `learning_rate/^head/`.",
    ),
    Field(
      "sparse",
      kinds.PATTERNS,
      (),
      "Regular expressions, searched in paths such as `embed/embedding`: "
      "gradients and updates of these tables have the rows that a step used; "
      "see `flaxshard.sparse_rows`.",
    ),
    Field(
      "sparse_semantics",
      kinds.one_of(*sparse_optimizer.SEMANTICS),
      "lazy",
      "What happens to the rows of `sparse` tables that a step did not use; "
      "see `flaxshard.sparse_rows`.",
    ),
    Field(
      "precision",
      kinds.one_of(*policy.NAMES),
      "float32",
      "Dtype of the computation; parameters are float32.",
    ),
    Field(
      "wrappers",
      kinds.WRAPPERS,
      (),
      'Wrappers of the optimizer, outermost first: `(("loss_scale", {"scale": '
      '"dynamic"}),)`; see `flaxshard.wrappers.from_config`.',
    ),
  ),
  "Fine-tuning": (
    _group(
      "init_from",
      INIT_FROM,
      "Parameters of a checkpoint to begin a run with; a run that resumes does "
      "not read them. See `flaxshard.checkpoint.init_from`.",
    ),
    _group(
      "lora",
      LORA,
      "Low-rank factors to train in place of parameters; see `flaxshard.LoRA`.",
    ),
  ),
  "Devices": (
    _group(
      "mesh",
      MESH,
      "The devices, and how arrays are split over them.",
    ),
  ),
  "Metrics and evaluation": (
    Field(
      "log_every_steps",
      kinds.integer(1),
      100,
      "Steps between two rows of metrics.",
    ),
    Field(
      "eval_every_steps",
      kinds.integer(1),
      1000,
      "Steps between two evaluations. The last step is evaluated as well.",
    ),
    Field(
      "writer",
      kinds.one_of("tensorboard", "none"),
      "tensorboard",
      "Event writer.",
    ),
    Field(
      "profile_steps",
      kinds.STEPS_RANGE,
      (),
      "`(first, last)` step to trace into `workdir/profile`.",
    ),
  ),
  "Checkpoints": (
    Field(
      "checkpoint_every_steps",
      kinds.integer(1),
      1000,
      "Steps between two checkpoints. The last step is saved as well.",
    ),
    Field(
      "checkpoint_every_minutes",
      kinds.NOT_NEGATIVE,
      0,
      "Also saves with a row of metrics when the last save is at least this "
      "many minutes old; 0 turns it off.",
    ),
    Field(
      "max_to_keep",
      kinds.integer(1),
      3,
      "Number of newest checkpoints to keep.",
    ),
    Field(
      "keep_every_steps",
      kinds.integer(0),
      0,
      "Also keeps checkpoints at multiples of this; 0 keeps none of them.",
    ),
    Field(
      "best_metric",
      kinds.STRING,
      "none",
      "Also keeps the checkpoints that are best by this metric of the "
      'evaluation, such as `"eval_loss"`; `"none"` keeps none of them.',
    ),
    Field(
      "best_mode",
      kinds.one_of("auto", "max", "min"),
      "auto",
      "Whether the largest or the smallest `best_metric` is best. "
      '`"auto"` is `"min"` for `eval_loss` and `"max"` for `eval_accuracy`.',
    ),
    Field(
      "keep_best",
      kinds.integer(1),
      1,
      "Number of best checkpoints to keep.",
    ),
  ),
  "The run": (
    _group(
      "early_stopping",
      EARLY_STOPPING,
      "Ends the run, with a checkpoint, when evaluations no longer improve.",
    ),
    Field(
      "hooks",
      kinds.HOOKS,
      (),
      "Functions to call after each row of metrics with `(step, state, "
      'metrics)`: `"package.module:name"`, or a dict with a `"name"` and '
      "arguments; see `flaxshard.train.hooks`.",
    ),
    Field(
      "resume",
      kinds.one_of("auto", "extend"),
      "auto",
      'What to do in a workdir with a finished run: `"auto"` returns its state '
      'if the config is the same, and is an error otherwise; `"extend"` trains '
      "on to a later `num_train_steps`.",
    ),
    Field(
      "on_nonfinite",
      kinds.one_of("stop", "continue"),
      "stop",
      'What a run does that diverges: `"stop"` with an error, or `"continue"`. '
      "It diverges at a non-finite loss when no wrapper skips the step, at a "
      "non-finite evaluation, with non-finite parameters at a save, and after "
      "20 skipped steps in a row with a loss scale at its floor.",
    ),
  ),
}

FIELDS: tuple[Field, ...] = tuple(
  field for fields in SECTIONS.values() for field in fields
)
