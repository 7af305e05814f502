"""Trains a denoising diffusion model of digits, an NNX module.

    flaxshard --config=ddpm --workdir=/tmp/ddpm

Expect eval_precision of 0.93 to 0.94 and eval_recall of 0.54 to 0.58 (three
seeds) for 360 drawn images after 1,500 steps; see
`flaxshard.examples.ddpm.Task.evaluate`. Training images give 0.92 and 0.76, a
normal distribution with their mean and covariance 0.46 and 0.53. An untrained
model has precision 0; its noise reaches far, so that its recall says nothing.
Most drawn images are legible digits, with more blur than real ones. It took
48 s of CPU time, on a busy machine.
"""

import ml_collections

import flaxshard as fs


def get_config() -> ml_collections.ConfigDict:
  """Returns the config."""
  config = fs.config.defaults()  # --help=config lists the fields

  config.task = {"name": "flaxshard.examples.ddpm:Task", "num_steps": 100}
  config.model = {"width": 256, "depth": 3}
  config.batch_size = 256  # images, over all devices
  config.num_train_steps = 1500

  config.learning_rate = 4e-3  # peak of the schedule
  # Rises for 50 steps, then falls to 0 at the last step.
  config.schedule = {"name": "cosine", "warmup_steps": 50}
  config.optimizer = {"name": "adamw", "weight_decay": 1e-4}
  config.wrappers = (("loss_scale", {"scale": "auto"}),)  # for mixed_float16

  config.log_every_steps = 100
  config.eval_every_steps = 500
  config.checkpoint_every_steps = 500
  return config
