"""Operations of the matrix products and convolutions of a program."""

from __future__ import annotations

from collections.abc import Mapping
import math
import re

import numpy as np

from flaxshard.compiled import hlo


def flops_of(instruction: hlo.Instruction) -> dict[str, float]:
  """Returns the operations of a matrix product or a convolution.

  Args:
    instruction: An instruction. Of others than these the result is empty.

  Returns:
    The operations (an addition and a multiplication are two), by the dtype of
    the operands.
  """
  opcode, operands = instruction.opcode, instruction.operand_instructions
  if opcode == "dot":
    contracted = instruction.attribute(r"lhs_contracting_dims=\{([\d,]*)\}")
  elif opcode == "custom-call" and re.search(
    r'target="__(cublas|onednn)', instruction.attributes
  ):
    contracted = instruction.attribute(
      r'lhs_contracting_dimensions":\["?([\d",]*)\]'
    ).replace('"', "")
  elif opcode == "convolution":
    return {operands[0].arrays[0].dtype: _convolution_flops(instruction)}
  else:
    return {}
  if len(operands) < 2 or (opcode == "custom-call" and not contracted):
    return {}
  left = operands[0].arrays[0]
  length = math.prod(left.dims[int(d)] for d in contracted.split(",") if d)
  return {left.dtype: 2.0 * instruction.arrays[0].size * length}


def _convolution_flops(instruction: hlo.Instruction) -> float:
  """Returns the operations of a convolution, without those on padding.

  The TPU compiler writes matrix products as convolutions, and the batch
  dimensions of a matrix product as dimensions of the window.
  """
  left, right = (i.arrays[0] for i in instruction.operand_instructions)
  labels = instruction.attribute(r"dim_labels=([\w?]+_[\w?]+->[\w?]+)")
  left_labels, rest = labels.split("_")
  right_labels, result_labels = rest.split("->")
  result = instruction.arrays[0]
  flops = 2.0 * right.dims[right_labels.index("i")]
  flops *= result.dims[result_labels.index("b")]
  flops *= result.dims[result_labels.index("f")]
  window = dict(
    re.findall(
      r"(\w+)=([\w\-x]+)", instruction.attribute(r"window=\{([^}]*)\}")
    )
  )
  rank = len(labels.split("->")[1]) - 2
  for number in range(rank):
    label = str(number)
    flops *= _count_products(
      left.dims[left_labels.index(label)],
      right.dims[right_labels.index(label)],
      result.dims[result_labels.index(label)],
      {key: value.split("x")[number] for key, value in window.items()},
    )
  return flops


def _count_products(
  length: int, kernel: int, outputs: int, window: Mapping[str, str]
) -> int:
  """Returns how many pairs of an output and a kernel element meet an input."""
  stride = int(window.get("stride", 1))
  base_dilation = int(window.get("lhs_dilate", 1))
  kernel_dilation = int(window.get("rhs_dilate", 1))
  low = int(window.get("pad", "0_0").split("_")[0])
  positions = (
    np.arange(outputs)[:, None] * stride
    + np.arange(kernel)[None] * kernel_dilation
    - low
  )
  inside = (positions >= 0) & (positions < (length - 1) * base_dilation + 1)
  return int(np.sum(inside & (positions % base_dilation == 0)))
