"""Flags for programs that compile fast.

Most of the time that tests take is LLVM's, which optimizes programs that run
for a moment. XLA's own passes are as ever.
"""

import importlib.metadata

# JAX's own minor version, before JAX is imported.
_VERSION = tuple(map(int, importlib.metadata.version("jax").split(".")[:2]))

if _VERSION <= (0, 10):
  # The older emitters of fusions take half of the time to compile.
  FAST = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
  )
else:
  # Later XLA has no choice of them, and with none of LLVM's optimizations a
  # value that is jitted and its eager twin differ by more than 1e-6.
  FAST = "--xla_backend_optimization_level=1"
