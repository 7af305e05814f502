"""The text config, its parameters split over the replicas.

python -m flaxshard --config=configs/lm_text_fsdp.py --workdir=/tmp/lm_fsdp

Each device holds an eighth of every large parameter and of its Adam slots;
XLA gathers what a layer needs when it needs it.
"""

import ml_collections

from configs import lm_text


def get_config() -> ml_collections.ConfigDict:
  """Returns the config."""
  config = lm_text.get_config()
  config.mesh.rules = ("fsdp",)
  config.mesh.virtual_devices = 8  # 0: the devices that are there
  return config
