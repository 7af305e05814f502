"""Plans with given figures, and a step to plan."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import flaxshard as fs
from flaxshard.analysis.cost import Cost
from flaxshard.analysis.links import LinkTime
from flaxshard.analysis.memory import Memory
from flaxshard.analysis.plan import Plan
from flaxshard.compiled.collectives import Collective

GIB = 2**30


def create_collective(nbytes, network="ici", purpose="gradients"):
  """Returns an all-reduce of which a device sends `nbytes`."""
  return Collective(
    "all-reduce", "bf16", nbytes, nbytes, 2, ("replica",), network, 1.0, False,
    purpose, (), "", "",
  )  # fmt: skip


def create_cost(seconds, traffic=()):
  """Returns a cost whose arithmetic takes some seconds, and nothing else."""
  times = [
    LinkTime(("replica",), c.network, "x: line", c.link_bytes, 0.0)
    for c in traffic
  ]
  return Cost(
    "TPU v5e", {"bf16": 1e12}, 1e12, 1.0, tuple(times), seconds, 0.0, 2e12
  )


def create_plan(
  *, seconds=1.0, peak=4 * GIB, hbm=8 * GIB, batch_size=64, traffic=(), **memory
):
  """Returns a plan; `seconds` None: its cost is unknown."""
  known = {
    "state": {"params": GIB, "opt_state": 2 * GIB},
    "batch": 1024,
    "temporaries": None if peak is None else peak - 3 * GIB - 1024,
    "peak": peak,
    "hbm": hbm,
    "fits": None if peak is None or hbm is None else peak <= hbm,
  }
  return Plan(
    topology="v5e:2x2",
    device_kind="TPU v5 lite",
    mesh={"replica": 4},
    compiler="jax, libtpu",
    seconds=3.0,
    batch_size=batch_size,
    memory=Memory(**(known | memory)),
    traffic=tuple(traffic),
    cost=None if seconds is None else create_cost(seconds, traffic),
  )


def build(strategy, batch_size=8, features=2):
  """Returns a step on one Dense layer, its state and its batch."""
  x = jax.ShapeDtypeStruct((batch_size, 4), jnp.float32)
  state = fs.create_train_state(
    nn.Dense(features),
    jax.random.key(0),
    x,
    optax.adam(1e-3),
    strategy=strategy,
    abstract=True,
  )

  def step(state, x):
    return state.minimize(
      lambda params: jnp.mean(state.apply_fn({"params": params}, x) ** 2)
    )

  return step, state, strategy.shard_batch(x)
