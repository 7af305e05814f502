"""Asynchronous collectives in the form of XLA's GPU and generic texts.

Written by hand: no GPU is needed to read them.
"""

import jax
import numpy as np

from flaxshard.compiled import collectives

TEXT = """\
HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, \
may-alias) }, entry_computation_layout={()->()}, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%async_computation (p: f32[64]) -> f32[8] {
  %p = f32[64]{0} parameter(0)
  ROOT %reduce-scatter.1 = f32[8]{0} reduce-scatter(%p), channel_id=3, \
replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add, \
metadata={op_name="jit(step)/transpose(jvp(M))/dot" \
source_file="/home/user/train.py" source_line=5}
}

ENTRY %main (w: f32[8], x: f32[64]) -> (f32[8], f32[]) {
  %w = f32[8]{0} parameter(0), metadata={op_name="state.params[\\'w\\']"}
  %x = f32[64]{0} parameter(1), metadata={op_name="batch"}
  %gather = (f32[8]{0}, f32[64]{0}) all-gather-start(%w), channel_id=1, \
replica_groups=[1,8]<=[8], dimensions={0}, metadata={op_name="jit(step)/jvp(M)"}
  %gathered = f32[64]{0} all-gather-done(%gather)
  %permute = (f32[64]{0}, f32[64]{0}) collective-permute-start(%x), \
channel_id=2, source_target_pairs={{0,4},{4,0},{1,5},{5,1}}, \
metadata={op_name="jit(step)/jvp(M)"}
  %permuted = f32[64]{0} collective-permute-done(%permute)
  %grad = f32[64]{0} custom-call(%gathered, %permuted), \
custom_call_target="__cublas$gemm"
  %scatter = ((f32[64]{0}), f32[8]{0}) async-start(%grad), \
calls=%async_computation
  %scattered = f32[8]{0} async-done(%scatter)
  %new = f32[8]{0} subtract(%w, %scattered)
  %zero = f32[] constant(0)
  %loss = f32[] reduce(%permuted, %zero), dimensions={0}, to_apply=%add
  %start = f32[] all-reduce-start(%loss), channel_id=4, \
replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  %done = f32[] all-reduce-done(%start)
  ROOT %out = (f32[8]{0}, f32[]) tuple(%new, %done)
}
"""


def test_starts_and_ends_count_once():
  devices = np.array(jax.devices()[:8]).reshape(2, 4)
  mesh = jax.sharding.Mesh(devices, ("node", "gpu"))
  found = {c.kind: c for c in collectives(TEXT, mesh)}
  assert len(found) == len(collectives(TEXT, mesh)) == 4
  sizes = {k: (c.operand_bytes, c.result_bytes) for k, c in found.items()}
  assert sizes == {
    "all-gather": (32, 256),
    "collective-permute": (256, 256),
    "reduce-scatter": (256, 32),
    "all-reduce": (4, 4),
  }
  axes = {kind: c.axes for kind, c in found.items()}
  assert axes == {
    "all-gather": ("node", "gpu"),
    "collective-permute": ("node",),
    "reduce-scatter": ("node", "gpu"),
    "all-reduce": ("gpu",),
  }
  purposes = {kind: (c.purpose, c.parameters) for kind, c in found.items()}
  assert purposes == {
    "all-gather": ("parameter", ("w",)),
    "collective-permute": ("activations", ()),
    "reduce-scatter": ("gradients", ("w",)),
    "all-reduce": ("metrics", ()),
  }
  assert found["reduce-scatter"].source == "train.py:5"
