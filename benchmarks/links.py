"""Trains over slow links: data parallelism beside AGN in a store.

Each worker is on a host of its own, with a link of 100 Mbit/s or 10 Mbit/s and
10 ms from host to host; see `virtual_network.py`. A further host, on a fast
link, has a bucket server and perhaps a synchronizer. Linux only.

  python benchmarks/links.py
  python benchmarks/links.py --methods "store, int8" --links 100mbit
  python benchmarks/links.py --workers 8 --methods store --links unlimited
  python benchmarks/links.py --report

First each method trains a whole run on a network without limits, for its losses
after each step. On the links it trains about `--seconds`, for the time and the
bytes of a step. Whoever waits for the others has the same losses after the same
step on every network, so the time to a loss is its steps times that.

Results are added to the file of `--results`. Of runs of the same method, link
and number of workers, the last one counts in the table.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
from jax.experimental import multihost_utils
import jax.flatten_util
import numpy as np
import optax
import tensorstore as ts
import virtual_network

import flaxshard as fs
from flaxshard import data as data_lib
from flaxshard import models
from flaxshard.center import heads
from flaxshard.center import merge
from flaxshard.center.store import Objects
from flaxshard.core.policy import Policy
from flaxshard.replicas import context as replica_context
from flaxshard.wrappers import base

_DELAY = 0.01  # seconds from host to host
_RATES = {"unlimited": 0.0, "100mbit": 1e8, "10mbit": 1e7}
_STEPS = {"data parallel": 160, "store": 240}  # of a whole run
_EVALUATE_EVERY = 10  # steps
_EVAL_EXAMPLES = 512  # held-out windows
_PERIOD = 10
_PORT = 5000
_BUCKET = "bucket"
_DIRECTORY = f"gs://{_BUCKET}/run"
_SIGN_OF_LIFE = 2.5  # seconds between two of them


class PackedMean(base.Base):
  """Averages gradients over the replicas in one array.

  gloo reduces one array after another, and each waits for several round trips.
  `fs.CrossShard("mean")` leaves the gradients as they are.
  """

  reduces = "self"

  def apply(
    self, state: Any, target: base.Target, grads: Any, next: base.Next
  ) -> tuple[base.Target, Any]:
    """Calls `next` with the averaged gradients."""
    packed, unpack = jax.flatten_util.ravel_pytree(grads)
    reduced = replica_context.reduce_gradients("mean", {"packed": packed})
    return next(target, unpack(reduced["packed"])), state


@dataclasses.dataclass(frozen=True)
class Method:
  """A way of training.

  Attributes:
    wrapper: Returns the wrapper.
    store: Whether commits go through the bucket. Else JAX connects the workers.
    synchronizer: Whether one runs beside the bucket.
    same_losses_as: The method that has the same losses after each step.
  """

  wrapper: Callable[[], Any]
  store: bool = False
  synchronizer: bool = False
  same_losses_as: str = ""

  @property
  def period(self) -> int:
    """Steps between commits."""
    return _PERIOD if self.store else 1


def _local_sgd(synchronizer: bool = True, **options: Any) -> Method:
  """Commits the change of the parameters: the center becomes their mean."""
  store = fs.Store(deadline=300.0, **options)
  return Method(
    lambda: fs.AGN(
      _PERIOD,
      "mean",
      outer_tx=optax.sgd(1.0),
      commit_delta=True,
      transport=store,
    ),
    store=True,
    synchronizer=synchronizer,
    same_losses_as="" if synchronizer else "store",
  )


METHODS: dict[str, Method] = {
  # A whole run of it takes half an hour.
  "data parallel": Method(
    lambda: fs.CrossShard("mean"), same_losses_as="data parallel, packed"
  ),
  "data parallel, packed": Method(PackedMean),
  "store": _local_sgd(),
  "store, int8": _local_sgd(commit_dtype="int8"),
  "store, 4 fragments": _local_sgd(fragments=4),
  "store, delay 5": _local_sgd(delay=5),
  "store, delay 5, blend": _local_sgd(delay=5, blend=0.5),
  "store, delay 5, int8": _local_sgd(delay=5, commit_dtype="int8"),
  "store, no synchronizer": _local_sgd(False),
  "store, no synchronizer, int8": dataclasses.replace(
    _local_sgd(False, commit_dtype="int8"), same_losses_as="store, int8"
  ),
  "store, no synchronizer, 4 fragments": dataclasses.replace(
    _local_sgd(False, fragments=4), same_losses_as="store, 4 fragments"
  ),
}


def main() -> None:
  """Reads the flags, runs, reports."""
  if sys.argv[1:2] == ["--host"]:
    run_host(pathlib.Path(sys.argv[2]), int(sys.argv[3]))
    return
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--report", action="store_true", help="run nothing")
  parser.add_argument(
    "--links", nargs="+", default=list(_RATES), choices=_RATES
  )
  parser.add_argument(
    "--methods", nargs="+", default=list(METHODS), choices=METHODS
  )
  parser.add_argument("--workers", type=int, default=4)
  parser.add_argument(
    "--seconds", type=float, default=15, help="of a run on a link"
  )
  parser.add_argument("--results", default="/tmp/flaxshard_links.jsonl")
  args = parser.parse_args()
  for link in () if args.report else args.links:
    for method in args.methods:
      is_whole = link == "unlimited"
      if is_whole and METHODS[method].same_losses_as:
        continue
      seconds = 900.0 if is_whole else args.seconds
      result = run_once(method, link, args.workers, seconds)
      with open(args.results, "a") as file:
        file.write(json.dumps(result) + "\n")
      print(
        f"{method}, {link}, {args.workers} workers: {result['steps']} steps, "
        f"{1e3 * per_step(result, 'seconds'):,.0f} ms each",
        flush=True,
      )
  report(args.results)


def run_once(
  method: str, link: str, workers: int, seconds: float
) -> dict[str, Any]:
  """Runs the hosts of one run.

  Args:
    method: Name of the method.
    link: Name of the links.
    workers: Number of workers.
    seconds: How long the run may train; it takes two periods at least.

  Returns:
    The run, and the results of all workers.
  """
  kind = "store" if METHODS[method].store else "data parallel"
  run = {
    "method": method,
    "link": link,
    "workers": workers,
    "steps": _STEPS[kind],
    "time_limit": seconds,
    "load": os.getloadavg()[0],
  }
  # The host of the bucket comes last.
  rates = [_RATES[link]] * workers + [0.0] * METHODS[method].store
  with (
    tempfile.TemporaryDirectory() as name,
    virtual_network.Network(rates, _DELAY) as network,
  ):
    folder = pathlib.Path(name)
    (folder / "run.json").write_text(json.dumps(run))
    command = [sys.executable, __file__, "--host", name]
    logs = [open(folder / f"log-{k}", "w+") for k in range(len(rates))]
    hosts = [
      network.start(k, [*command, str(k)], stdout=log, stderr=log)
      for k, log in enumerate(logs)
    ]
    # Twice the time of the run, and time to start beside other programs.
    end = time.time() + 2 * seconds + 600
    while any(host.poll() is None for host in hosts[:workers]):
      failed = next((k for k, host in enumerate(hosts) if host.poll()), None)
      if failed is not None or time.time() > end:
        logs[failed or 0].seek(0)
        raise RuntimeError(f"{method}, {link}: {logs[failed or 0].read()}")
      time.sleep(0.2)
    found = [
      json.loads((folder / f"result-{k}.json").read_text())
      for k in range(workers)
    ]
    for log in logs:
      log.close()
  return {
    **run,
    "steps": len(found[0]["seconds"]),
    "hosts": found,
    "dropped": network.dropped,
    "router_seconds": network.busy,
  }


def run_host(folder: pathlib.Path, host: int) -> None:
  """Runs a worker, or the bucket's host."""
  run = json.loads((folder / "run.json").read_text())
  method = METHODS[run["method"]]
  if host == run["workers"]:
    serve_bucket(folder, host, method)
    return
  if method.store:
    use_bucket(folder)
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", 1)
  # One run compiles for the next ones.
  cache = pathlib.Path(tempfile.gettempdir(), "flaxshard_links_cache")
  jax.config.update("jax_compilation_cache_dir", str(cache))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
  if not method.store:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
      f"{virtual_network.address(0)}:{_PORT}", run["workers"], host
    )
  result = train(run, method, folder, host)
  (folder / f"result-{host}.json").write_text(json.dumps(result))
  if not method.store:
    # The process of the coordination service ends last.
    multihost_utils.sync_global_devices("end")
  sys.stdout.flush()
  # The regular exit waits for the other processes once more.
  os._exit(0)


