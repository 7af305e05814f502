"""Facts in the TPU compiler's message about too much memory."""

import pytest

from flaxshard.compiled import parse_memory_error

GIB = 2**30

# The message of libtpu 0.0.42.
BEFORE_ASSIGNMENT = (
  "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for"
  " HLO temporaries (45.50G) exceeds available HBM (15.75G)."
)
# In the form of messages that come after memory was assigned.
AFTER_ASSIGNMENT = """\
RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in \
memory space hbm. Used 30.25G of 15.75G hbm. Exceeded hbm capacity by 14.50G.

Total hbm usage >= 30.73G:
    reserved        530.00M

  Largest program allocations in hbm:

  1. Size: 1.50G
     Operator: op_name="jit(step)/embed" source_file="/a/b/model.py" \
source_line=3
     Shape: bf16[256000,3072]{1,0:T(8,128)(2,1)}
     Unpadded size: 1.50G
     XLA label: convert.1 = convert(param.2)
     Allocation type: HLO temp
     ==========================

  2. Size: 512.0K
     Shape: f32[128,1024]{1,0:T(8,128)}
     Unpadded size: 512.0K
     Allocation type: HLO argument
     ==========================
"""


def test_the_message_before_assignment():
  shortage = parse_memory_error(RuntimeError(BEFORE_ASSIGNMENT))
  assert (shortage.needed, shortage.available) == (45.5 * GIB, 15.75 * GIB)
  assert shortage.excess == 29.75 * GIB
  assert shortage.allocations == ()


def test_the_message_after_assignment():
  shortage = parse_memory_error(AFTER_ASSIGNMENT)
  assert (shortage.needed, shortage.excess) == (30.25 * GIB, 14.5 * GIB)
  first, second = shortage.allocations
  assert (first.nbytes, first.shape) == (1.5 * GIB, "bf16[256000,3072]")
  assert (first.origin, first.source) == ("jit(step)/embed", "model.py:3")
  assert (first.kind, second.kind) == ("temporary", "argument")
  assert (second.nbytes, second.shape) == (2**19, "f32[128,1024]")


@pytest.mark.parametrize(
  "text", ["INVALID_ARGUMENT: Used 2G of 1G hbm", "RESOURCE_EXHAUSTED: quota"]
)
def test_other_errors_have_no_facts(text):
  assert parse_memory_error(text) is None
