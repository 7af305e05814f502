"""Writes tensorflow_signatures.json: what the tables for TensorFlow must cover.

Needs TensorFlow 2.21 and tf_keras:

  pip install tensorflow-cpu==2.21 tf_keras==2.21
  python tests/testdata/make_tensorflow_signatures.py
"""

import inspect
import json
import pathlib

import tensorflow as tf
import tf_keras

CLASSES = {
  "tf.compat.v1.train.Optimizer": tf.compat.v1.train.Optimizer,
  "tf.keras.mixed_precision.LossScaleOptimizer (Keras 2)": (
    # The public name is a class that only chooses one of two implementations.
    tf_keras.src.mixed_precision.loss_scale_optimizer.LossScaleOptimizer
  ),
  "tf.keras.mixed_precision.LossScaleOptimizer (Keras 3)": (
    tf.keras.mixed_precision.LossScaleOptimizer
  ),
  "tf.compat.v1.tpu.CrossShardOptimizer": tf.compat.v1.tpu.CrossShardOptimizer,
  "tf.distribute.TPUStrategy": tf.distribute.TPUStrategy,
  "tf.tpu.experimental.Topology": tf.tpu.experimental.Topology,
  "tf.tpu.experimental.DeviceAssignment": tf.tpu.experimental.DeviceAssignment,
}
# TensorFlow 2 has no tf.contrib. Read from
# tensorflow/contrib/opt/python/training/agn_optimizer.py of the repository
# tensorflow/tensorflow, commit 09dc865cb33d6bd8e62ac3188d4b828aee00ac46. What
# AGNOptimizer inherits is that of tf.train.Optimizer.
CONTRIB = {
  "tf.contrib.opt.AGNOptimizer": {
    "__init__": [
      "optimizer",
      "num_worker",
      "custom_getter",
      "communication_period",
      "use_locking",
      "name",
    ],
    "apply_gradients": ["grads_and_vars", "global_step", "name"],
    "get_init_op": ["task_index"],
    "make_session_run_hook": ["is_chief", "task_index"],
  },
  "tf.contrib.opt.AGNCustomGetter": {
    "__init__": ["worker_device"],
    "__call__": ["getter", "name", "trainable", "collections"],
  },
  "AGNOptimizer.make_session_run_hook": {
    "begin": [],
    "after_create_session": ["session", "coord"],
  },
}


def members(cls: type) -> dict[str, list[str] | None]:
  """Returns the arguments of each public method; None for other attributes."""
  found: dict[str, list[str] | None] = {}
  for name in sorted(dir(cls)):
    if name.startswith("_") and name != "__init__":
      continue
    value = getattr(cls, name)
    found[name] = None
    if callable(value):
      parameters = inspect.signature(value).parameters.values()
      found[name] = [
        p.name
        for p in parameters
        if p.name != "self" and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
      ]
  return found


def main() -> None:
  """Writes the file."""
  data = {
    "tensorflow": tf.__version__,
    "keras": tf.keras.__version__,
    "tf_keras": tf_keras.__version__,
    "classes": {
      **{name: members(cls) for name, cls in CLASSES.items()},
      **CONTRIB,
    },
  }
  path = pathlib.Path(__file__).with_name("tensorflow_signatures.json")
  path.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
  main()
