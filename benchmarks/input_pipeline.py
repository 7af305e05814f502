"""Prints the steps per second of a training loop for several input feeds.

It prints one table for each kind of host work and each kind of loop. The host
work for a batch takes about as long as a step:

  compute  NumPy crops, flips and normalizes uint8 images.
  wait     The thread sleeps, as for a disk or a network.

  free     The loop waits for the last step only.
  logged   The loop reads the loss of every step.

The rows are the feeds:

  prefetch_to_device  `flax.jax_utils`, two batches ahead: the reference.
  no prefetch         Creates a batch, puts it on the devices, calls the step.
  distribute_dataset  flaxshard, two batches ahead, with its mask.

All feeds get the same host batches, for the same step on the same devices. They
are timed in rounds, each in a new random order.

  python benchmarks/input_pipeline.py --devices 2
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
import functools
import itertools
import platform
import random
import statistics
import time
from typing import Any

from flax import jax_utils
from flax import linen as nn
from flax.training import train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax

from flaxshard.data import distribute

Batch = dict[str, np.ndarray]
Feed = Callable[[jax.sharding.Mesh, Iterator[Batch]], Iterator[Any]]

SIZE = 32


class Conv(nn.Module):
  """Two convolutions and a linear head."""

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns logits."""
    for width in (32, 64):
      x = nn.relu(nn.Conv(width, (3, 3), strides=2)(x))
    return nn.Dense(10)(x.mean((1, 2)))


def make_step(mesh: jax.sharding.Mesh) -> tuple[Any, Any]:
  """Returns a state that is replicated, and a jitted training step."""
  model = Conv()
  params = model.init(jax.random.key(0), jnp.ones((1, SIZE, SIZE, 3)))["params"]
  state = train_state.TrainState.create(
    apply_fn=model.apply, params=params, tx=optax.sgd(0.01)
  )
  replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

  @functools.partial(jax.jit, donate_argnums=0)
  def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
    # Flax's prefetch adds a leading axis for the devices.
    images = batch["image"].reshape(-1, SIZE, SIZE, 3)
    labels = batch["label"].reshape(-1)

    def loss_fn(params: Any) -> jax.Array:
      logits = state.apply_fn({"params": params}, images)
      return optax.softmax_cross_entropy_with_integer_labels(
        logits, labels
      ).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss

  return jax.device_put(state, replicated), step


# -- Host work.


def raw_batches(batch_size: int) -> Iterator[Batch]:
  """Yields batches of uint8 images that are larger than the crops."""
  rng = np.random.default_rng(0)
  shape = (batch_size, SIZE + 4, SIZE + 4, 3)
  images = rng.integers(0, 256, shape, np.uint8)
  labels = rng.integers(0, 10, batch_size, np.int32)
  while True:
    yield {"image": images, "label": labels}


def decode(raw: Batch, i: int) -> Batch:
  """Crops, flips and normalizes the images of a batch."""
  top, left = i % 5, i // 5 % 5
  image = raw["image"][
    :, top : top + SIZE, left : left + SIZE, :: 1 - i % 2 * 2
  ]
  image = (image.astype(np.float32) - 127.0) / 64.0
  return {"image": image, "label": raw["label"]}


def compute(batch_size: int, seconds: float) -> Iterator[Batch]:
  """Yields batches, and decodes each as often as takes `seconds`."""
  raws = raw_batches(batch_size)
  decode(next(raws), 0)
  start = time.perf_counter()
  for i in range(10):
    decode(next(raws), i)
  repeats = max(1, round(10 * seconds / (time.perf_counter() - start)))
  for i in itertools.count():
    raw = next(raws)
    for _ in range(repeats):
      batch = decode(raw, i)
    yield batch


def wait(batch_size: int, seconds: float) -> Iterator[Batch]:
  """Yields batches after sleeping for `seconds`."""
  batch = decode(next(raw_batches(batch_size)), 0)
  while True:
    time.sleep(seconds)
    yield batch


# -- Feeds.


def prefetch_to_device(
  mesh: jax.sharding.Mesh, batches: Iterator[Batch]
) -> Iterator[Any]:
  devices = list(mesh.devices.flat)
  split = lambda x: x.reshape(len(devices), -1, *x.shape[1:])
  by_device = (jax.tree.map(split, batch) for batch in batches)
  return jax_utils.prefetch_to_device(by_device, 2, devices)


