"""Replicas exchange their parts of commits, and of parameters."""

import jax
import jax.numpy as jnp
import numpy as np

import flaxshard as fs
from flaxshard.wrappers.agn_exchange import Exchange
from flaxshard.wrappers.agn_rows import choose_dim
from flaxshard.wrappers.agn_rows import Leaf


def test_replicas_exchange_their_parts_of_commits():
  # Large leaves, one of which does not split evenly, and small ones.
  shapes = {"even": (512, 512), "uneven": (517, 509), "small": (7,), "one": ()}
  dtypes = {"even": jnp.bfloat16}
  names = list(shapes)
  count = 3
  strategy = fs.Strategy(devices=jax.devices()[:count])

  def split_all(dtype_of):
    return tuple(
      Leaf(
        shapes[name],
        dtype_of(name),
        choose_dim(shapes[name], count),
        count,
      )
      for name in names
    )

  def values(name, replica, dtype):
    x = jax.lax.iota(jnp.int32, int(np.prod(shapes[name])))
    return ((x % 97 + 100 * replica) / 64).astype(dtype).reshape(shapes[name])

  grads = split_all(lambda name: jnp.dtype(jnp.float32))
  params = split_all(lambda name: jnp.dtype(dtypes.get(name, jnp.float32)))
  exchange = Exchange(grads, params)
  assert [leaf.is_large for leaf in grads] == [True, True, False, False]

  def fn():
    me = fs.get_replica_context().replica_id_in_sync_group
    received = exchange.send([values(n, me, jnp.float32) for n in names])
    wrong = jnp.zeros((), jnp.int32)
    for k in range(count):
      for i, part in enumerate(exchange.read(received, k)):
        whole = values(names[i], k, jnp.float32)
        wrong += (part != grads[i].slice_part(whole, me)).sum()
      replacement = [
        leaf.slice_part(values(n, 5 + k, leaf.dtype), me)
        for leaf, n in zip(params, names, strict=True)
      ]
      received = exchange.write(received, k, replacement)
    back = exchange.send_back(received)
    for i, x in enumerate(back):
      wrong += (x != values(names[i], 5 + me, params[i].dtype)).sum()
    assert [x.dtype for x in back] == [leaf.dtype for leaf in params]
    return wrong

  wrong = strategy.run(fn)
  assert int(strategy.reduce("sum", wrong)) == 0
