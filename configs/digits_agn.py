"""The digits config with AGN: eight replicas that commit every ten steps.

python -m flaxshard --config=configs/digits_agn.py --workdir=/tmp/digits_agn

Seen: eval_accuracy=0.9889, and 0.9917 and 0.9944 with two other seeds, at a
tenth of the traffic of eight replicas that reduce their gradients.
Rehearsed on virtual CPU devices: real ones take
`--config.mesh.virtual_devices=0`.
"""

import ml_collections

from configs import digits


def get_config() -> ml_collections.ConfigDict:
  """Returns the config."""
  config = digits.get_config()
  config.wrappers = (
    ("loss_scale", {"scale": "dynamic"}),
    # The mean of the commits is one all-reduce a period, a tenth of the traffic
    # of data parallelism; "sequential" sends 2.5 times that.
    ("agn", {"communication_period": 10, "commit": "mean"}),
  )
  # The center takes a step a commit, 60 in all: it would be in the first tenth
  # of a decay over `num_train_steps` when the replicas are at its end.
  config.schedule = {"name": "constant"}
  config.learning_rate = 3e-3
  config.mesh.per_replica = True
  config.mesh.virtual_devices = 8  # 0: the devices that are there
  return config