def serve_bucket(folder: pathlib.Path, host: int, method: Method) -> None:
  """Serves the bucket, and merges beside it, until it is killed."""
  program = pathlib.Path(__file__).parents[1] / "tests" / "gcs_server.py"
  address = virtual_network.address(host)
  # The server ends with this process.
  command = ["setpriv", "--pdeathsig", "KILL", sys.executable, str(program)]
  server = subprocess.Popen(
    [*command, _BUCKET, address], stdout=subprocess.PIPE, text=True
  )
  assert server.stdout
  port = int(server.stdout.readline())
  (folder / "new").write_text(f"http://{address}:{port}")
  (folder / "new").replace(folder / "bucket")
  use_bucket(folder)
  if method.synchronizer:
    # What `flaxshard --synchronize` does for a run with a config.
    objects = Objects(f"{_DIRECTORY}/center")
    while not heads.read(objects, has_begun=False).heads:
      time.sleep(0.1)
    state = create_state(method, *load(1)[::2])
    merge.synchronizer(objects, state)
  server.wait()


def use_bucket(folder: pathlib.Path) -> None:
  """Waits for the bucket, and sets the environment to use it."""
  while not (folder / "bucket").exists():
    time.sleep(0.1)
  os.environ["TENSORSTORE_GCS_HTTP_URL"] = (folder / "bucket").read_text()
  os.environ["STORAGE_EMULATOR_HOST"] = (folder / "bucket").read_text()
  os.environ["GOOGLE_AUTH_TOKEN_FOR_TESTING"] = "token"


