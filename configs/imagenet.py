r"""Trains ResNet-50 on ImageNet in float16, with a dynamic loss scale.

    pip install 'flaxshard[train,imagenet]'
    flaxshard --config=imagenet --workdir=/tmp/imagenet \
      --config.data.data_dir=$HOME/tensorflow_datasets

The 90 epochs were not run, so there is no accuracy to expect. This command was
run with `--config.batch_size=4 --config.num_train_steps=1` on a CPU, on 21
synthetic images that TensorFlow Datasets had prepared as `imagenet2012`.

The prepared files must be ArrayRecord files; if they are missing, the error
says how to make them.
"""

import ml_collections

import flaxshard as fs


def get_config() -> ml_collections.ConfigDict:
  """Returns the config."""
  config = fs.config.defaults()  # --help=config lists the fields

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

  config.precision = "mixed_float16"  # or "float32", "mixed_bfloat16"
  config.wrappers = (("loss_scale", {"scale": "dynamic"}),)  # outermost first

  config.eval_every_steps = 1_251  # one epoch
  config.checkpoint_every_steps = 1_251  # the newest 3 are kept
  return config
