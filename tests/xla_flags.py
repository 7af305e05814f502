"""Flags for programs that compile fast.

Most of the time that tests take is LLVM's, which optimizes programs that run
for a moment. XLA's own passes are as ever.
"""

import importlib.metadata

_EMITTERS = "--xla_cpu_use_fusion_emitters=false"

# JAX's own minor version, before JAX is imported.
_VERSION = tuple(map(int, importlib.metadata.version("jax").split(".")[:2]))

FAST = "--xla_backend_optimization_level=0"
if _VERSION <= (0, 10):
  # They take half of the time to compile; later XLA has no choice of them.
  FAST += " " + _EMITTERS
