"""Prints how long `import flaxshard` and importing its dependencies take.

Each import is in a fresh process, in turn, and is timed inside the process.

  python benchmarks/import_time.py
"""

import argparse
import statistics
import subprocess
import sys

_DEPENDENCIES = (
  "import numpy, jax, flax.linen, flax.nnx, flax.training.train_state, optax"
)


def seconds(statement: str) -> float:
  """Returns the seconds that a statement takes in a fresh process."""
  code = (
    "import time; t = time.perf_counter()\n"
    f"{statement}\nprint(time.perf_counter() - t)"
  )
  output = subprocess.run(
    [sys.executable, "-c", code], check=True, capture_output=True, text=True
  )
  return float(output.stdout)


def main() -> None:
  """Prints both medians, and the median of the ratios of all runs."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--runs", type=int, default=9)
  runs = parser.parse_args().runs
  pairs = [
    (seconds(_DEPENDENCIES), seconds("import flaxshard"))
    for _ in range(runs + 1)
  ][1:]  # the first pair reads the files from the disk
  print(f"dependencies: {statistics.median(p[0] for p in pairs):.2f} s")
  print(f"flaxshard:    {statistics.median(p[1] for p in pairs):.2f} s")
  print(f"ratio:        {statistics.median(b / a for a, b in pairs):.2f}")


if __name__ == "__main__":
  main()
