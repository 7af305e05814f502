"""A small convolutional network on scikit-learn's digits, in float16.

python -m flaxshard --config=configs/digits.py --workdir=/tmp/digits

Seen: eval_accuracy=0.9917 on the 360 held-out digits after 600 steps, in 17 s
on two CPU cores (JAX 0.10.2), compilation included.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  """Returns the config."""
  config = ml_collections.ConfigDict()

  config.model = {"name": "cnn", "features": (32, 64), "dense": 128}
  config.data = {"name": "digits"}
  config.batch_size = 64  # over all devices
  config.num_train_steps = 600
  config.seed = 0  # of initialization, data order and dropout

  config.learning_rate = 2e-3  # the schedule's peak
  config.schedule = {"name": "cosine", "warmup_steps": 50}
  config.optimizer = {"name": "adamw", "weight_decay": 1e-4}

  config.precision = "mixed_float16"  # or "float32", "mixed_bfloat16"
  config.wrappers = (("loss_scale", {"scale": "dynamic"}),)  # outermost first
  config.mesh = {
    "replica": -1,  # replicas share a batch; -1: as many as fit
    "logical_devices": 1,  # of each replica, or by name:
    "axes": (),  # (("model", 2),)
    "rules": (),  # of parameters: ("fsdp",), (("kernel$", (None, "model")),)
    "split": {},  # of batches, into pieces: {"inputs": (1, 2, 4, 1)}
    "per_replica": False,  # run the step on each replica, as Strategy.run does
    "virtual_devices": 0,  # n: rehearse on n virtual CPU devices
  }

  config.log_every_steps = 20
  config.eval_every_steps = 100
  config.checkpoint_every_steps = 100
  config.checkpoint_every_minutes = 0.0  # too, as rows are logged; 0: never
  config.max_to_keep = 3  # the newest; and, for as long as the run goes on:
  config.keep_every_steps = 0  # those at multiples of it; 0: none
  config.best_metric = "none"  # or the best by "eval_accuracy", "eval_loss"
  config.keep_best = 1  # so many of the best
  config.writer = "tensorboard"  # or "clu" (needs TensorFlow), "none"
  config.profile_steps = ()  # (first, last): a trace in workdir/profile
  config.on_nonfinite = "stop"  # or "continue"
  return config
