"""The digits config with AGN as in DiLoCo: an outer optimizer for the center.

python -m flaxshard --config=configs/digits_diloco.py --workdir=/tmp/diloco

Each replica commits how far it has come in ten steps, and momentum moves the
center there (Douillard et al., 2023, arXiv:2311.08105). Seen:
eval_accuracy=0.9944, and 0.9944 and 0.9889 with two other seeds.
"""

import ml_collections

from configs import digits_agn


def get_config() -> ml_collections.ConfigDict:
  """Returns the config."""
  config = digits_agn.get_config()
  outer = {
    "type": "optimizer",
    "name": "sgd",
    "learning_rate": 0.7,
    "momentum": 0.9,
    "nesterov": True,
  }
  agn = {
    "communication_period": 10,
    "commit": "mean",
    "commit_delta": True,
    "outer_tx": outer,
  }
  config.wrappers = (("loss_scale", {"scale": "dynamic"}), ("agn", agn))
  # The replicas' steps are what moves the center, as far as they go.
  config.learning_rate = 2e-3
  return config
