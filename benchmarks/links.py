"""Trains in four processes over slow links: data parallelism beside AGN.

Each process is on a host of its own, with a link of 1 Gbit/s, 100 Mbit/s or 10
Mbit/s and 10 ms from host to host; see `virtual_network.py`. Linux only.

  python benchmarks/links.py --check
  python benchmarks/links.py
  python benchmarks/links.py --tasks lm_text --methods "mean, 10"
  python benchmarks/links.py --report

First each method trains a whole run on a network without limits, for its losses
after each step. On the links it trains about `--seconds`, for the time and the
bytes of a step. Whoever waits for the others has the same losses after the same
step on every network, so the time to a loss is its steps times that.

Results are added to the file of `--results`. Of runs of the same task, method
and link, the last one counts. Table and picture are made from all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from typing import Any

import links_check
from links_methods import METHODS
import links_report
import virtual_network

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_HOSTS = 4
_DELAY = 0.01  # seconds from host to host
_RATES = {"1gbit": 1e9, "100mbit": 1e8, "10mbit": 1e7}
_ALL_LINKS = (links_report.UNLIMITED, *links_report.LINKS)
_WHOLE_RUN = 900.0  # seconds that a run for losses may take

# Steps of a whole run of data parallelism, of a whole run of AGN, and how often
# to evaluate.
_STEPS = {"digits": (200, 360, 10), "lm_text": (160, 240, 10)}


def main() -> None:
  """Reads the flags, runs, reports."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--check", action="store_true", help="measure the links")
  parser.add_argument("--report", action="store_true", help="run nothing")
  parser.add_argument("--links", nargs="+", default=list(_ALL_LINKS))
  parser.add_argument("--tasks", nargs="+", default=list(_STEPS))
  parser.add_argument("--methods", nargs="+", default=list(METHODS))
  parser.add_argument(
    "--steps",
    type=int,
    nargs=2,
    help="of a whole run of data parallelism, and of AGN",
  )
  parser.add_argument(
    "--seconds", type=float, default=12, help="of a run on a link"
  )
  parser.add_argument("--results", default="/tmp/flaxshard_links.jsonl")
  parser.add_argument("--plot", default="", help="path of a PNG")
  args = parser.parse_args()
  unknown = {*args.links} - {*_ALL_LINKS} | {*args.tasks} - {*_STEPS}
  unknown |= {*args.methods} - {*METHODS}
  if unknown:
    parser.error(f"unknown: {', '.join(sorted(unknown))}")
  if args.check:
    check(args)
  if not args.report and not args.check:
    run_all(args)
  if not args.check:
    links_report.report(args.results, args.plot)


def check(args: argparse.Namespace) -> None:
  """Prints what the links carry, idle and beside busy programs."""
  print(
    "| link | hosts compute | round trip, ms | Mbit/s of each host, least | "
    "router, cores |\n|---|---|--:|--:|--:|"
  )
  for name in _RATES:
    for busy in (False, True):
      found = links_check.check(_HOSTS, _RATES[name], _DELAY, 4.0, busy)
      print(
        f"| {name} | {'yes' if busy else 'no'} "
        f"| {found['round_trip_ms']:.1f} | {min(found['mbit']):.1f} "
        f"| {found['router']:.2f} |",
        flush=True,
      )


def run_all(args: argparse.Namespace) -> None:
  """Runs all methods on all links, and adds the results to the file."""
  for task in args.tasks:
    *default_steps, evaluate_every = _STEPS[task]
    all_steps = args.steps or default_steps
    with tempfile.TemporaryDirectory() as folder:
      # In another process: this one must not start JAX's threads.
      script = os.path.join(_FOLDER, "links_data.py")
      subprocess.run(
        [sys.executable, script, task, folder, str(max(all_steps))], check=True
      )
      for link in args.links:
        for method in args.methods:
          is_whole = link == links_report.UNLIMITED
          is_alone = METHODS[method].is_alone
          if is_whole and METHODS[method].same_losses_as:
            continue
          if not is_whole and (is_alone or METHODS[method].same_seconds_as):
            continue
          start = time.time()
          steps = all_steps[METHODS[method].period > 1]
          run = {
            "task": task,
            "method": method,
            "processes": _HOSTS,
            "steps": steps,
            "schedule_steps": steps,
            "time_limit": (
              _WHOLE_RUN if is_whole and not is_alone else args.seconds
            ),
            "evaluate_every": evaluate_every,
          }
          result = run_once(run, link, os.path.join(folder, "data.npz"))
          result["started"] = start
          with open(args.results, "a") as file:
            file.write(json.dumps(result) + "\n")
          print(
            f"{task}, {link}, {method}: {result.get('error', '')}"
            f"{len(result.get('seconds', []))} steps in "
            f"{(result.get('seconds') or [0])[-1]:.1f} s; "
            f"{time.time() - start:.1f} s in all",
            flush=True,
          )


def _connect(hosts: int, link: str) -> virtual_network.Network:
  if link == links_report.UNLIMITED:
    return virtual_network.Network(hosts, 0, 0)
  return virtual_network.Network(hosts, _RATES[link], _DELAY)


def run_once(run: dict[str, Any], link: str, data: str) -> dict[str, Any]:
  """Runs the processes of one run.

  Args:
    run: The fields of `links_worker.Run`.
    link: Name of the links.
    data: The file that `links_data.write` has written.

  Returns:
    The run, the results of process 0, and the bytes that were sent.
  """
  script = os.path.join(_FOLDER, "links_worker.py")
  result: dict[str, Any] = {
    **run,
    "link": link,
    "python": platform.python_version(),
    "cores": os.cpu_count(),
    "load": os.getloadavg()[0],
  }
  with (
    tempfile.TemporaryDirectory() as folder,
    _connect(run["processes"], link) as network,
  ):
    cache = os.path.join(os.path.dirname(data), "cache")
    os.makedirs(cache, exist_ok=True)
    os.symlink(cache, os.path.join(folder, "cache"))
    os.symlink(data, os.path.join(folder, "data.npz"))
    with open(os.path.join(folder, "run.json"), "w") as file:
      json.dump(run, file)
    logs = [
      open(os.path.join(folder, f"log-{k}"), "w+")
      for k in range(run["processes"])
    ]
    processes = [
      network.start(
        k,
        [sys.executable, script, folder, str(k)],
        stdout=log,
        stderr=subprocess.STDOUT,
      )
      for k, log in enumerate(logs)
    ]
    # Twice the time of the run, and time to start beside other programs.
    end = time.time() + 2 * run["time_limit"] + 600
    codes: list[int | None] = [None]
    while None in codes and not any(codes) and time.time() < end:
      time.sleep(0.2)
      codes = [process.poll() for process in processes]
      if any(codes):
        time.sleep(1)  # for the messages of the others
    if codes != [0] * len(codes):
      # The others often only miss the one that has failed.
      failed = next((k for k, code in enumerate(codes) if code), 0)
      logs[failed].seek(0)
      print(logs[failed].read()[-3000:], file=sys.stderr)
      result["error"] = f"exit codes {codes}; "
    else:
      with open(os.path.join(folder, "result-0.json")) as file:
        result |= json.load(file)
    result |= {
      "network_bytes": network.sent,
      "dropped": network.dropped,
      "router_seconds": network.busy,
    }
    for log in logs:
      log.close()
  return result


if __name__ == "__main__":
  main()
