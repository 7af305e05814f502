"""Trains the text model with its parameters split over the replicas (FSDP).

    python -m flaxshard --config=configs/lm_text_fsdp.py --workdir=/tmp/lm_fsdp

Each of eight devices holds an eighth of every large parameter and of its Adam
slots. XLA gathers the parameters of a layer when the layer runs. Only the
layout differs from lm_text.py, not the training.
"""

import ml_collections

from configs import lm_text


def get_config() -> ml_collections.ConfigDict:
  """Returns the config."""
  config = lm_text.get_config()
  config.mesh.rules = ("fsdp",)
  config.mesh.virtual_devices = 8  # 0: the devices of this machine
  return config
