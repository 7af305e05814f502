"""Trains a variational autoencoder on binary images of digits.

    flaxshard --config=vae --workdir=/tmp/vae

Expect eval_loss of 18.8 to 18.9 nats per image (three seeds) on the 360
held-out digits after 1,500 steps: the negative evidence lower bound, of which
12.6 are the reconstruction. eval_nll, a tighter bound with 64 samples, is 18.0.
Pixels that are independent of each other would cost 25.3 nats.
"""

import ml_collections

import flaxshard as fs


def get_config() -> ml_collections.ConfigDict:
  """Returns the config."""
  config = fs.config.defaults()  # --help=config lists the fields

  config.task = {"name": "flaxshard.examples.vae:Task"}
  config.model = {"latents": 8, "hidden": 256}
  config.batch_size = 64  # images, over all devices
  config.num_train_steps = 1500

  config.learning_rate = 2e-3  # peak of the schedule
  # Rises for 50 steps, then falls to 0 at the last step.
  config.schedule = {"name": "cosine", "warmup_steps": 50}
  config.optimizer = {"name": "adamw", "weight_decay": 1e-2}
  config.wrappers = (("loss_scale", {"scale": "auto"}),)  # for mixed_float16

  config.log_every_steps = 100
  config.eval_every_steps = 500
  config.checkpoint_every_steps = 500
  return config
