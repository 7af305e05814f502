r"""Trains digits with each image split over eight logical devices.

    python -m flaxshard --config=configs/digits_spatial.py \
      --workdir=/tmp/spatial

An image of 8x8 pixels becomes eight pieces of 4x2, one per device. XLA
exchanges the borders that a convolution needs.

It runs on virtual CPU devices. On real devices, add
`--config.mesh.virtual_devices=0`.
"""

import ml_collections

from configs import digits


def get_config() -> ml_collections.ConfigDict:
  """Returns the config."""
  config = digits.get_config()
  config.mesh.replica = 1
  config.mesh.logical_devices = 8
  # Pieces of batch, height, width and channels. Labels are not split.
  config.mesh.split = {"inputs": (1, 2, 4, 1)}
  config.mesh.virtual_devices = 8  # 0: the devices of this machine
  return config
