"""Prints the cost of `Strategy.run` and `run_steps`, and of hand-written JAX.

  bare       `jax.jit(jax.shard_map(step))` by hand, with Flax's TrainState, a
             `pmean` of the gradients, and specs for every argument.
  run        The same step through `Strategy.jit`, with flaxshard's TrainState.
  jit loop   The jitted step, called once per batch.
  run_steps  The same steps as one loop on the device.

Each variant is compiled and warmed up. In every round all variants are timed in
a random order, and the ratios compare times of the same round.

  python benchmarks/strategy.py --replicas 8
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
import platform
import statistics
from typing import Any

from flax import linen as nn
from flax.training import train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
from timing import quartiles
from timing import rounds

import flaxshard as fs

P = jax.sharding.PartitionSpec


class Mlp(nn.Module):
  """A perceptron with `layers` layers."""

  features: int
  layers: int = 2

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns ten logits."""
    for _ in range(self.layers - 1):
      x = nn.relu(nn.Dense(self.features)(x))
    return nn.Dense(10)(x)


def make_step(reduce_gradients: Callable[[Any], Any]) -> Callable[..., Any]:
  """Returns a train step that reduces its gradients with a function."""

  def step(state: Any, batch: Any) -> Any:
    def loss_fn(params: Any) -> jax.Array:
      logits = state.apply_fn({"params": params}, batch["x"])
      losses = optax.softmax_cross_entropy_with_integer_labels(
        logits, batch["y"]
      )
      return losses.mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=reduce_gradients(grads)), loss

  return step


def report(
  times: dict[str, list[float]], reference: str, num_steps: int
) -> None:
  """Prints the time of a step and its ratio to the reference, per variant."""
  for name, seconds in times.items():
    low, middle, high = quartiles(seconds, times[reference])
    print(
      f"| {name} | {1e3 * statistics.median(seconds) / num_steps:.3f} ms "
      f"| {middle:.3f} ({low:.3f}-{high:.3f}) |"
    )


def create_problem(
  layers: int, features: int, batch_size: int, mesh: Any
) -> Any:
  """Returns a function that creates a state on the mesh, and a batch."""
  model = Mlp(features, layers)
  rng = np.random.default_rng(0)
  batch = {
    "x": rng.normal(size=(batch_size, 64)).astype(np.float32),
    "y": rng.integers(0, 10, batch_size, dtype=np.int32),
  }
  params = model.init(jax.random.key(0), batch["x"][:1])["params"]
  fields = dict(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))
  replicated = jax.sharding.NamedSharding(mesh, P())
  sharded = jax.sharding.NamedSharding(mesh, P("replica"))

  def create_state(cls: Any) -> Any:
    state = cls.create(**fields)
    return jax.device_put(jax.tree.map(jnp.copy, state), replicated)

  return create_state, jax.device_put(batch, sharded)


def main() -> None:
  """Prints a table for each model."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--replicas", type=int, default=1)
  parser.add_argument("--rounds", type=int, default=20)
  args = parser.parse_args()
  jax.config.update("jax_num_cpu_devices", args.replicas)
  strategy = fs.Strategy(devices=jax.devices()[: args.replicas])
  mesh = strategy.mesh
  print(
    f"{args.replicas} replicas, {jax.devices()[0].device_kind}, JAX "
    f"{jax.__version__}, Python {platform.python_version()}\n"
  )

  # XLA deadlocks on virtual CPU devices with many steps in flight. `run` waits
  # for each step itself.
  wait = jax.block_until_ready if args.replicas > 1 else lambda x: x
  bare_step = make_step(lambda grads: jax.lax.pmean(grads, "replica"))

  def run_on_replica(state: Any, batch: Any) -> Any:
    state, loss = bare_step(state, batch)
    return state, loss[None]

  bare = jax.jit(
    jax.shard_map(
      run_on_replica,
      mesh=mesh,
      in_specs=(P(), P("replica")),
      out_specs=(P(), P("replica")),
      check_vma=False,
    ),
    donate_argnums=0,
  )
  run = strategy.jit(make_step(lambda grads: grads), donate_argnums=0)
  for layers, features, batch_size in ((4, 256, 256), (40, 64, 64)):
    make_state, batch = create_problem(layers, features, batch_size, mesh)
    states = {
      "bare": make_state(train_state.TrainState),
      "run": make_state(fs.TrainState),
    }

    def advance(name: str, fn: Any, batch: Any = batch, states: Any = states):
      for _ in range(50):
        states[name], _ = wait(fn(states[name], batch))
      jax.block_until_ready(states[name])

    times = rounds(
      {
        "bare": lambda f=advance: f("bare", bare),
        "run": lambda f=advance: f("run", run),
      },
      args.rounds,
    )
    print(f"MLP, {layers} layers of {features}, batch {batch_size}, Adam\n")
    print("| step | time | ratio |\n|---|---|---|")
    report(times, "bare", 50)
    print()

  make_state, batch = create_problem(2, 32, 16, mesh)
  jitted = jax.jit(make_step(lambda grads: grads))
  batches = jax.tree.map(
    lambda x: jax.device_put(
      jnp.stack([x] * 100),
      jax.sharding.NamedSharding(mesh, P(None, "replica")),
    ),
    batch,
  )
  state = make_state(fs.TrainState)

  def loop_jit() -> None:
    new_state = state
    for _ in range(100):
      new_state, _ = wait(jitted(new_state, batch))
    jax.block_until_ready(new_state)

  def loop_run() -> None:
    new_state = make_state(fs.TrainState)
    for _ in range(100):
      new_state, _ = run(new_state, batch)
    jax.block_until_ready(new_state)

  step = make_step(lambda grads: grads)

  def run_steps() -> None:
    jax.block_until_ready(
      strategy.run_steps(step, state, batches, reduce="mean")
    )

  times = rounds(
    {"run_steps": run_steps, "jit loop": loop_jit, "run loop": loop_run},
    args.rounds,
  )
  print("MLP, 2 layers of 32, batch 16, Adam, 100 steps\n")
  print("| steps | time of a step | ratio |\n|---|---|---|")
  report(times, "run_steps", 100)


if __name__ == "__main__":
  main()
