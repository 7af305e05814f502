"""Records what TensorFlow's optimizers do with row-sparse gradients.

Writes sparse_optimizers.json, which tests/sparse/tensorflow_parity_test.py
compares with. The stored figures were made with Python 3.11 on a CPU by

  pip install tensorflow-cpu==2.21.0 tf-keras==2.21.0
  python tests/testdata/make_sparse_optimizers.py

All values are float32. Each optimizer runs twice from the same table: with
`tf.IndexedSlices` of which some row numbers occur twice, and with the same
gradients as whole arrays. The learning rate changes from step to step.
"""

import json
import os
import pathlib
import re

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import numpy as np
import tensorflow as tf
import tf_keras

v1 = tf.compat.v1.train
legacy = tf_keras.optimizers.legacy

OUTPUT = pathlib.Path(__file__).with_name("sparse_optimizers.json")

# Row 5 is never used, row 4 in the first step alone.
IDS = [[1, 4, 1], [0, 1, 3], [3, 3, 1], [2, 0, 2], [1, 3, 0]]
RATES = [0.1, 0.09, 0.08, 0.05, 0.02]
SHAPE = (6, 2)

# Name: (class, arguments). AdagradDA gets its global step too.
TRAIN_OPTIMIZERS = {
  "GradientDescent": (v1.GradientDescentOptimizer, {}),
  "Momentum": (v1.MomentumOptimizer, {"momentum": 0.9}),
  "Momentum nesterov": (
    v1.MomentumOptimizer,
    {"momentum": 0.9, "use_nesterov": True},
  ),
  "Adagrad": (v1.AdagradOptimizer, {}),
  "AdagradDA": (v1.AdagradDAOptimizer, {}),
  "AdagradDA l1 l2": (
    v1.AdagradDAOptimizer,
    {
      "initial_gradient_squared_accumulator_value": 0.2,
      "l1_regularization_strength": 0.05,
      "l2_regularization_strength": 0.03,
    },
  ),
  "Adadelta": (v1.AdadeltaOptimizer, {}),
  "RMSProp": (v1.RMSPropOptimizer, {}),
  "RMSProp momentum": (
    v1.RMSPropOptimizer,
    {"momentum": 0.8, "epsilon": 0.01},
  ),
  "RMSProp centered": (
    v1.RMSPropOptimizer,
    {"momentum": 0.8, "centered": True},
  ),
  "Ftrl": (v1.FtrlOptimizer, {}),
  "Ftrl l1 l2": (
    v1.FtrlOptimizer,
    {
      "l1_regularization_strength": 0.3,
      "l2_regularization_strength": 0.2,
      "initial_accumulator_value": 0.5,
    },
  ),
  "Ftrl power beta shrinkage": (
    v1.FtrlOptimizer,
    {
      "learning_rate_power": -0.7,
      "l1_regularization_strength": 0.1,
      "l2_shrinkage_regularization_strength": 0.05,
      "beta": 0.4,
    },
  ),
  "ProximalGradientDescent": (
    v1.ProximalGradientDescentOptimizer,
    {"l1_regularization_strength": 0.3, "l2_regularization_strength": 0.2},
  ),
  "ProximalAdagrad": (v1.ProximalAdagradOptimizer, {}),
  "ProximalAdagrad l1 l2": (
    v1.ProximalAdagradOptimizer,
    {"l1_regularization_strength": 0.3, "l2_regularization_strength": 0.2},
  ),
  "Adam": (v1.AdamOptimizer, {}),
  "Adam large epsilon": (v1.AdamOptimizer, {"epsilon": 0.05}),
}

LEGACY_OPTIMIZERS = {
  "SGD momentum": (legacy.SGD, {"momentum": 0.9}),
  "SGD nesterov": (legacy.SGD, {"momentum": 0.9, "nesterov": True}),
  "Adagrad": (legacy.Adagrad, {}),
  "Adadelta": (legacy.Adadelta, {}),
  "RMSprop": (legacy.RMSprop, {}),
  "RMSprop momentum": (legacy.RMSprop, {"momentum": 0.8}),
  "RMSprop centered": (legacy.RMSprop, {"momentum": 0.8, "centered": True}),
  "Ftrl": (legacy.Ftrl, {"l1_regularization_strength": 0.1, "beta": 0.4}),
  "Adam": (legacy.Adam, {}),
  "Adamax": (legacy.Adamax, {}),
}

