r"""Trains ResNet-50 on ImageNet in float16, with a dynamic loss scale.

    pip install 'flaxshard[train,imagenet]'
    python -m flaxshard --config=configs/imagenet.py --workdir=/tmp/imagenet \
      --config.data.data_dir=$HOME/tensorflow_datasets

The 90 epochs were not run, so there is no accuracy to expect. This command was
run with `--config.batch_size=4 --config.num_train_steps=1` on a CPU, on 21
synthetic images that TensorFlow Datasets had prepared as `imagenet2012`.

The prepared files must be ArrayRecord files; if they are missing, the error
says how to make them.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  """Returns the config."""
  config = ml_collections.ConfigDict()

  config.model = {"name": "resnet"}  # the defaults are ResNet-50
  config.data = {
    "name": "imagenet",
    "data_dir": "",  # empty: $TFDS_DATA_DIR, or ~/tensorflow_datasets
    "image_size": 224,
  }

  config.batch_size = 1024  # examples, over all devices
  config.num_train_steps = 112_590  # 90 epochs of 1,251 steps
  config.learning_rate = 0.4  # peak of the schedule: 0.1 per 256 examples
  config.optimizer = {
    "name": "sgd",
    "momentum": 0.9,
    "nesterov": True,
    "weight_decay": 1e-4,  # not of biases and normalization scales
  }
  config.schedule = {"name": "cosine", "warmup_steps": 6_255}  # 5 epochs
  config.seed = 0  # of initialization, data order and augmentation

  config.precision = "mixed_float16"  # or "float32", "mixed_bfloat16"
  config.wrappers = (("loss_scale", {"scale": "dynamic"}),)  # outermost first
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

  config.log_every_steps = 100
  config.eval_every_steps = 1_251  # one epoch
  config.checkpoint_every_steps = 1_251
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
