"""Records what TensorFlow's optimizers compute, and which methods it has.

Writes sparse_optimizers.json, which tests/sparse/tensorflow_parity_test.py
compares with, and tensorflow_signatures.json, which the tables of
docs/guides/tensorflow_tables.md must cover. The stored files were made with
Python 3.11 on a CPU by

  pip install tensorflow-cpu==2.21.0 tf-keras==2.21.0
  python tests/testdata/make_tensorflow_figures.py

All values are float32. The learning rate changes from step to step.
"""

import inspect
import json
import os
import pathlib

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
import tensorflow as tf
import tf_keras

v1 = tf.compat.v1.train
legacy = tf_keras.optimizers.legacy

# Row 5 is never used, row 4 in the first step alone.
IDS = [[1, 4, 1], [0, 1, 3], [3, 3, 1], [2, 0, 2], [1, 3, 0]]
RATES = [0.1, 0.09, 0.08, 0.05, 0.02]
SHAPE = (6, 2)

L1, L2 = "l1_regularization_strength", "l2_regularization_strength"
L2_SHRINKAGE = "l2_shrinkage_regularization_strength"
# Arguments by name, whose first word is that of the class.
TRAIN_OPTIMIZERS = {
  "GradientDescent": {},
  "Momentum": {"momentum": 0.9},
  "Momentum nesterov": {"momentum": 0.9, "use_nesterov": True},
  "Adagrad": {},
  "AdagradDA": {},
  "AdagradDA l1 l2": {
    "initial_gradient_squared_accumulator_value": 0.2,
    L1: 0.05,
    L2: 0.03,
  },
  "Adadelta": {},
  "RMSProp": {},
  "RMSProp momentum": {"momentum": 0.8, "epsilon": 0.01},
  "RMSProp centered": {"momentum": 0.8, "centered": True},
  "Ftrl": {},
  "Ftrl l1 l2": {L1: 0.3, L2: 0.2, "initial_accumulator_value": 0.5},
  "Ftrl power beta shrinkage": {
    "learning_rate_power": -0.7,
    L1: 0.1,
    L2_SHRINKAGE: 0.05,
    "beta": 0.4,
  },
  "ProximalGradientDescent": {L1: 0.3, L2: 0.2},
  "ProximalAdagrad": {},
  "ProximalAdagrad l1 l2": {L1: 0.3, L2: 0.2},
  "Adam": {},
  "Adam large epsilon": {"epsilon": 0.05},
}
LEGACY_OPTIMIZERS = {
  "SGD momentum": {"momentum": 0.9},
  "SGD nesterov": {"momentum": 0.9, "nesterov": True},
  "Adagrad": {},
  "Adadelta": {},
  "RMSprop": {},
  "RMSprop momentum": {"momentum": 0.8},
  "RMSprop centered": {"momentum": 0.8, "centered": True},
  "Ftrl": {L1: 0.1, "beta": 0.4},
  "Adam": {},
  "Adamax": {},
}


def random_inputs():
  """Returns the initial table and the rows of each step's gradient."""
  random = np.random.default_rng(0)
  table = random.normal(size=SHAPE).astype(np.float32)
  values = [
    random.normal(size=(len(ids), SHAPE[1])).astype(np.float32) * 0.5
    for ids in IDS
  ]
  return table, values


def run_train_optimizer(name, arguments, table, values):
  """Runs a `tf.compat.v1.train` optimizer in a graph.

  Returns:
    The parameters after each step, and each slot after each step.
  """
  with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    rate = tf.compat.v1.placeholder(tf.float32, [])
    step = v1.get_or_create_global_step()
    variable = tf.compat.v1.get_variable("table", initializer=table)
    if name.startswith("AdagradDA"):
      arguments = arguments | {"global_step": step}
    optimizer = getattr(v1, f"{name.split()[0]}Optimizer")(rate, **arguments)
    rows = tf.compat.v1.placeholder(tf.float32, [None, SHAPE[1]])
    ids = tf.compat.v1.placeholder(tf.int32, [None])
    grad = tf.IndexedSlices(rows, ids, SHAPE)
    train = optimizer.apply_gradients([(grad, variable)], global_step=step)
    fetched = {"table": variable}
    for slot in optimizer.get_slot_names():
      fetched[slot] = optimizer.get_slot(variable, slot)
    session.run(tf.compat.v1.global_variables_initializer())
    recorded = []
    for fed in zip(RATES, IDS, values, strict=True):
      session.run(train, dict(zip((rate, ids, rows), fed, strict=True)))
      recorded.append(session.run(fetched))
  return by_name(recorded)


def run_legacy_optimizer(name, arguments, table, values):
  """Runs a Keras optimizer eagerly; see `run_train_optimizer`."""
  variable = tf.Variable(table, name="table")
  optimizer = getattr(legacy, name.split()[0])(**arguments)
  recorded = []
  for rate, ids, rows in zip(RATES, IDS, values, strict=True):
    optimizer.learning_rate = rate
    grad = tf.IndexedSlices(tf.constant(rows), tf.constant(ids), SHAPE)
    optimizer.apply_gradients([(grad, variable)])
    recorded.append({"table": variable.numpy()})
    for slot in optimizer.get_slot_names():
      recorded[-1][slot] = optimizer.get_slot(variable, slot).numpy()
  return by_name(recorded)


def by_name(recorded):
  return {name: [step[name] for step in recorded] for name in recorded[0]}