KERAS_OPTIMIZERS = {
  "SGD": (keras.optimizers.SGD, {}),
  "SGD momentum": (keras.optimizers.SGD, {"momentum": 0.9}),
  "Adagrad": (keras.optimizers.Adagrad, {}),
  "Adadelta": (keras.optimizers.Adadelta, {}),
  "RMSprop": (keras.optimizers.RMSprop, {}),
  "Ftrl": (keras.optimizers.Ftrl, {"beta": 0.4}),
  "Adam": (keras.optimizers.Adam, {}),
  "Adamax": (keras.optimizers.Adamax, {}),
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


def whole_array(ids, values):
  dense = np.zeros(SHAPE, np.float32)
  np.add.at(dense, ids, values)
  return dense


def run_train_optimizer(make, arguments, table, values, sparse):
  """Runs a `tf.compat.v1.train` optimizer in a graph.

  Returns:
    The parameters after each step, and each slot after each step.
  """
  with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    rate = tf.compat.v1.placeholder(tf.float32, [])
    step = tf.compat.v1.train.get_or_create_global_step()
    variable = tf.compat.v1.get_variable("table", initializer=table)
    arguments = dict(arguments)
    if make is v1.AdagradDAOptimizer:
      arguments["global_step"] = step
    optimizer = make(rate, **arguments)
    if sparse:
      rows = tf.compat.v1.placeholder(tf.float32, [None, SHAPE[1]])
      ids = tf.compat.v1.placeholder(tf.int32, [None])
      grad = tf.IndexedSlices(rows, ids, SHAPE)
    else:
      grad = tf.compat.v1.placeholder(tf.float32, SHAPE)
    train = optimizer.apply_gradients([(grad, variable)], global_step=step)
    slots = {
      name: optimizer.get_slot(variable, name)
      for name in optimizer.get_slot_names()
    }
    session.run(tf.compat.v1.global_variables_initializer())
    recorded = []
    for i, (step_ids, step_values) in enumerate(zip(IDS, values, strict=True)):
      feed = {rate: RATES[i]}
      if sparse:
        feed |= {rows: step_values, ids: step_ids}
      else:
        feed[grad] = whole_array(step_ids, step_values)
      session.run(train, feed)
      recorded.append(session.run({"table": variable} | slots))
  return by_name(recorded)


def run_keras_optimizer(make, arguments, table, values, sparse):
  """Runs a Keras optimizer eagerly; see `run_train_optimizer`."""
  variable = tf.Variable(table, name="table")
  optimizer = make(**arguments)
  recorded = []
  for i, (step_ids, step_values) in enumerate(zip(IDS, values, strict=True)):
    optimizer.learning_rate = RATES[i]
    dense = whole_array(step_ids, step_values)
    if not sparse:
      grad = tf.constant(dense)
    elif isinstance(optimizer, legacy.Optimizer):
      grad = tf.IndexedSlices(
        tf.constant(step_values), tf.constant(step_ids), SHAPE
      )
    else:
      ids = np.unique(step_ids)
      grad = tf.IndexedSlices(tf.constant(dense[ids]), tf.constant(ids), SHAPE)
    optimizer.apply_gradients([(grad, variable)])
    if hasattr(optimizer, "get_slot_names"):
      slots = {
        name: optimizer.get_slot(variable, name).numpy()
        for name in optimizer.get_slot_names()
      }
    else:
      slots = {
        re.sub("^table_[0-9]+_", "", slot.name): slot.numpy()
        for slot in optimizer.variables
        if tuple(slot.shape) == SHAPE
      }
    recorded.append({"table": variable.numpy()} | slots)
  return by_name(recorded)


def by_name(recorded):
  return {name: [step[name] for step in recorded] for name in recorded[0]}


def run_all(optimizers, run, table, values):
  """Runs optimizers with sparse and with dense gradients."""
  cases = {}
  for name, (make, arguments) in optimizers.items():
    cases[name] = {
      "class": make.__name__,
      "arguments": arguments,
      "sparse": run(make, arguments, table, values, sparse=True),
      "dense": run(make, arguments, table, values, sparse=False),
    }
  return cases


def run_keras(table, values):
  """Runs Keras 3, where rows give what whole arrays give.

  This holds for distinct row numbers: Keras 3 squares the rows of one number
  each, and then adds the squares.
  """
  cases = run_all(KERAS_OPTIMIZERS, run_keras_optimizer, table, values)
  for case in cases.values():
    sparse = case.pop("sparse")
    for name, steps in case["dense"].items():
      np.testing.assert_array_equal(sparse[name], steps)
  return cases


def indexed_slices_facts(table, values):
  """Records the dense array, the norms and the clipped rows of slices."""
  slices = tf.IndexedSlices(tf.constant(values[0]), tf.constant(IDS[0]), SHAPE)
  bias = tf.constant([0.3, -0.4])
  (clipped, clipped_bias), norm = tf.clip_by_global_norm([slices, bias], 0.5)
  return {
    "ids": IDS[0],
    "values": values[0],
    "bias": bias,
    "dense": tf.convert_to_tensor(slices),
    "global_norm": norm,
    "dense_global_norm": tf.linalg.global_norm(
      [tf.convert_to_tensor(slices), bias]
    ),
    "clipped_values": clipped.values,
    "clipped_ids": clipped.indices,
    "clipped_bias": clipped_bias,
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

  losses = (gather, embedding_lookup, two_lookups, lookup_and_sum)
  result = {}
  for loss_fn in losses:
    variable = tf.Variable(table)
    with tf.GradientTape() as tape:
      loss = loss_fn(variable)
    grad = tape.gradient(loss, variable)
    result[loss_fn.__name__] = {"loss": loss}
    if isinstance(grad, tf.IndexedSlices):
      result[loss_fn.__name__] |= {"ids": grad.indices, "values": grad.values}
    result[loss_fn.__name__]["dense"] = tf.convert_to_tensor(grad)
  return result


def loss_scale_run(table, values):
  """Records a dynamic loss scale, with an overflow in one row of step 2."""
  variable = tf.Variable(table)
  optimizer = tf_keras.mixed_precision.LossScaleOptimizer(
    legacy.SGD(0.1, momentum=0.9), initial_scale=16.0, dynamic_growth_steps=2
  )
  recorded = []
  for i, (step_ids, step_values) in enumerate(zip(IDS, values, strict=True)):
    step_values = step_values.copy()
    if i == 2:
      step_values[1, 0] = np.inf
    with tf.GradientTape() as tape:
      # The gradient of the looked-up rows is `step_values`.
      loss = tf.reduce_sum(tf.gather(variable, step_ids) * step_values)
      scaled_loss = optimizer.get_scaled_loss(loss)
    scaled = tape.gradient(scaled_loss, variable)
    (grad,) = optimizer.get_unscaled_gradients([scaled])
    optimizer.apply_gradients([(grad, variable)])
    recorded.append(
      {
        "table": variable.numpy(),
        "scale": float(optimizer.loss_scale),
        "momentum": optimizer.inner_optimizer.get_slot(
          variable, "momentum"
        ).numpy(),
      }
    )
  return by_name(recorded)


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
  if isinstance(x, float):
    return float(f"{x:.9g}")
  return x


def main():
  table, values = random_inputs()
  figures = {
    "source": f"TensorFlow {tf.__version__}, Keras {keras.__version__}, "
    f"tf-keras {tf_keras.__version__}; make_sparse_optimizers.py",
    "table": table,
    "ids": IDS,
    "values": values,
    "learning_rates": RATES,
    "tf.compat.v1.train": run_all(
      TRAIN_OPTIMIZERS, run_train_optimizer, table, values
    ),
    "tf.keras.optimizers.legacy": run_all(
      LEGACY_OPTIMIZERS, run_keras_optimizer, table, values
    ),
    "keras.optimizers": run_keras(table, values),
    "indexed_slices": indexed_slices_facts(table, values),
    "lookups": lookup_gradients(table),
    "loss_scale": loss_scale_run(table, values),
  }
  OUTPUT.write_text(json.dumps(to_json(figures), separators=(",", ":")) + "\n")


if __name__ == "__main__":
  main()
