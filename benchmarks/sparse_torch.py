"""The step of `benchmarks/sparse.py` in PyTorch, as a process of its own.

It needs no other package than PyTorch and NumPy. The arguments are rows,
features, learning rate and threads. It reads the number of batches, the number
of ids and the ids from the standard input, then numbers of steps. After each it
prints the seconds of a step.
"""

import sys
import time

import numpy as np
import torch


def main() -> None:
  """Takes steps until the standard input ends."""
  rows, features, learning_rate, threads = sys.argv[1:]
  torch.set_num_threads(int(threads))
  torch.manual_seed(0)
  embedding = torch.nn.Embedding(int(rows), int(features), sparse=True)
  linear = torch.nn.Linear(int(features), 1, bias=False)
  optimizers = [
    torch.optim.SparseAdam(embedding.parameters(), lr=float(learning_rate)),
    torch.optim.Adam(linear.parameters(), lr=float(learning_rate)),
  ]

  def step(ids: torch.Tensor) -> None:
    loss = torch.square(linear(embedding(ids)) - 1).mean()
    for optimizer in optimizers:
      optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
      optimizer.step()

  read = sys.stdin.buffer
  shape = [int(x) for x in read.readline().split()]
  data = np.frombuffer(read.read(4 * shape[0] * shape[1]), np.int32)
  batches = torch.from_numpy(data.reshape(shape).astype(np.int64))
  print("ready", flush=True)
  taken = 0
  for line in read:
    steps = int(line)
    start = time.perf_counter()
    for _ in range(steps):
      step(batches[taken % len(batches)])
      taken += 1
    print((time.perf_counter() - start) / steps, flush=True)


if __name__ == "__main__":
  main()
