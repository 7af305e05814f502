"""The table of arrays and shardings, and `repr` of a state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import quadratic_states

import flaxshard as fs

P = jax.sharding.PartitionSpec
STRATEGY = fs.Strategy(mesh_shape={"replica": 4, "model": 2})


def abstract(shape, *spec, dtype="float32"):
  sharding = jax.sharding.NamedSharding(STRATEGY.mesh, P(*spec))
  return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def test_table_of_a_tree():
  tree = {
    "embed": abstract((1024, 512), "model"),
    "host": np.zeros(4, np.float32),
    "kernel": abstract((512, 512), "replica", "model"),
    "one": jax.device_put(np.zeros(256, np.int8), jax.devices()[1]),
    "scale": abstract((512,)),
    "step": abstract((), dtype="int32"),
    "table": abstract((512, 1024)),
  }
  wanted = """\
tree      shape        dtype    spec                   per device    whole
  embed   (1024, 512)  float32  P('model')                1.0 MiB  2.0 MiB
  host    (4,)         float32  not placed                    0 B     16 B
  kernel  (512, 512)   float32  P('replica', 'model')   128.0 KiB  1.0 MiB
  one     (256,)       int8     cpu:1                       256 B    256 B
  scale   (512,)       float32  P()                       2.0 KiB  2.0 KiB
  step    ()           int32    P()                           4 B      4 B
  table   (512, 1024)  float32  P()                     * 2.0 MiB  2.0 MiB
  total                                                   3.1 MiB  5.0 MiB
arrays: 7, 5.0 MiB in all; devices: 8, at most 3.1 MiB on each
* at least 1.0 MiB, replicated over several devices"""
  description = STRATEGY.describe(tree)
  assert str(description) == wanted
  # Of the fullest device.
  assert description.bytes_per_device == 2**20 * 3 + 2**17 + 2**11 + 4 + 256


def test_repr_of_a_state():
  params = {f"layer{i:02}": jnp.zeros(3) for i in range(12)}
  rngs = {"key": jax.random.key(0)}
  state = quadratic_states.create(tx=optax.adam(0.1), params=params, rngs=rngs)
  with jax.transfer_guard("disallow"):
    text = repr(state)
  # Functions without their addresses, which differ in every run.
  assert "layer09  float32[3]\n    ... and 2 more\n" in text
  assert "0x" not in text
  # Without values: traced, abstract, deleted, or no arrays.
  seen = []
  jax.jit(lambda s: seen.append(repr(s)))(state)
  assert seen == [repr(jax.eval_shape(lambda: state))]
  assert "{'layer00': ShapedArray" in repr(jax.tree.map(jax.typeof, state))
  jax.jit(lambda s: s.replace(step=s.step + 1), donate_argnums=0)(state)
  assert "int32[] deleted" in repr(state)