def train(
  run: dict[str, Any], method: Method, folder: pathlib.Path, rank: int
) -> dict[str, Any]:
  """Trains until the last step, or the time is over.

  Returns:
    The seconds, and the bytes sent and received, at each step since the start;
    and for worker 0, `[step, loss]` of each evaluation.
  """
  batches, eval_batch, model = load(run["steps"])
  strategy = fs.Strategy()
  state = create_state(method, batches, model, strategy)

  def train_step(state: Any, batch: Any) -> Any:
    return state.minimize(
      lambda params: mean_loss(state.apply_fn, params, batch)
    )

  def read_batch(step: int) -> Any:
    size = len(batches[0]["inputs"]) // run["workers"]
    rows = slice(rank * size, (rank + 1) * size)
    batch = batches[min(step, len(batches) - 1)]
    return strategy.shard_batch({k: v[rows] for k, v in batch.items()})

  step_fn = strategy.jit(train_step, donate_argnums=0)
  batch = read_batch(0)
  step_fn.lower(state, batch).compile()
  worker = None
  if method.store:
    worker = fs.Worker(_DIRECTORY, rank, run["workers"])
    state = worker.start(state)
  else:
    # Connects the processes.
    multihost_utils.sync_global_devices("start")
  if method.synchronizer:
    wait_for_synchronizer()
  (folder / f"ready-{rank}").touch()
  while len(list(folder.glob("ready-*"))) < run["workers"]:
    time.sleep(0.01)

  seconds, traffic, snapshots = [], [], []
  last_step, stop_file = run["steps"], folder / "last_step"
  first_traffic, first_requests = read_traffic(), count_requests()
  start = time.perf_counter()
  step = 0
  while step < last_step:
    state, losses = step_fn(state, batch)
    step += 1
    batch = read_batch(step)
    # As flaxshard's loop does on CPUs.
    jax.block_until_ready(losses)
    before = time.perf_counter()
    if worker is not None:
      state = worker.commit(state)
    jax.block_until_ready(state)
    now = time.perf_counter()
    seconds.append((now - start, now - before))
    traffic.append(np.subtract(read_traffic(), first_traffic).tolist())
    if rank == 0 and step % _EVALUATE_EVERY == 0:
      snapshots.append((step, jax.device_get(state.params)))
    if rank == 0 and step == max(method.period, 2):
      planned = plan_steps(run, method.period, step, seconds[-1][0])
      stop_file.with_suffix(".new").write_text(str(planned))
      stop_file.with_suffix(".new").replace(stop_file)
    if last_step == run["steps"] and stop_file.exists():
      last_step = int(stop_file.read_text())
  result = {
    "seconds": [a for a, _ in seconds],
    "commit_seconds": [b for _, b in seconds],
    "sent": [a for a, _ in traffic],
    "received": [b for _, b in traffic],
    "requests": count_requests() - first_requests,
  }
  if worker is not None:
    start = time.perf_counter()
    state = worker.finish(state)
    result["finish"] = time.perf_counter() - start
    worker.close()
  if rank == 0:
    loss_fn = jax.jit(lambda params: mean_loss(model.apply, params, eval_batch))
    device = jax.local_devices()[0]
    result["losses"] = [
      (step, float(loss_fn(jax.device_put(params, device))))
      for step, params in snapshots
    ]
  return result


def wait_for_synchronizer() -> None:
  """Waits until the synchronizer is there, and all workers have seen it."""
  objects = Objects(f"{_DIRECTORY}/center")
  while objects.read("worker/synchronizer")[0] is None:
    time.sleep(0.1)
  time.sleep(2 * _SIGN_OF_LIFE)


def create_state(
  method: Method, batches: list[Any], model: Any, strategy: Any = None
) -> fs.TrainState:
  """Returns a new state of lm_text."""
  return fs.create_train_state(
    model,
    jax.random.key(0),
    batches[0]["inputs"],
    optimizer(_STEPS["store" if method.store else "data parallel"]),
    wrappers=[method.wrapper()],
    strategy=strategy,
  )