def indexed_slices_facts(table, values):
  """Records the dense array, the norms and the clipped rows of slices."""
  slices = tf.IndexedSlices(tf.constant(values[0]), tf.constant(IDS[0]), SHAPE)
  dense = tf.convert_to_tensor(slices)
  bias = tf.constant([0.3, -0.4])
  (clipped, _), norm = tf.clip_by_global_norm([slices, bias], 0.5)
  return {
    "ids": IDS[0],
    "values": values[0],
    "bias": bias,
    "dense": dense,
    "global_norm": norm,
    "dense_global_norm": tf.linalg.global_norm([dense, bias]),
    "clipped_values": clipped.values,
  }


def lookup_gradients(table):
  """Records gradients of losses that look rows up; two lookups are joined."""
  ids = tf.constant([[1, 4], [1, 0]])
  weights = tf.constant([[0.5], [-1.5]])

  def gather(t):
    return tf.reduce_sum(tf.tanh(tf.gather(t, ids) @ weights))

  def embedding_lookup(t):
    rows = tf.nn.embedding_lookup(t, tf.reshape(ids, [-1]))
    return tf.reduce_mean(tf.square(rows))

  def two_lookups(t):
    first, second = tf.gather(t, [2, 2, 5]), tf.gather(t, [0, 2, 1])
    return tf.reduce_sum(first * first * second)

  def lookup_and_sum(t):
    return gather(t) + tf.reduce_sum(t * t)

  result = {}
  for loss_fn in (gather, embedding_lookup, two_lookups, lookup_and_sum):
    variable = tf.Variable(table)
    with tf.GradientTape() as tape:
      loss = loss_fn(variable)
    grad = tape.gradient(loss, variable)
    facts = {"loss": loss, "dense": tf.convert_to_tensor(grad)}
    if isinstance(grad, tf.IndexedSlices):
      facts |= {"ids": grad.indices, "values": grad.values}
    result[loss_fn.__name__] = facts
  return result


def loss_scale_run(table, values):
  """Records a dynamic loss scale, with an overflow in one row of step 2."""
  variable = tf.Variable(table)
  optimizer = tf_keras.mixed_precision.LossScaleOptimizer(
    legacy.SGD(0.1, momentum=0.9), initial_scale=16.0, dynamic_growth_steps=2
  )
  recorded = []
  for i, (ids, rows) in enumerate(zip(IDS, values, strict=True)):
    rows = rows.copy()
    if i == 2:
      rows[1, 0] = np.inf
    with tf.GradientTape() as tape:
      # The gradient of the looked-up rows is `rows`.
      loss = tf.reduce_sum(tf.gather(variable, ids) * rows)
      scaled_loss = optimizer.get_scaled_loss(loss)
    scaled = tape.gradient(scaled_loss, variable)
    (grad,) = optimizer.get_unscaled_gradients([scaled])
    optimizer.apply_gradients([(grad, variable)])
    momentum = optimizer.inner_optimizer.get_slot(variable, "momentum")
    recorded.append(
      {
        "table": variable.numpy(),
        "scale": float(optimizer.loss_scale),
        "momentum": momentum.numpy(),
      }
    )
  return by_name(recorded)


CLASSES = {
  "tf.compat.v1.train.Optimizer": v1.Optimizer,
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
    "__init__": "optimizer num_worker custom_getter communication_period "
    "use_locking name",
    "apply_gradients": "grads_and_vars global_step name",
    "get_init_op": "task_index",
    "make_session_run_hook": "is_chief task_index",
  },
  "tf.contrib.opt.AGNCustomGetter": {
    "__init__": "worker_device",
    "__call__": "getter name trainable collections",
  },
  "AGNOptimizer.make_session_run_hook": {
    "begin": "",
    "after_create_session": "session coord",
  },
}


def members(cls):
  """Returns the arguments of each public method; None for other attributes."""
  found = {}
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


def to_json(x):
  """Returns lists of numbers; nine digits give each float32 exactly."""
  if isinstance(x, dict):
    return {key: to_json(value) for key, value in x.items()}
  if isinstance(x, (list, tuple)):
    return [to_json(value) for value in x]
  if isinstance(x, tf.Tensor):
    x = x.numpy()
  if isinstance(x, (np.ndarray, np.generic)):
    return to_json(x.tolist())
  return float(f"{x:.9g}") if isinstance(x, float) else x


def write(name, figures, **options):
  text = json.dumps(to_json(figures), **options) + "\n"
  pathlib.Path(__file__).with_name(name).write_text(text)


def main():
  table, values = random_inputs()
  figures = {
    "source": f"TensorFlow {tf.__version__}, tf-keras {tf_keras.__version__}; "
    "make_tensorflow_figures.py",
    "table": table,
    "ids": IDS,
    "values": values,
    "learning_rates": RATES,
    "indexed_slices": indexed_slices_facts(table, values),
    "lookups": lookup_gradients(table),
    "loss_scale": loss_scale_run(table, values),
  }
  for api, optimizers, run in (
    ("tf.compat.v1.train", TRAIN_OPTIMIZERS, run_train_optimizer),
    ("tf.keras.optimizers.legacy", LEGACY_OPTIMIZERS, run_legacy_optimizer),
  ):
    figures[api] = {
      name: {"sparse": run(name, arguments, table, values)}
      for name, arguments in optimizers.items()
    }
  write("sparse_optimizers.json", figures, separators=(",", ":"))
  classes = {name: members(cls) for name, cls in CLASSES.items()}
  for name, methods in CONTRIB.items():
    classes[name] = {method: a.split() for method, a in methods.items()}
  versions = {
    "tensorflow": tf.__version__,
    "keras": tf.keras.__version__,
    "tf_keras": tf_keras.__version__,
  }
  write("tensorflow_signatures.json", versions | {"classes": classes}, indent=1)


if __name__ == "__main__":
  main()
