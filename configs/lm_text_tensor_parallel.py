"""The text config, its layers split over two logical devices of each replica.

python -m flaxshard --config=configs/lm_text_tensor_parallel.py --workdir=/tmp/t

The layout of Megatron-LM (Shoeybi et al., 2019, arXiv:1909.08053): attention
heads and the MLP's hidden units lie on one device or the other, and one sum per
branch brings them together.
"""

import ml_collections

from configs import lm_text


def get_config() -> ml_collections.ConfigDict:
  """Returns the config."""
  config = lm_text.get_config()
  config.mesh.axes = (("model", 2),)
  # The first regex found in a parameter's path says how it is split.
  config.mesh.rules = (
    ("(query|key|value|mlp_in)/kernel", (None, "model")),
    ("(query|key|value|mlp_in)/bias", ("model",)),
    ("(out|mlp_out)/kernel", ("model", None)),
    ("embed/embedding", ("model", None)),
    ("head/kernel", (None, "model")),
  )
  config.mesh.virtual_devices = 8  # 0: the devices that are there
  return config
