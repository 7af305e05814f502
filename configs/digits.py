"""Trains a small convolutional network on scikit-learn's digits, in float16.

    flaxshard --config=digits --workdir=/tmp/digits

Expect eval_accuracy=0.9944 on the 360 held-out digits after 600 steps, with JAX
0.10.2 and 0.12.0, and 0.9917 and 0.9944 with two other seeds. It took 17 s on
two CPU cores, including compilation.
"""

import ml_collections

import flaxshard as fs


def get_config() -> ml_collections.ConfigDict:
  """Returns the config."""
  config = fs.config.defaults()  # --help=config lists the fields

  # Convolutions with 32 and 64 channels, then a dense layer of 128.
  config.model = {"name": "cnn", "features": (32, 64), "dense": 128}
  config.data = {"name": "digits"}  # 8x8 pixels, 10 classes
  config.batch_size = 64  # examples, over all devices
  config.num_train_steps = 600  # 27 epochs of the 1,437 images

  config.learning_rate = 2e-3  # peak of the schedule
  # Rises for 50 steps, then falls to 0 at the last step.
  config.schedule = {"name": "cosine", "warmup_steps": 50}
  config.optimizer = {"name": "adamw", "weight_decay": 0.1}

  config.precision = "mixed_float16"  # or "float32", "mixed_bfloat16"
  config.wrappers = (("loss_scale", {"scale": "dynamic"}),)  # outermost first

  config.log_every_steps = 20  # rows of metrics
  config.eval_every_steps = 100  # on all held-out images
  config.checkpoint_every_steps = 100  # the newest 3 are kept
  return config
