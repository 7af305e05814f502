"""Trains digits with AGN: eight replicas that commit every ten steps.

    flaxshard --config=digits_agn --workdir=/tmp/digits_agn

Expect eval_accuracy=0.9889, and 0.9917 and 0.9944 with two other seeds, with a
tenth of the communication of eight data-parallel replicas.

With GPUs or TPUs there is one replica for each. Where there is none, it runs on
eight virtual CPU devices.
"""

import ml_collections

import flaxshard as fs


def get_config() -> ml_collections.ConfigDict:
  """Returns the config."""
  config = fs.config.read("digits")
  config.wrappers = (
    ("loss_scale", {"scale": "dynamic"}),
    # The mean of the commits is one all-reduce per ten steps, a tenth of the
    # communication of data parallelism. "sequential" needs 2.5 times as much.
    ("agn", {"communication_period": 10, "commit": "mean"}),
  )
  # The center takes one step per commit, 60 in all. With a cosine schedule over
  # 600 steps it would only use the first tenth of the decay.
  config.schedule = {"name": "constant"}
  config.learning_rate = 3e-3  # of the center
  config.optimizer.weight_decay = 1e-4
  config.mesh.per_replica = True  # each replica has its own parameters
  config.mesh.virtual_devices = 8  # where there is no GPU or TPU
  return config
