"""Trains a byte-level transformer language model on text files.

    python -m flaxshard --config=configs/lm_text.py --workdir=/tmp/lm_text

Expect eval_loss=1.546 nats per byte and eval_accuracy=0.589 after 1,000 steps,
with the library of Python 3.11 as text. It took four and a half minutes on two
CPU cores with JAX 0.10.2.

The default text is the `.py` files of the running Python's standard library.
`--config.data.path=FOLDER --config.data.suffix=.txt` trains on other files.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  """Returns the config."""
  config = ml_collections.ConfigDict()

  config.model = {
    "name": "transformer",
    "num_layers": 4,
    "num_heads": 4,
    "embed_dim": 128,
    "mlp_dim": 512,  # hidden units
    "max_length": 128,  # positions with an embedding
    "dropout": 0.0,
  }
  config.data = {
    "name": "text",
    "path": "",  # a folder; empty: the standard library of the running Python
    "suffix": ".py",
    "length": 128,  # bytes in a window
    "eval_every": 200,  # every n-th file is held out
  }
  config.batch_size = 16  # windows, over all devices
  config.num_train_steps = 1000
  config.seed = 0  # of initialization, data order and dropout

  config.learning_rate = 2e-3  # peak of the schedule
  # Rises for 100 steps, then falls to 0 at the last step.
  config.schedule = {"name": "cosine", "warmup_steps": 100}
  config.optimizer = {
    "name": "adamw",
    "weight_decay": 0.01,
    "clip_by_global_norm": 1.0,  # largest norm of all gradients together
  }

  # "mixed_float16" and "mixed_bfloat16" are for accelerators: CPUs emulate.
  config.precision = "float32"
  # "auto" is dynamic in mixed_float16, otherwise no scaling is compiled.
  config.wrappers = (("loss_scale", {"scale": "auto"}),)  # outermost first
  config.mesh = {
    "replica": -1,  # number of replicas, which share a batch; -1: all that fit
    "logical_devices": 1,  # devices of each replica
    "axes": (),  # or named axes of them, as (("model", 2),)
    # How parameters are split: ("fsdp",), (("kernel$", (None, "model")),)
    "rules": (),
    # Pieces of each array of a batch, by dimension: {"inputs": (1, 2, 4, 1)}
    "split": {},
    "per_replica": False,  # run the step once per replica, as Strategy.run
    "virtual_devices": 0,  # n: run on n virtual CPU devices
  }

  config.log_every_steps = 50
  config.eval_every_steps = 500
  config.checkpoint_every_steps = 500
  # Also saves with a row of metrics when the last save is this old; 0: never.
  config.checkpoint_every_minutes = 0.0
  config.max_to_keep = 3  # number of newest checkpoints to keep
  config.keep_every_steps = 0  # also keep those at multiples of n; 0: none
  # Also keep the best by "eval_accuracy" or "eval_loss".
  config.best_metric = "none"
  config.keep_best = 1  # number of best checkpoints to keep
  # In the workdir of a finished run: "auto", or "extend" to train on.
  config.resume = "auto"
  config.writer = "tensorboard"  # of events; or "clu" (TensorFlow), "none"
  config.profile_steps = ()  # (first, last): trace them to workdir/profile
  # When the run diverges, see flaxshard.train.config: "stop" or "continue".
  config.on_nonfinite = "stop"
  return config
