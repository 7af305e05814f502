"""Trains AGN over hosts on a Ray cluster: one actor for each worker.

    ray job submit --working-dir=. -- python launch/workers.py \
      --config=configs/digits_agn_host.py --workdir=/shared/digits_agn_host

Run it in the root of the repository. Change:
  - the number of workers, and the CPUs and GPUs of each, below;
  - the workdir: a folder that all nodes share, or a bucket.
The nodes need flaxshard[ray,train], and JAX for their devices.

Ray starts a worker that fails again, up to 20 times, on any node with room for
it. The others train on. After a failure of the head node the same command
continues the run.
"""

import argparse
from collections.abc import Sequence

from ray import train as ray_train

import flaxshard as fs


def main(arguments: Sequence[str] | None = None) -> None:
  """Trains.

  Args:
    arguments: The arguments; None for those of the command line.
  """
  parser = argparse.ArgumentParser(allow_abbrev=False)
  parser.add_argument("--config", required=True)
  parser.add_argument("--workdir", required=True)
  flags = parser.parse_args(arguments)
  result = fs.ray.fit(
    fs.config.read(flags.config),
    flags.workdir,
    scaling_config=ray_train.ScalingConfig(
      num_workers=4, use_gpu=True, resources_per_worker={"CPU": 8}
    ),
    run_config=ray_train.RunConfig(
      failure_config=ray_train.FailureConfig(max_failures=20)
    ),
  )
  print(result.metrics)


if __name__ == "__main__":
  main()
