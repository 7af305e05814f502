"""Trains the model of a config: `python -m flaxshard --config=... --workdir=...`

Flags only; the loop is in `flaxshard.train`.
"""

import logging

from absl import app
from absl import flags
from absl import logging as absl_logging
from ml_collections import config_flags

FLAGS = flags.FLAGS

config_flags.DEFINE_config_file(
  "config",
  None,
  "The training config: a Python file with get_config(), such as "
  "configs/digits.py. Any of its fields can be set by "
  "--config.FIELD=VALUE, e.g. --config.batch_size=256 or "
  "--config.model.features='(16, 32)'.",
  lock_config=True,
)
flags.DEFINE_string(
  "workdir",
  None,
  "Where checkpoints, metrics.jsonl, TensorBoard events and training.png go. A "
  "workdir that has a checkpoint is continued.",
)
flags.mark_flags_as_required(["config", "workdir"])


def main(argv: list[str]) -> None:
  """Runs the loop."""
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {argv[1:]}")
  log = logging.getLogger("flaxshard")
  handler = logging.StreamHandler()
  handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
  log.addHandler(handler)
  log.setLevel(logging.INFO)
  log.propagate = False
  if not FLAGS["verbosity"].present:
    # JAX and Orbax have a lot to say at INFO.
    absl_logging.set_verbosity(absl_logging.WARNING)

  # Here and not above: --help needs no JAX.
  import jax

  from flaxshard import train

  log.info(
    "JAX %s, process %d of %d, %d %s devices",
    jax.__version__,
    jax.process_index(),
    jax.process_count(),
    jax.device_count(),
    jax.default_backend(),
  )
  train.train_and_evaluate(FLAGS.config, FLAGS.workdir)


if __name__ == "__main__":
  app.run(main)
