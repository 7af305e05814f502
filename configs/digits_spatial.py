"""Trains digits with each image split over eight logical devices.

    flaxshard --config=digits_spatial --workdir=/tmp/spatial

An image of 8x8 pixels becomes eight pieces of 4x2, one per device. XLA
exchanges the borders that a convolution needs.

It needs eight GPUs or TPU cores. Where there is none, it runs on eight virtual
CPU devices.
"""

import ml_collections

import flaxshard as fs


def get_config() -> ml_collections.ConfigDict:
  """Returns the config."""
  config = fs.config.read("digits")
  config.mesh.replica = 1  # the whole batch
  config.mesh.logical_devices = 8  # of the replica
  # Pieces of batch, height, width and channels. Labels are not split.
  config.mesh.split = {"inputs": (1, 2, 4, 1)}
  config.mesh.virtual_devices = 8  # where there is no GPU or TPU
  return config
