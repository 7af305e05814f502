"""The table of arrays and shardings, and `repr` of a state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import flaxshard as fs

P = jax.sharding.PartitionSpec
MESH = jax.sharding.Mesh(
  np.array(jax.devices()).reshape(4, 2), ("replica", "model")
)


def describe(tree):
  return fs.Strategy().describe(tree)


def abstract(shape, *spec, dtype="float32"):
  sharding = jax.sharding.NamedSharding(MESH, P(*spec))
  return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def test_table_of_a_tree():
  tree = {
    "embed": abstract((1024, 512), "model"),
    "kernel": abstract((512, 512), "replica", "model"),
    "scale": abstract((512,)),
    "step": abstract((), dtype="int32"),
    "table": abstract((512, 1024)),
  }
  lines = str(describe(tree)).splitlines()
  wanted = """\
tree      shape        dtype    spec                   per device    whole
  embed   (1024, 512)  float32  P('model')                1.0 MiB  2.0 MiB
  kernel  (512, 512)   float32  P('replica', 'model')   128.0 KiB  1.0 MiB
  scale   (512,)       float32  P()                       2.0 KiB  2.0 KiB
  step    ()           int32    P()                           4 B      4 B
  table   (512, 1024)  float32  P()                     * 2.0 MiB  2.0 MiB
  total                                                   3.1 MiB  5.0 MiB
arrays: 5, 5.0 MiB in all; devices: 8, at most 3.1 MiB on each
* at least 1.0 MiB, replicated over several devices"""
  assert lines == wanted.splitlines()


def test_groups_of_a_train_state():
  strategy = fs.Strategy(mesh_shape={"replica": 4, "model": 2})
  sharding = jax.sharding.NamedSharding(strategy.mesh, P(None, "model"))
  state = fs.TrainState.create(
    apply_fn=None,
    params={"w": jax.device_put(np.zeros((4, 8), np.float32), sharding)},
    tx=optax.adam(0.1),
    wrappers=[fs.LossScale("dynamic")],
    strategy=strategy,
    batch_stats={"mean": np.zeros(8, np.float32)},
  )
  description = describe(state)
  sizes = {
    name: (len(group.rows), group.nbytes, group.bytes_per_device)
    for name, group in description.groups.items()
  }
  assert sizes == {
    "step": (1, 4, 4),
    "params": (1, 128, 64),
    "opt_state": (3, 260, 132),
    "wrapper_states": (4, 16, 16),
    "batch_stats": (1, 32, 32),
  }
  assert description.nbytes == 440
  assert description.bytes_per_device == 248
  assert description.num_devices == 8
  assert len(description.rows) == 10
  assert repr(description) == (
    "Description(arrays: 10, 440 B in all; devices: 8, at most 248 B on each)"
  )
  paths = {row.path: row.spec for row in description.rows}
  assert paths["step"] == "P()"
  assert paths["w"] == paths["0/mu/w"] == "P(None, 'model')"
  assert paths["loss_scale/scale"] == "P()"


def test_bytes_per_device_are_of_the_fullest_device():
  one, two = jax.devices()[:2]
  tree = {
    "a": jax.device_put(np.zeros(8, np.float32), one),
    "b": jax.device_put(np.zeros(4, np.float32), two),
    "c": jax.device_put(np.zeros(6, np.int8), two),
  }
  description = describe(tree)
  assert [row.spec for row in description.rows] == ["cpu:0", "cpu:1", "cpu:1"]
  assert description.bytes_per_device == 32
  assert description.nbytes == 54
  assert description.num_devices == 2


def test_arrays_without_a_sharding():
  tree = {
    "host": np.zeros(4, np.float32),
    "number": 1.0,
    "shape": jax.ShapeDtypeStruct((2,), jnp.bfloat16),
  }
  description = describe(tree)
  assert {row.spec for row in description.rows} == {"not placed"}
  assert description.nbytes == 16 + 4 + 4
  assert description.bytes_per_device == description.num_devices == 0
  rows = []
  jax.jit(lambda x: rows.extend(describe(x).rows))(jnp.ones(2))
  assert rows[0].spec == "not placed"


def create(params, tx=None, **kwargs):
  tx = tx or optax.sgd(0.1)
  return fs.TrainState.create(apply_fn=None, params=params, tx=tx, **kwargs)


def test_repr_shows_each_small_tree_and_the_wrappers():
  state = create(
    {"dense": {"bias": jnp.zeros(3), "kernel": jnp.ones((2, 3))}},
    optax.adam(0.1),
    wrappers=[fs.LossScale("dynamic")],
    batch_stats={"mean": jnp.zeros(3, jnp.bfloat16)},
    rngs={"key": jax.random.key(0)},
  )
  with jax.transfer_guard("disallow"):
    text = repr(state)
  lines = text.splitlines()
  assert lines[0] == "TrainState("
  assert "  step=int32[] 0," in lines
  assert "  params: 2 arrays of float32, 9 elements, 36 B" in lines
  assert "    dense/kernel  float32[2,3]" in lines
  assert "    0/mu/dense/kernel  float32[2,3]" in lines
  assert "    loss_scale/scale          float32[] 32768.0" in lines
  assert "    mean  bfloat16[3]" in lines
  assert "    key  key<fry>[]" in lines
  assert any(x.startswith("    LossScale(scale='dynamic'") for x in lines)
  # Functions without their addresses, which differ in every run.
  assert "0x" not in text


def test_repr_of_what_has_no_values():
  state = create({"w": jnp.ones((2, 3))})
  seen = []
  jax.jit(lambda s: seen.append(repr(s)))(state)
  assert seen == [repr(jax.eval_shape(lambda: state))]
  assert seen == [repr(state).replace("int32[] 0", "int32[]")]
  ranks = repr(jax.tree.map(lambda x: f"rank {x.ndim}", state))
  assert "params={'w': 'rank 2'}," in ranks
  assert "params={'w': None}," in repr(jax.tree.map(lambda x: None, state))
  jax.jit(lambda s: s.replace(step=s.step + 1), donate_argnums=0)(state)
  assert "step=int32[] deleted," in repr(state)
