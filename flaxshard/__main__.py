"""Trains the model of a config file.

  python -m flaxshard --config=configs/digits.py --workdir=/tmp/digits

Any field of the config can be set from here:

  --config.batch_size=256 --config.learning_rate=1e-3
  --config.model.features='(16, 32)' --config.optimizer.name=lion
  --config.precision=float32 --config.wrappers='()'
  --config.wrappers="(('loss_scale', {'scale': 1024.0}),)"
  --config.mesh.replica=4 --config.mesh.virtual_devices=8
  --config.mesh.axes="(('model', 2),)" --config.mesh.rules="('fsdp',)"
  --config.data.name=my_package.my_module:my_factory

A field that the config file does not have is an error that names near ones;
the file itself has a comment at each. The workdir gets

  checkpoints/       Orbax checkpoints, one every config.checkpoint_every_steps
  metrics.jsonl      one JSON object a line, every config.log_every_steps
  events.out.*       the same for TensorBoard
  training.png       loss, accuracy and loss scale over steps
  config.json        the config as it ran
  profile/           a trace, with --config.profile_steps='(10, 20)'

Running the same command again goes on from the last checkpoint; Ctrl-C,
SIGTERM and JAX's notice of preemption save one first. A second Ctrl-C stops at
once. Two runs in one workdir are refused.
"""

# Flags only; the loop is in flaxshard/train.py.

import logging

from absl import app
from absl import flags
from absl import logging as absl_logging
from ml_collections import config_flags

from flaxshard.train import loop

FLAGS = flags.FLAGS

config_flags.DEFINE_config_file(
  "config",
  None,
  "The training config: a Python file with get_config().",
  lock_config=True,
)
flags.DEFINE_string(
  "workdir",
  None,
  "Where everything goes; one that has a checkpoint is continued.",
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

  loop.train_and_evaluate(FLAGS.config, FLAGS.workdir)


if __name__ == "__main__":
  app.run(main)
