"""Trains the text model with its layers split over two devices per replica.

    flaxshard --config=lm_text_tensor_parallel --workdir=/tmp/lm_tensor_parallel

The layout is that of Megatron-LM (Shoeybi et al., 2019, arXiv:1909.08053). Each
device has half of the attention heads and half of the hidden units; one
all-reduce per attention or MLP block adds the halves. Only the layout differs
from lm_text.py, not the training.
"""

import ml_collections

import flaxshard as fs


def get_config() -> ml_collections.ConfigDict:
  """Returns the config."""
  config = fs.config.read("lm_text")
  config.mesh.axes = (("model", 2),)  # devices of each replica
  # The first regex found in the path of a parameter gives its PartitionSpec.
  config.mesh.rules = (
    ("(query|key|value|mlp_in)/kernel", (None, "model")),
    ("(query|key|value|mlp_in)/bias", ("model",)),
    ("(out|mlp_out)/kernel", ("model", None)),
    ("embed/embedding", ("model", None)),
    ("head/kernel", (None, "model")),
  )
  config.mesh.virtual_devices = 8  # where there is no GPU or TPU
  return config
