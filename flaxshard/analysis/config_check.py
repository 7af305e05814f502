"""Checks the train step of a config, as `check` does any step."""

from __future__ import annotations

from flaxshard.analysis import check as check_lib
from flaxshard.analysis.compilation import Compilation
from flaxshard.analysis.findings import Findings
from flaxshard.partitioning import rules as rules_lib
from flaxshard.train.program import Program


def check_config_step(
  program: Program, compilation: Compilation, *, min_bytes: int = 2**20
) -> Findings:
  """Checks the train step of a config that is compiled already.

  The rules and the precision are those of the config.

  Args:
    program: The train step.
    compilation: The compiled step.
    min_bytes: Smallest number of bytes to report; see `check`.
  """
  config = program.config
  return check_lib.check_compiled(
    program.arguments,
    compilation.compiled,
    compilation.traced.jaxpr,
    rules=rules_lib.from_config(config.mesh.rules),
    policy=config.precision,
    min_bytes=min_bytes,
    notes=() if compilation.compiled is not None else (check_lib.TOO_BIG,),
  )
