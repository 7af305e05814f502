"""One process of `links.py`: trains, and writes when it was at which step.

  python benchmarks/links_worker.py FOLDER RANK

The folder has `run.json`, the fields of `Run`, and the data of `links_data.py`.
The process writes `result-RANK.json` there.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from typing import Any

import jax
from jax.experimental import multihost_utils
import links_data
import links_methods
import optax
import virtual_network

import flaxshard as fs

_PORT = 5000
_STOP_FILE = "last_step"


@dataclasses.dataclass(frozen=True)
class Run:
  """A run of all processes.

  Attributes:
    task: Name of the config.
    method: Name of the method; see `links_methods.METHODS`.
    processes: Number of processes.
    steps: Number of steps, if there is time for them.
    schedule_steps: Number of steps of a whole run, for schedules.
    time_limit: Seconds after which the run ends, at the end of a period.
    evaluate_every: Steps between two evaluations, in multiples of periods.
  """

  task: str
  method: str
  processes: int
  steps: int
  schedule_steps: int
  time_limit: float
  evaluate_every: int


def main() -> None:
  """Trains in one process."""
  folder, rank = sys.argv[1], int(sys.argv[2])
  with open(os.path.join(folder, "run.json")) as file:
    run = Run(**json.load(file))
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", 1)
  method = links_methods.METHODS[run.method]
  # Of the runs of a task on several links, one compiles.
  jax.config.update("jax_compilation_cache_dir", os.path.join(folder, "cache"))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
  is_one_world = not (method.is_host or method.is_alone)
  if is_one_world:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    coordinator = f"{virtual_network.address(0)}:{_PORT}"
    jax.distributed.initialize(coordinator, run.processes, rank)
  result = train(run, method, folder, rank)
  with open(os.path.join(folder, f"result-{rank}.json"), "w") as file:
    json.dump(result, file)
  if is_one_world:
    # The process of the coordination service ends last.
    multihost_utils.sync_global_devices("end")
  sys.stdout.flush()
  # The regular exit waits for the other processes once more.
  os._exit(0)


def train(
  run: Run, method: links_methods.Method, folder: str, rank: int
) -> dict[str, Any]:
  """Trains until the last step, or the time is over.

  Returns:
    The seconds since the start and the bytes sent after each step; and for
    process 0, `[step, loss]` of each evaluation.
  """
  data = links_data.load(run.task, folder)
  strategy = fs.Strategy()
  state = fs.create_train_state(
    data.model,
    jax.random.key(0),
    data.inputs[0],
    links_methods.optimizer(
      links_data.read_config(run.task), run.task, method, run.schedule_steps
    ),
    wrappers=[method.wrapper()],
    strategy=strategy,
  )

  def train_step(state: Any, batch: Any) -> Any:
    def loss_fn(params: Any) -> jax.Array:
      logits = state.apply_fn({"params": params}, batch["inputs"])
      return optax.softmax_cross_entropy_with_integer_labels(
        logits, batch["labels"]
      ).mean()

    return state.minimize(loss_fn)

  def read_batch(step: int) -> Any:
    rows = data.rows(step, rank, run.processes)
    return strategy.shard_batch(rows)

  step_fn = strategy.jit(train_step, donate_argnums=0)
  batch = read_batch(1)
  step_fn.lower(state, batch).compile()
  worker = None
  if method.is_host:
    address = f"{virtual_network.address(rank)}:{_PORT}"
    os.environ["FLAXSHARD_WORKER_ADDRESS"] = address
    worker = fs.Worker(os.path.join(folder, "workers"), rank, run.processes)
    state = worker.start(state)
  elif not method.is_alone:
    # Connects the processes.
    multihost_utils.sync_global_devices("start")
  _wait_for_all(folder, rank, run.processes)

  evaluate_every = max(run.evaluate_every, method.period)
  evaluate_every -= evaluate_every % method.period
  seconds, sent, snapshots = [], [], []
  commits: list[dict[str, Any]] = []
  last_step, stop_file = run.steps, os.path.join(folder, _STOP_FILE)
  first_sent = sent_bytes()
  start = time.perf_counter()
  step = 0
  while step < last_step:
    step += 1
    state, losses = step_fn(state, batch)
    batch = read_batch(min(step + 1, run.steps))
    # As flaxshard's loop does on CPUs.
    jax.block_until_ready(losses)
    if worker is not None:
      state = worker.commit(state)
      commits += map(dataclasses.asdict, worker.records())
    jax.block_until_ready(state)
    seconds.append(time.perf_counter() - start)
    sent.append(sent_bytes() - first_sent)
    if rank == 0 and step % evaluate_every == 0:
      snapshots.append((step, jax.device_get(state.params)))
    if rank == 0 and step == max(method.period, 2):
      planned = _plan_steps(run, method, step, seconds[-1])
      with open(stop_file + ".new", "w") as file:
        file.write(str(planned))
      os.replace(stop_file + ".new", stop_file)
    if last_step == run.steps and os.path.exists(stop_file):
      with open(stop_file) as file:
        last_step = int(file.read())
  result = {"seconds": seconds, "sent": sent, "cpu": time.process_time()}
  if worker is not None:
    state = worker.finish(state)
    commits += map(dataclasses.asdict, worker.records())
    result["commits"] = commits
    worker.close()
  if rank == 0:
    result["losses"] = evaluate(data, snapshots)
    result["parameters"] = sum(x.size for x in jax.tree.leaves(state.params))
  return result


def _wait_for_all(folder: str, rank: int, processes: int) -> None:
  """Waits until all processes are ready."""
  names = [os.path.join(folder, f"ready-{k}") for k in range(processes)]
  with open(names[rank], "w"):
    pass
  while not all(map(os.path.exists, names)):
    time.sleep(0.01)


def _plan_steps(
  run: Run, method: links_methods.Method, step: int, seconds: float
) -> int:
  """Returns at which step all processes are to end.

  Args:
    run: The run.
    method: The method.
    step: The step that process 0 has taken.
    seconds: The seconds since the start.
  """
  affordable = int(run.time_limit * step / seconds)
  # Others may be ahead of process 0, by less than a period.
  least = step + max(method.period, 2)
  if method.is_alone:
    # They do not wait for each other at all.
    least = 5 * step
  planned = max(affordable, least)
  return min(planned - planned % method.period, run.steps)


def evaluate(
  data: links_data.Data, snapshots: list[tuple[int, Any]]
) -> list[tuple[int, float]]:
  """Returns the held-out loss of the center after some steps."""
  device = jax.local_devices()[0]

  @jax.jit
  def mean_loss(params: Any, inputs: Any, labels: Any) -> jax.Array:
    logits = data.model.apply({"params": params}, inputs)
    return optax.softmax_cross_entropy_with_integer_labels(
      logits, labels
    ).mean()

  arguments = jax.device_put((data.eval_inputs, data.eval_labels), device)
  return [
    (step, float(mean_loss(jax.device_put(params, device), *arguments)))
    for step, params in snapshots
  ]


def sent_bytes() -> int:
  """Returns the bytes that this host has sent to others."""
  with open("/proc/self/net/dev") as file:
    for line in file:
      name, _, values = line.partition(":")
      if name.strip() == "tun0":
        return int(values.split()[8])
  return 0


if __name__ == "__main__":
  main()
