"""Arithmetic and HBM traffic of small programs, computed by hand."""

# ruff: noqa: E501
import jax
import jax.numpy as jnp
import pytest

from flaxshard.compiled import work

# A loop of ten turns over a stack of weights, as the TPU compiler writes it:
# a turn reads one layer of the stack from HBM, and x stays in VMEM.
LOOP = """HloModule loop, is_scheduled=true

%fused (p0: bf16[128,256], p1: bf16[10,256,256], p2: s32[]) -> bf16[128,256] {
  %p0 = bf16[128,256]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %p1 = bf16[10,256,256]{2,1,0:T(8,128)(2,1)} parameter(1)
  %p2 = s32[]{:T(128)S(6)} parameter(2)
  %zero = s32[]{:T(128)} constant(0)
  %slice = bf16[1,256,256]{2,1,0:T(8,128)(2,1)} dynamic-slice(%p1, %p2, %zero, %zero), dynamic_slice_sizes={1,256,256}
  %layer = bf16[256,256]{1,0:T(8,128)(2,1)} bitcast(%slice)
  ROOT %product = bf16[128,256]{1,0:T(8,128)(2,1)S(1)} convolution(%p0, %layer), dim_labels=bf_io->bf
}

%body (t: (s32[], bf16[128,256], bf16[10,256,256])) -> (s32[], bf16[128,256], bf16[10,256,256]) {
  %t = (s32[]{:T(128)S(6)}, bf16[128,256]{1,0:T(8,128)(2,1)S(1)}, bf16[10,256,256]{2,1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[]{:T(128)S(6)} get-tuple-element(%t), index=0
  %x = bf16[128,256]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%t), index=1
  %w = bf16[10,256,256]{2,1,0:T(8,128)(2,1)} get-tuple-element(%t), index=2
  %y = bf16[128,256]{1,0:T(8,128)(2,1)S(1)} fusion(%x, %w, %i), kind=kOutput, calls=%fused
  ROOT %out = (s32[]{:T(128)S(6)}, bf16[128,256]{1,0:T(8,128)(2,1)S(1)}, bf16[10,256,256]{2,1,0:T(8,128)(2,1)}) tuple(%i, %y, %w)
}

%condition (c: (s32[], bf16[128,256], bf16[10,256,256])) -> pred[] {
  %c = (s32[]{:T(128)S(6)}, bf16[128,256]{1,0:T(8,128)(2,1)S(1)}, bf16[10,256,256]{2,1,0:T(8,128)(2,1)}) parameter(0)
  ROOT %go = pred[]{:T(512)S(6)} constant(true)
}

ENTRY %main (x0: bf16[128,256], w0: bf16[10,256,256]) -> bf16[128,256] {
  %x0 = bf16[128,256]{1,0:T(8,128)(2,1)} parameter(0)
  %w0 = bf16[10,256,256]{2,1,0:T(8,128)(2,1)} parameter(1)
  %start = (bf16[128,256]{1,0:T(8,128)(2,1)S(1)}, bf16[128,256]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%x0)
  %done = bf16[128,256]{1,0:T(8,128)(2,1)S(1)} copy-done(%start)
  %i0 = s32[]{:T(128)S(6)} constant(0)
  %t0 = (s32[]{:T(128)S(6)}, bf16[128,256]{1,0:T(8,128)(2,1)S(1)}, bf16[10,256,256]{2,1,0:T(8,128)(2,1)}) tuple(%i0, %done, %w0)
  %loop = (s32[]{:T(128)S(6)}, bf16[128,256]{1,0:T(8,128)(2,1)S(1)}, bf16[10,256,256]{2,1,0:T(8,128)(2,1)}) while(%t0), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"10"}}
  %y0 = bf16[128,256]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%loop), index=1
  ROOT %result = bf16[128,256]{1,0:T(8,128)(2,1)} copy(%y0)
}
"""

# Every conditional has a large and a small branch, of 3 and 1 float32[1024]
# arrays read or written.
CONDITIONAL = """HloModule conditional, is_scheduled=true

%large (a: f32[1024]) -> f32[1024] {
  %a = f32[1024]{0} parameter(0)
  ROOT %sum = f32[1024]{0} add(%a, %a)
}

%small (b: f32[1024]) -> f32[1024] {
  %b = f32[1024]{0} parameter(0)
  ROOT %iota = f32[1024]{0} iota(), iota_dimension=0
}

ENTRY %main (p: pred[], x: f32[1024]) -> f32[1024] {
  %p = pred[] parameter(0)
  %x = f32[1024]{0} parameter(1)
  ROOT %c = f32[1024]{0} conditional(%p, %x, %x), true_computation=%large, false_computation=%small, metadata={op_name="jit(step)/agn_commit/cond"}
}
"""


