"""Workers in processes of their own, which tests kill, stop and cut off."""

from __future__ import annotations

from collections.abc import Callable
import itertools
import multiprocessing
import os
import pathlib
import signal
import threading
import time
from typing import Any

import relay as relay_lib
import worker_program

# Imports JAX and flaxshard once. What it forks starts in a moment.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["worker_program", "worker_loop_program"])


class Workers:
  """Processes that train together.

  Args:
    folder: A folder of all workers.
    num_workers: Number of workers.
    agn: Arguments of `fs.AGN`; the transport is "host".
    use_relay: Whether workers are connected through a relay.
    run: What a process does.
    **options: Further fields of `worker_program.Options`.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    num_workers: int,
    agn: dict[str, Any],
    *,
    use_relay: bool = False,
    run: Callable[..., None] = worker_program.run,
    **options: Any,
  ):
    self.relay = relay_lib.Relay(num_workers) if use_relay else None
    self._folder = folder
    self._run = run
    self._options = {
      "folder": str(folder),
      "num_workers": num_workers,
      "agn": {"transport": "host", **agn},
      **options,
    }
    self.workers = range(num_workers)
    self._processes: dict[int, Any] = {}
    self._threads: dict[int, list[threading.Thread]] = {
      k: [] for k in self.workers
    }
    self._rows: dict[int, list[dict[str, Any]]] = {k: [] for k in self.workers}
    self._logs: dict[int, list[bytes]] = {k: [] for k in self.workers}

  def __enter__(self) -> Workers:
    return self

  def __exit__(self, *error: object) -> None:
    for process in self._processes.values():
      process.kill()
      process.join()
    self._join_threads(*self.workers)
    if self.relay:
      self.relay.close()

  # -- Processes.

  def start(
    self, *workers: int, fault: worker_program.Fault | None = None
  ) -> Workers:
    """Starts the processes of workers: all, without an argument."""
    for worker in workers or self.workers:
      environment = self.relay.environment(worker) if self.relay else {}
      options = worker_program.Options(
        worker=worker, environment=environment, fault=fault, **self._options
      )
      rows, child_rows = _context.Pipe(duplex=False)
      log, child_log = _context.Pipe(duplex=False)
      process = _context.Process(
        target=self._run,
        args=(options, child_rows, child_log),
        daemon=True,
      )
      process.start()
      child_rows.close()
      child_log.close()
      self._processes[worker] = process
      if self.relay:
        self.relay.register(worker, process.pid)
      for read, source in ((self._read_rows, rows), (self._read_log, log)):
        thread = threading.Thread(
          target=read, args=(worker, source), daemon=True
        )
        thread.start()
        self._threads[worker].append(thread)
    return self

  def kill(self, *workers: int) -> float:
    """Kills processes with SIGKILL at once; returns the time."""
    now = time.monotonic()
    self.signal(signal.SIGKILL, *workers)
    for worker in workers:
      self._processes[worker].join()
    return now

  def signal(self, signum: int, *workers: int) -> None:
    """Sends a signal to processes."""
    for worker in workers:
      os.kill(self._processes[worker].pid, signum)

  def wait_for_death(self, worker: int, seconds: float = 30) -> float:
    """Waits until a process has been killed by itself; returns the time."""
    self._processes[worker].join(seconds)
    assert self._processes[worker].exitcode == -signal.SIGKILL, self.log(worker)
    return time.monotonic()

  def finish(self, *workers: int, seconds: float = 120) -> list[dict[str, Any]]:
    """Lets workers finish at the same step; returns their last rows.

    All must have the same center.
    """
    workers = workers or tuple(self.workers)
    period = self._options["agn"]["communication_period"]
    last = max(self.step(worker) for worker in workers)
    stop_at = (last // period + 3) * period
    path = self._folder / "stop_at"
    path.with_suffix(".new").write_text(str(stop_at))
    path.with_suffix(".new").rename(path)
    rows = self.wait_for_ends(*workers, seconds=seconds)
    path.unlink()
    return rows

  def wait_for_ends(
    self, *workers: int, seconds: float = 120
  ) -> list[dict[str, Any]]:
    """Waits until workers have ended with one center; returns the last rows."""
    end = time.monotonic() + seconds
    for worker in workers:
      process = self._processes[worker]
      process.join(max(end - time.monotonic(), 0))
      assert process.exitcode == 0, self.report(f"{worker} does not end")
    self._join_threads(*workers)
    rows = [self._rows[worker][-1] for worker in workers]
    assert [row["kind"] for row in rows] == ["end"] * len(rows)
    assert len({row["center"] for row in rows}) == 1, self.report("centers")
    return rows

  def exit_code(self, worker: int, seconds: float = 10) -> int:
    """Waits until a process has ended; returns its exit code."""
    self._processes[worker].join(seconds)
    code = self._processes[worker].exitcode
    assert code is not None, self.report(f"{worker} does not end")
    self._join_threads(worker)
    return code

  def _join_threads(self, *workers: int) -> None:
    """Waits for all that ended processes have sent."""
    for worker in workers:
      for thread in self._threads[worker]:
        thread.join(10)

  # -- What has happened.

  def rows(
    self, worker: int, kind: str, since: float = 0
  ) -> list[dict[str, Any]]:
    """Returns the rows of a kind that a worker has sent since a time."""
    rows = list(self._rows[worker])
    return [x for x in rows if x["kind"] == kind and x["time"] >= since]

  def commits(self, worker: int, since: float = 0) -> list[dict[str, Any]]:
    """Returns the records of a worker's commits since a time."""
    return self.rows(worker, "commit", since)

  def step(self, worker: int) -> int:
    """Returns the last step of a worker."""
    rows = [x for x in list(self._rows[worker]) if "step" in x]
    return rows[-1]["step"] if rows else 0

  def longest_pause(self, worker: int, since: float) -> float:
    """Returns the longest time between two steps of a worker since a time."""
    times = [x["time"] for x in self.rows(worker, "step")]
    before = [t for t in times if t < since][-1:]
    times = before + [t for t in times if t >= since]
    assert len(times) > 1, self.report(f"{worker} takes no step")
    return max(b - a for a, b in itertools.pairwise(times))

  def wait(
    self, condition: Callable[[], Any], what: str, seconds: float = 90
  ) -> Any:
    """Waits until a condition holds; returns its value."""
    end = time.monotonic() + seconds
    while not (value := condition()):
      codes = {x.exitcode for x in self._processes.values()}
      has_failed = codes - {None, 0, -signal.SIGKILL}
      assert not has_failed, self.report("a worker has failed")
      assert time.monotonic() < end, self.report(f"not {what} in {seconds} s")
      time.sleep(0.02)
    return value

  def wait_for_commits(
    self, count: int, *workers: int, since: float = 0, **fields: Any
  ) -> None:
    """Waits until workers have made a number of commits since a time.

    Args:
      count: The number.
      *workers: The workers: all, without an argument.
      since: The time.
      **fields: What fields of the records must be, such as `workers`.
    """

    def made() -> bool:
      return all(
        sum(
          all(x[name] == value for name, value in fields.items())
          for x in self.commits(worker, since)
        )
        >= count
        for worker in workers or self.workers
      )

    self.wait(made, f"{count} commits {fields}")

  def log(self, worker: int) -> str:
    """Returns what a worker has printed."""
    return b"".join(self._logs[worker]).decode()

  def report(self, what: str) -> str:
    """Returns a message with the last rows and lines of all workers."""
    parts = [what]
    for worker in self.workers:
      process = self._processes.get(worker)
      code = process and process.exitcode
      steps = self.rows(worker, "step")
      parts.append(
        f"-- worker {worker}, exit code {code}, {len(steps)} steps, the last "
        f"{time.monotonic() - steps[-1]['time'] if steps else 0:.1f} s ago"
      )
      parts += [str(x) for x in self._rows[worker] if x["kind"] != "step"][-4:]
      parts.append(self.log(worker)[-3000:])
    return "\n".join(parts)

  def _read_rows(self, worker: int, source: Any) -> None:
    try:
      while True:
        self._rows[worker].append(source.recv())
    except (EOFError, OSError):
      pass

  def _read_log(self, worker: int, source: Any) -> None:
    while data := os.read(source.fileno(), 1 << 16):
      self._logs[worker].append(data)


Fault = worker_program.Fault
