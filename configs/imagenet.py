r"""ResNet-50 on ImageNet in float16, with a dynamic loss scale.

    pip install 'flaxshard[train,imagenet]'
    python -m flaxshard --config=configs/imagenet.py --workdir=/tmp/imagenet \
      --config.data.data_dir=$HOME/tensorflow_datasets

The 90 epochs were not run. What was run is this command with
`--config.batch_size=4 --config.num_train_steps=1`, on a CPU, on 21 made-up
images that TensorFlow Datasets had prepared as `imagenet2012`. The prepared
files have to be ArrayRecord files; without them, the error says how to make
them.
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

  config.batch_size = 1024  # over all devices
  config.num_train_steps = 112_590  # 90 epochs of 1,251 steps
  config.learning_rate = 0.4  # 0.1 for every 256 images of a batch
  config.optimizer = {
    "name": "sgd",
    "momentum": 0.9,
    "nesterov": True,
    "weight_decay": 1e-4,  # not of biases and normalization scales
  }
  config.schedule = {"name": "cosine", "warmup_steps": 6_255}  # 5 epochs
  config.seed = 0

  config.precision = "mixed_float16"
  config.wrappers = (("loss_scale", {"scale": "dynamic"}),)
  config.mesh = {
    "replica": -1,  # replicas share a batch; -1: as many as fit
    "logical_devices": 1,  # of each replica, or by name:
    "axes": (),  # (("model", 2),)
    "rules": (),  # of parameters: ("fsdp",), (("kernel$", (None, "model")),)
    "split": {},  # of batches, into pieces: {"inputs": (1, 2, 4, 1)}
    "per_replica": False,  # run the step on each replica, as Strategy.run does
    "virtual_devices": 0,  # n: rehearse on n virtual CPU devices
  }

  config.log_every_steps = 100
  config.eval_every_steps = 1_251  # once an epoch
  config.checkpoint_every_steps = 1_251
  config.checkpoint_every_minutes = 0.0  # too, as rows are logged; 0: never
  config.max_to_keep = 3  # the newest; and, for as long as the run goes on:
  config.keep_every_steps = 0  # those at multiples of it; 0: none
  config.best_metric = "none"  # or the best by "eval_accuracy", "eval_loss"
  config.keep_best = 1  # so many of the best
  config.writer = "tensorboard"  # or "clu" (needs TensorFlow), "none"
  config.profile_steps = ()  # (first, last): a trace in workdir/profile
  config.on_nonfinite = "stop"  # or "continue"
  return config