# New rows for a table, as the TPU compiler writes it: the scatter is in a fusion
# within a fusion.
SCATTER = """HloModule scatter, is_scheduled=true

%second (old: f32[], new: f32[]) -> f32[] {
  %old = f32[] parameter(0)
  ROOT %new = f32[] parameter(1)
}

%inner (table: f32[4096,128], ids: s32[16,1], rows: f32[16,128]) -> f32[4096,128] {
  %table = f32[4096,128]{1,0} parameter(0)
  %ids = s32[16,1]{1,0} parameter(1)
  %rows = f32[16,128]{1,0} parameter(2)
  ROOT %put = f32[4096,128]{1,0} scatter(%table, %ids, %rows), update_window_dims={1}, inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=%second
}

%outer (t: f32[4096,128], i: s32[16,1], r: f32[16,128]) -> f32[4096,128] {
  %t = f32[4096,128]{1,0} parameter(0)
  %i = s32[16,1]{1,0} parameter(1)
  %r = f32[16,128]{1,0} parameter(2)
  ROOT %called = f32[4096,128]{1,0} fusion(%t, %i, %r), kind=kCustom, calls=%inner
}

ENTRY %main (t0: f32[4096,128], i0: s32[16,1], r0: f32[16,128]) -> f32[4096,128] {
  %t0 = f32[4096,128]{1,0} parameter(0)
  %i0 = s32[16,1]{1,0} parameter(1)
  %r0 = f32[16,128]{1,0} parameter(2)
  ROOT %new_table = f32[4096,128]{1,0} fusion(%t0, %i0, %r0), kind=kCustom, calls=%outer
}
"""


def test_scatter_in_a_fusion_writes_its_rows_alone():
  ids, rows = 4 * 16, 4 * 16 * 128
  assert work.count_work(SCATTER).hbm_bytes == ids + 2 * rows


def test_loop_counts_its_turns_and_only_hbm():
  counted = work.count_work(LOOP)
  assert counted.flops == {"bf16": 10 * 2 * 128 * 256 * 256}
  # x and the result once, and one layer of the weights in each turn.
  assert counted.hbm_bytes == 2 * (2 * 128 * 256) + 10 * 2 * 256 * 256
  assert counted.trip_counts_known


def test_loop_of_unknown_length_counts_one_turn():
  text = LOOP.replace('"known_trip_count":{"n":"10"}', "")
  counted = work.count_work(text)
  assert counted.total_flops == 2 * 128 * 256 * 256
  assert not counted.trip_counts_known


@pytest.mark.parametrize(
  "period, scope, arrays",
  # Every fourth time 3 arrays, else 1: a mean of 6 / 4.
  [
    (1, "agn_commit", 3),
    (4, "agn_commit", 1.5),
    (4, "accumulated_update", 1.5),
    (4, "agn_commit/cond/branch_1_fun", 3),
    (4, "loss_scale", 3),
  ],
)
def test_only_a_commit_counts_by_its_period(period, scope, arrays):
  text = CONDITIONAL.replace("agn_commit", scope)
  counted = work.count_work(text, period)
  assert counted.hbm_bytes == arrays * 4096


SLICE = """HloModule slice, is_scheduled=true

ENTRY %main (w: f32[4096,4096]) -> f32[1024,4096] {
  %w = f32[4096,4096]{1,0:T(8,128)} parameter(0)
  %start = ((f32[4096,4096]{1,0:T(8,128)}), f32[1024,4096]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) slice-start(%w), slice={[0:1024], [0:4096]}
  %done = f32[1024,4096]{1,0:T(8,128)S(1)} slice-done(%start)
  ROOT %sum = f32[1024,4096]{1,0:T(8,128)} add(%done, %done)
}
"""


def test_asynchronous_slice_reads_its_part():
  # A part is read from HBM to VMEM, and as much is written.
  assert work.count_work(SLICE).hbm_bytes == 2 * 4 * 1024 * 4096


ASYNC_FUSION = """HloModule fusion, is_scheduled=true

%fused (p: f32[1024]) -> f32[1024] {
  %p = f32[1024]{0} parameter(0)
  ROOT %sum = f32[1024]{0} add(%p, %p)
}

ENTRY %main (x: f32[1024]) -> f32[1024] {
  %x = f32[1024]{0} parameter(0)
  %start = ((f32[1024]{0}), f32[1024]{0}, s32[]{:S(2)}) fusion-start(%x), kind=kLoop, calls=%fused
  ROOT %done = f32[1024]{0} fusion-done(%start)
}
"""


def test_asynchronous_fusion_reads_its_operand_once():
  assert work.count_work(ASYNC_FUSION).hbm_bytes == 2 * 4096


def count_compiled(fn, *shapes):
  args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
  return work.count_work(jax.jit(fn).lower(*args).compile())


@pytest.mark.parametrize("stride, products", [(1, 22), (2, 11)])
def test_convolution_leaves_out_padding(stride, products):
  fn = lambda x, k: jax.lax.conv_general_dilated(
    x,
    k,
    (stride, stride),
    "SAME",
    dimension_numbers=("NHWC", "HWIO", "NHWC"),
  )
  counted = count_compiled(fn, (2, 8, 8, 3), (3, 3, 3, 16))
  # Along a side there are 8 * 3 pairs of an output and a kernel element, and
  # two of them meet padding; with a stride of 2 one of 4 * 3.
  assert counted.total_flops == 2 * 2 * products**2 * 3 * 16


def test_gradients_of_a_convolution():
  loss = lambda x, k: jnp.sum(
    jax.lax.conv_general_dilated(
      x, k, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    ** 2
  )
  counted = count_compiled(jax.grad(loss, (0, 1)), (2, 9, 9, 3), (3, 3, 3, 16))
  assert counted.total_flops == 3 * 2 * 2 * (4 * 3) ** 2 * 3 * 16


def test_scan_on_this_machine():
  fn = lambda x, w: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]
  counted = count_compiled(fn, (8, 16), (10, 16, 16))
  assert counted.total_flops == 10 * 2 * 8 * 16 * 16
  assert counted.trip_counts_known
