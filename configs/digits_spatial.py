"""The digits config, its images split over eight logical devices.

python -m flaxshard --config=configs/digits_spatial.py --workdir=/tmp/spatial

Every image of 8x8 pixels lies in eight pieces of 4x2, one on each device; XLA
exchanges the borders that a convolution needs. Rehearsed on virtual CPU
devices: real ones take `--config.mesh.virtual_devices=0`.
"""

import ml_collections

from configs import digits


def get_config() -> ml_collections.ConfigDict:
  """Returns the config."""
  config = digits.get_config()
  config.mesh.replica = 1
  config.mesh.logical_devices = 8
  # Pieces of each dimension: batch, height, width, channels. Labels stay whole.
  config.mesh.split = {"inputs": (1, 2, 4, 1)}
  config.mesh.virtual_devices = 8  # 0: the devices that are there
  return config
