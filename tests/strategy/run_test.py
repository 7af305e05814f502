"""Strategy.run: arguments, results, and the errors about them."""

import dataclasses
import functools

from flax import linen as nn
from flax import struct
from flax.training import train_state as flax_train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from regression import assert_close
from regression import batch
from regression import create
from regression import loss_fn
from regression import sharded
from regression import split
from regression import X

import flaxshard as fs

P = jax.sharding.PartitionSpec
NamedSharding = jax.sharding.NamedSharding

NORM = nn.BatchNorm(use_running_average=False, axis_name="batch")
NORM_VARIABLES = {
  "params": {"scale": np.ones(3, np.float32), "bias": np.ones(3, np.float32)},
  "batch_stats": {"mean": np.zeros(3), "var": np.ones(3)},
}

EIGHT = fs.Strategy()
SPLIT = fs.Strategy(mesh_shape={"replica": 2, "model": 4})


def replica_id():
  return fs.get_replica_context().replica_id_in_sync_group


def test_array_sharded_over_replicas_arrives_in_parts():
  rows = np.arange(32.0, dtype=np.float32).reshape(16, 2)
  columns = jax.device_put(
    rows.T, NamedSharding(EIGHT.mesh, P(None, "replica"))
  )
  args = EIGHT.shard_batch({"rows": rows}), columns, rows
  parts, part_of_columns, whole = EIGHT.run(lambda *args: args, args=args)
  np.testing.assert_array_equal(parts["rows"], rows.reshape(8, 2, 2))
  wanted = rows.T.reshape(2, 8, 2).swapaxes(0, 1)
  np.testing.assert_array_equal(part_of_columns, wanted)
  np.testing.assert_array_equal(whole, np.stack([rows] * 8))


def test_array_sharded_over_both_axes_stays_sharded_over_logical_devices():
  x = np.arange(64.0, dtype=np.float32).reshape(8, 8)
  args = [
    jax.device_put(x, NamedSharding(SPLIT.mesh, spec))
    for spec in (
      P("replica", "model"),
      P(("replica", "model")),
      P(("model", "replica")),
      P("model", "replica"),
    )
  ]
  *rows, columns = SPLIT.run(lambda *args: args, args=args)
  for part in rows:
    np.testing.assert_array_equal(part, x.reshape(2, 4, 8))
  wanted = x.reshape(8, 2, 4).swapaxes(0, 1)
  np.testing.assert_array_equal(columns, wanted)


def test_python_numbers_and_keys_are_replicated():
  fn = lambda x, flag, key: (2 * x, ~flag, jax.random.key_data(key))
  key = jax.random.key(3)
  twice, flag, data = EIGHT.run(fn, args=(1.5, np.bool_(False), key))
  assert np.asarray(twice).tolist() == [3.0] * 8
  assert np.asarray(flag).all()
  np.testing.assert_array_equal(data[7], jax.random.key_data(key))


def test_captured_arrays_are_replicated():
  constant, key = jnp.arange(3.0), jax.random.key(0)
  state = create(EIGHT)

  def fn(x):
    noise = jax.random.normal(key, (3,))
    return state.replace(step=state.step + 1), x * constant + noise

  new, out = EIGHT.run(fn, args=(2.0,))
  assert int(new.step) == 1
  wanted = 2 * np.arange(3.0) + jax.random.normal(key, (3,))
  np.testing.assert_allclose(np.asarray(out), [wanted] * 8, rtol=1e-6)


# Results.


@struct.dataclass
class Output:
  loss: jax.Array
  other: jax.Array | None = None


def test_results_keep_their_structure():
  def fn(x):
    number = replica_id()
    out = Output(x + number)
    return {"out": out, "list": [number > 3, 1, None], "half": jnp.bfloat16(2)}

  got = EIGHT.run(fn, args=(0.5,))
  assert got["out"].other is None and got["list"][2] is None
  assert np.asarray(got["out"].loss).tolist() == [0.5 + i for i in range(8)]
  assert np.asarray(got["list"][0]).tolist() == [i > 3 for i in range(8)]
  assert np.asarray(got["list"][1]).tolist() == [1] * 8
  assert got["half"].value.dtype == jnp.bfloat16
  assert EIGHT.run(lambda: None) is None


def test_nested_state_is_returned_as_one_state():
  fn = lambda state: {"a": [state.replace(step=state.step + 2)], "b": 1}
  got = EIGHT.run(fn, args=(create(EIGHT),))
  assert int(got["a"][0].step) == 2
  assert_close(got["a"][0].params, create().params, 0, 0)
  assert isinstance(got["b"], fs.PerReplica)


def test_flax_train_state():
  tx = optax.sgd(0.1)

  def step(state, batch):
    grads = jax.grad(loss_fn)(state.params, batch)
    grads = fs.get_replica_context().all_reduce("mean", grads)
    return state.apply_gradients(grads=grads)

  state = flax_train_state.TrainState.create(
    apply_fn=None, params=create().params, tx=tx
  )
  new = EIGHT.run(step, args=(state, sharded(EIGHT, 0)))
  assert type(new) is flax_train_state.TrainState
  wanted = state.apply_gradients(
    grads=jax.grad(loss_fn)(state.params, batch(0))
  )
  assert_close(new.params, wanted.params)
  own = state.replace(
    params=EIGHT.distribute_values_from_function(lambda _: state.params)
  )
  with pytest.raises(TypeError, match=r"TrainState\.params"):
    EIGHT.run(step, args=(own, sharded(EIGHT, 0)))