def no_prefetch(
  mesh: jax.sharding.Mesh, batches: Iterator[Batch]
) -> Iterator[Any]:
  return (distribute.shard_batch(mesh, batch) for batch in batches)


def distribute_dataset(
  mesh: jax.sharding.Mesh, batches: Iterator[Batch]
) -> Iterator[Any]:
  return iter(distribute.DistributedDataset(mesh, batches, prefetch=2))


FEEDS: dict[str, Feed] = {
  "prefetch_to_device": prefetch_to_device,
  "no prefetch": no_prefetch,
  "distribute_dataset": distribute_dataset,
}


# -- Measuring.


def steps_per_second(
  mesh: jax.sharding.Mesh,
  feed: Feed,
  batches: Iterator[Batch],
  logged: bool,
  steps: int,
) -> float:
  """Returns the speed of a loop, measured from its first batch."""
  state, step = make_step_once(mesh)
  state = jax.tree.map(jnp.copy, state)
  batches = itertools.islice(batches, steps)
  start = time.perf_counter()
  for batch in feed(mesh, batches):
    state, loss = step(state, batch)
    if logged:
      float(loss)
  jax.block_until_ready(state)
  return steps / (time.perf_counter() - start)


make_step_once = functools.cache(make_step)


def step_seconds(mesh: jax.sharding.Mesh, batch_size: int) -> float:
  """Compiles the step, and returns the seconds that it takes alone."""
  state, step = make_step_once(mesh)
  state = jax.tree.map(jnp.copy, state)
  host = decode(next(raw_batches(batch_size)), 0)
  batch = distribute.shard_batch(mesh, host)
  seconds = []
  for _ in range(20):
    start = time.perf_counter()
    state, loss = step(state, batch)
    jax.block_until_ready((state, loss))
    seconds.append(time.perf_counter() - start)
  return statistics.median(seconds)


def report(speeds: dict[str, list[float]]) -> None:
  """Prints a table; ratios are to the reference in the same round."""
  reference = speeds["prefetch_to_device"]
  print(f"| {'feed':<18} | steps/s | ratio |   quartiles |")
  print(f"|{'-' * 19}:|--------:|------:|------------:|")
  for name, values in speeds.items():
    ratios = [a / b for a, b in zip(values, reference, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(
      f"| {name:<18} | {statistics.median(values):7.1f} | {middle:5.2f} | "
      f"{f'{low:.2f}-{high:.2f}':>11} |"
    )


def main() -> None:
  """Reads the flags, measures, prints."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  add = parser.add_argument
  add(
    "--devices",
    type=int,
    default=0,
    help="virtual CPU devices; 0: all devices of JAX",
  )
  add("--batch-size", type=int, default=64)
  add("--rounds", type=int, default=15)
  add("--steps", type=int, default=40, help="steps in a round")
  args = parser.parse_args()
  if args.devices:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.devices)

  mesh = jax.sharding.Mesh(np.array(jax.devices()), ("replica",))
  seconds = step_seconds(mesh, args.batch_size)
  device = jax.devices()[0]
  print(
    f"{mesh.size} × {device.device_kind} ({device.platform}), JAX "
    f"{jax.__version__}, Python {platform.python_version()}; batches of "
    f"{args.batch_size};\n{args.rounds} rounds of {args.steps} steps; a step "
    f"alone takes {1e3 * seconds:.1f} ms, the host work of a batch is tuned to "
    "that.\nratio, quartiles: to prefetch_to_device in the same round."
  )
  for work, logged in itertools.product((compute, wait), (False, True)):
    batches = work(args.batch_size, seconds)
    start = time.perf_counter()
    for _ in range(10):
      next(batches)
    host = (time.perf_counter() - start) / 10
    run = lambda name, batches=batches, logged=logged: steps_per_second(
      mesh, FEEDS[name], batches, logged, args.steps
    )
    speeds: dict[str, list[float]] = {name: [] for name in FEEDS}
    for name in FEEDS:
      run(name)  # compiles and warms up
    order = random.Random(0)
    for _ in range(args.rounds):
      for name in order.sample(list(FEEDS), len(FEEDS)):
        speeds[name].append(run(name))
    kind = "logged" if logged else "free"
    print(f"\n{work.__name__}, {kind} (host {1e3 * host:.1f} ms):\n")
    report(speeds)


if __name__ == "__main__":
  main()
