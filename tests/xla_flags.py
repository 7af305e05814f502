"""Flags for programs that compile fast.

Most of the time that tests take is LLVM's, which optimizes programs that run
for a moment. XLA's own passes are as ever.
"""

FAST = "--xla_backend_optimization_level=0"