def load(steps: int) -> tuple[list[Any], Any, Any]:
  """Returns the batches, the held-out examples and the model of lm_text."""
  config = fs.config.check(fs.config.read("lm_text"))
  task, shapes, splits = fs.tasks.load(config)
  assert splits is not None
  iterator = data_lib.train_iterator(
    splits,
    seed=config.seed,
    collate=task.collate,
    batch_size=config.batch_size,
  )
  batches = [
    {"inputs": batch["inputs"], "labels": batch["labels"]}
    for batch, _ in zip(iterator, range(steps), strict=False)
  ]
  held_out = splits.eval
  # Evenly over all of them.
  chosen = np.linspace(0, len(held_out) - 1, _EVAL_EXAMPLES).astype(int)
  model = models.create(
    config.model,
    num_classes=shapes.num_classes,
    policy=Policy("float32"),
  )
  return batches, task.collate([held_out[int(i)] for i in chosen]), model


def optimizer(steps: int) -> optax.GradientTransformation:
  """Returns that of lm_text, with its schedule over so many steps."""
  config = fs.config.read("lm_text")
  warmup = config.schedule.warmup_steps * steps // config.num_train_steps
  rate = config.learning_rate
  schedule = optax.warmup_cosine_decay_schedule(0, rate, warmup, steps)
  return optax.chain(
    optax.clip_by_global_norm(config.optimizer.clip_by_global_norm),
    optax.adamw(schedule, weight_decay=config.optimizer.weight_decay),
  )


def mean_loss(apply: Any, params: Any, batch: Any) -> jax.Array:
  """Returns the mean loss of a batch."""
  return optax.softmax_cross_entropy_with_integer_labels(
    apply({"params": params}, batch["inputs"]), batch["labels"]
  ).mean()


def plan_steps(
  run: dict[str, Any], period: int, step: int, seconds: float
) -> int:
  """Returns at which step all workers are to end, two periods on at least."""
  affordable = int(run["time_limit"] * step / seconds)
  # Others may be ahead of worker 0, by less than a period.
  planned = max(affordable, step + 2 * max(period, 2))
  return min(planned - planned % period, run["steps"])


def read_traffic() -> tuple[int, int]:
  """Returns the bytes that this host has sent and received, with headers."""
  for line in pathlib.Path("/proc/self/net/dev").read_text().splitlines():
    name, _, values = line.partition(":")
    if name.strip() == "tun0":
      return int(values.split()[8]), int(values.split()[0])
  return 0, 0


def count_requests() -> int:
  """Returns the number of HTTP requests of this process to the bucket."""
  metrics = ts.experimental_collect_matching_metrics(
    "/tensorstore/http/request_started"
  )
  return sum(int(v["value"]) for m in metrics for v in m["values"])


def report(path: str) -> None:
  """Prints the tables of the results in a file."""
  results: dict[tuple[str, str, int], dict[str, Any]] = {}
  for line in pathlib.Path(path).read_text().splitlines():
    result = json.loads(line)
    results[result["method"], result["link"], result["workers"]] = result

  def losses(method: str) -> list[tuple[int, float]]:
    method = METHODS[method].same_losses_as or method
    whole = results.get((method, "unlimited", 4))
    return whole["hosts"][0]["losses"] if whole else []

  target = next((loss for _, loss in losses("data parallel")[-1:]), 0.0)
  print(
    f"\nSeconds to a held-out loss of {target:.3f}:\n\n"
    "| method | link | workers | ms a step | steps to loss | s to loss "
    "| s of a commit | requests a period | kB up a period, each "
    "| kB down a period, each |\n" + "| --- " * 2 + "| --: " * 8 + "|"
  )
  for (method, link, workers), result in results.items():
    steps = next((s for s, x in losses(method) if x <= target), None)
    seconds = per_step(result, "seconds")
    period = METHODS[method].period
    waits = result["hosts"][0]["commit_seconds"][2 * period - 1 :: period]
    reached = f"{steps * seconds:,.1f}" if steps and workers == 4 else "-"
    kilobytes = [
      ", ".join(
        f"{per_step(result, field, k) * period / 1e3:,.0f}"
        for k in range(workers)
      )
      for field in ("sent", "received")
    ]
    requests = result["hosts"][0]["requests"] * period / result["steps"]
    print(
      f"| {method} | {link} | {workers} | {1e3 * seconds:,.0f} "
      f"| {steps or '-'} | {reached} | {statistics.median(waits):.2f} "
      f"| {requests:.0f} | {' | '.join(kilobytes)} |"
    )


def per_step(result: dict[str, Any], field: str, host: int = 0) -> float:
  """Returns the mean of a step over whole periods but the first."""
  values = result["hosts"][host][field]
  period = max(METHODS[result["method"]].period, 2)
  last = len(values) - len(values) % period
  return (values[last - 1] - values[period - 1]) / (last - period)


if __name__ == "__main__":
  main()
