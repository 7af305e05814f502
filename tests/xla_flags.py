"""Flags for programs that compile fast.

Most of the time that tests take is LLVM's, which optimizes programs that run
for a moment. XLA's own passes are as ever.
"""

import importlib.metadata

# JAX's own minor version, before JAX is imported.
_VERSION = tuple(map(int, importlib.metadata.version("jax").split(".")[:2]))

# One LLVM module for each program: to split these small ones for several
# threads takes as long as to compile them.
FAST = (
  "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
)
if _VERSION <= (0, 10):
  # The older emitters of fusions take half of the time to compile. Later XLA
  # has no choice of them.
  FAST += " --xla_cpu_use_fusion_emitters=false"
