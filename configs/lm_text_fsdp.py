"""Trains the text model with its parameters split over the replicas (FSDP).

    flaxshard --config=lm_text_fsdp --workdir=/tmp/lm_fsdp

Each of eight devices holds an eighth of every large parameter and of its Adam
slots. XLA gathers the parameters of a layer when the layer runs. Only the
layout differs from lm_text.py, not the training.
"""

import ml_collections

import flaxshard as fs


def get_config() -> ml_collections.ConfigDict:
  """Returns the config."""
  config = fs.config.read("lm_text")
  config.mesh.rules = ("fsdp",)  # of all parameters of 16,384 elements or more
  config.mesh.virtual_devices = 8  # where there is no GPU or TPU
  return config