def test_two_states_keep_their_shardings():
  student = create(SPLIT)
  teacher = split(create(SPLIT), SPLIT.mesh, P(None, "model"))

  def fn(teacher, student, batch):
    student, _ = student.minimize(loss_fn, batch)
    average = lambda a, b: 0.5 * (a + b)
    params = jax.tree.map(average, teacher.params, student.params)
    return teacher.replace(params=params), student

  new = SPLIT.run(fn, args=(teacher, student, sharded(SPLIT, 0)))
  for before, after in zip((teacher, student), new, strict=True):
    assert after.params["w1"].sharding == before.params["w1"].sharding


@pytest.mark.parametrize(
  ("fn", "error", "message"),
  [
    (lambda: {"a": "x"}, TypeError, r"\[a\]"),
    (lambda: fs.PerReplica(jnp.ones(8)), TypeError, "PerReplica"),
  ],
)
def test_invalid_result_raises(fn, error, message):
  with pytest.raises(error, match=message):
    EIGHT.run(fn)


def test_error_of_the_function_propagates():
  with pytest.raises(ZeroDivisionError):
    EIGHT.run(lambda: 1 // 0)
  with pytest.raises(NameError, match="not_defined"):
    EIGHT.run(lambda: not_defined)  # noqa: F821


@pytest.mark.parametrize(
  "call",
  [
    lambda: jax.lax.psum(jnp.ones(2), "batch"),
    lambda: jax.lax.axis_index(("replica", "batch")),
    lambda: NORM.apply(NORM_VARIABLES, jnp.ones((2, 3)), mutable=True)[0],
  ],
  ids=["psum", "axis_index", "BatchNorm"],
)
def test_unknown_axis_name_names_the_axis_of_the_replicas(call):
  with pytest.raises(ValueError, match=r"batch.* axis_name='replica'"):
    EIGHT.run(call)


def test_batch_norm_over_the_axis_of_the_replicas():
  norm = NORM.clone(axis_name="replica")
  x = EIGHT.shard_batch(X[0, :, :3])
  apply = lambda x: norm.apply(NORM_VARIABLES, x, mutable=True)[0]
  wanted = NORM.clone(axis_name=None).apply(
    NORM_VARIABLES, X[0, :, :3], mutable=True
  )[0]
  got = np.asarray(EIGHT.run(apply, args=(x,))).reshape(16, 3)
  np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("args", [{"x": X[0]}, X[0], 3.0, None])
def test_args_without_a_tuple_raise(args):
  name = type(args).__name__
  with pytest.raises(TypeError, match=rf"args=\(state, batch\), got a {name}"):
    EIGHT.run(lambda x: x, args)


def test_state_and_batch_as_arguments_of_run_raise():
  state = create()
  with pytest.raises(TypeError, match=r"args=\(state, batch\)") as e:
    EIGHT.run(lambda state, batch: state, state, batch(0))
  assert len(str(e.value)) < 200


@pytest.mark.parametrize("number", [2**31, np.int64(-(2**31) - 1), 2**70])
def test_integer_that_does_not_fit_raises(number):
  with pytest.raises(ValueError, match=rf"argument 1/n .*{number}.*int32"):
    EIGHT.run(lambda x, y: x, args=(1, {"n": number}))


@pytest.mark.parametrize(
  ("args", "message"),
  [
    ((1.0, {"a": fs.PerReplica(np.ones((4, 2)))}), "argument 1/a"),
    ((fs.PerReplica(np.ones(16)),), r"the 8 replicas .* got shape \(16,\)"),
    (
      (jax.device_put(X[0], NamedSharding(SPLIT.mesh, P("model"))),),
      "argument 0",
    ),
  ],
)
def test_argument_with_wrong_shape_or_mesh_raises(args, message):
  with pytest.raises(ValueError, match=message):
    EIGHT.run(lambda *args: 1, args=args)


def test_replicated_array_on_another_mesh_is_moved():
  x = jax.device_put(X[0], NamedSharding(SPLIT.mesh, P()))
  got = EIGHT.run(lambda x: x.sum(), args=(x,))
  np.testing.assert_allclose(np.asarray(got), [X[0].sum()] * 8, rtol=1e-5)


def test_float0_argument_raises():
  float0 = np.zeros(3, jax.dtypes.float0)
  with pytest.raises(TypeError, match=r"argument 0/a.*float0"):
    EIGHT.run(lambda x: 1, args=({"a": float0},))


run = lambda x: EIGHT.run(lambda x: x, args=(x,))


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (lambda: jax.jit(lambda x: run(np.ones(2)))(1.0), "argument 0"),
    (lambda: EIGHT.run(lambda: run(1.0)), "run"),
  ],
)
def test_run_inside_a_trace_raises(call, message):
  with pytest.raises(TypeError, match=message):
    call()


class Callables:
  """An object with methods."""

  factor = 2.0

  def method(self, x):
    return self.factor * x


@dataclasses.dataclass(frozen=True)
class Scale:
  factor: float

  def __call__(self, x):
    return self.factor * x


@pytest.mark.parametrize(
  "fn",
  [
    Callables().method,
    Scale(2.0),
    functools.partial(jnp.multiply, 2.0),
    jax.jit(lambda x: 2.0 * x),
  ],
)
def test_every_kind_of_callable_runs(fn):
  assert np.asarray(EIGHT.run(fn, args=(1.5,))).tolist() == [3.0] * 8


def test_callbacks_run_on_each_replica(capfd):
  def fn(x):
    jax.debug.print("replica {}", replica_id())
    return jax.pure_callback(np.negative, x, x)

  out = EIGHT.run(fn, args=(np.float32(2.0),))
  jax.effects_barrier()
  assert np.asarray(out).tolist() == [-2.0] * 8
  printed = capfd.readouterr().out.split("\n")
  assert sorted(filter(None, printed)) == [f"replica {i}" for i in range(8)]
