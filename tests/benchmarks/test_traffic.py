"""Bytes that a program moves: of small texts that are counted by hand."""

from benchmarks.traffic import in_memory, moved

# A TPU's: matrix and vectors lie in memory; a copy, a slice of 4 of 16 rows and a result beside the
# cores.
TPU = """\
HloModule jit_step, is_scheduled=true

%fused_product (param_0.1: bf16[4,8], param_1.1: bf16[8,8]) -> bf16[4,8] {
  %param_0.1 = bf16[4,8]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %param_1.1 = bf16[8,8]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %convolution.1 = bf16[4,8]{1,0:T(8,128)(2,1)S(1)} convolution(%param_0.1, %param_1.1), \
dim_labels=bf_io->bf
}

ENTRY %main (x: bf16[16,8], matrix: bf16[8,8]) -> bf16[4,8] {
  %x = bf16[16,8]{1,0:T(8,128)(2,1)} parameter(0)
  %matrix = bf16[8,8]{1,0:T(8,128)(2,1)} parameter(1)
  %slice-start.1 = ((bf16[16,8]{1,0:T(8,128)(2,1)}), bf16[4,8]{1,0:T(8,128)(2,1)S(1)}, \
s32[]{:S(2)}) slice-start(%x), slice={[0:4], [0:8]}
  %slice-done.1 = bf16[4,8]{1,0:T(8,128)(2,1)S(1)} slice-done(%slice-start.1)
  %product = bf16[4,8]{1,0:T(8,128)(2,1)S(1)} fusion(%slice-done.1, %matrix), kind=kOutput, \
calls=%fused_product
  %negated = bf16[4,8]{1,0:T(8,128)(2,1)S(1)} negate(%product)
  %copy-start.1 = (bf16[4,8]{1,0:T(8,128)(2,1)}, bf16[4,8]{1,0:T(8,128)(2,1)S(1)}, \
u32[]{:S(2)}) copy-start(%negated)
  ROOT %copy-done.1 = bf16[4,8]{1,0:T(8,128)(2,1)} copy-done(%copy-start.1)
}
"""

# A GPU's: three trips, each with a slice of 3 stacked matrices that is negated, a product, a kernel
# and a row that is written into a stack of results; then a sum over devices.
GPU = """\
HloModule jit_step, is_scheduled=true

%fused_slice (param_0.1: f32[3,8,4], param_1.2: s32[]) -> (f32[8,4], f32[8]) {
  %param_0.1 = f32[3,8,4]{2,1,0} parameter(0)
  %param_1.2 = s32[] parameter(1)
  %zero.1 = s32[] constant(0)
  %dynamic-slice.1 = f32[1,8,4]{2,1,0} dynamic-slice(%param_0.1, %param_1.2, %zero.1, %zero.1), \
dynamic_slice_sizes={1,8,4}
  %bitcast.1 = f32[8,4]{1,0} bitcast(%dynamic-slice.1)
  %negate.1 = f32[8,4]{1,0} negate(%bitcast.1)
  %reduce.1 = f32[8]{0} reduce(%negate.1, %zero.1), dimensions={1}, to_apply=%add
  ROOT %tuple.1 = (f32[8,4]{1,0}, /*index=1*/f32[8]{0}) tuple(%negate.1, %reduce.1)
}

%fused_stack (param_0.4: f32[3,4], param_1.4: f32[4], param_2.4: s32[]) -> f32[3,4] {
  %param_0.4 = f32[3,4]{1,0} parameter(0)
  %param_1.4 = f32[4]{0} parameter(1)
  %bitcast.4 = f32[1,4]{1,0} bitcast(%param_1.4)
  %param_2.4 = s32[] parameter(2)
  ROOT %dynamic-update-slice.4 = f32[3,4]{1,0} dynamic-update-slice(%param_0.4, %bitcast.4, \
%param_2.4, %param_2.4)
}

%body (state: (s32[], f32[3,8,4], f32[3,4])) -> (s32[], f32[3,8,4], f32[3,4]) {
  %state = (s32[], f32[3,8,4]{2,1,0}, f32[3,4]{1,0}) parameter(0)
  %count = s32[] get-tuple-element(%state), index=0
  %stacked = f32[3,8,4]{2,1,0} get-tuple-element(%state), index=1
  %results = f32[3,4]{1,0} get-tuple-element(%state), index=2
  %sliced = (f32[8,4]{1,0}, f32[8]{0}) fusion(%stacked, %count), kind=kLoop, calls=%fused_slice
  %negated = f32[8,4]{1,0} get-tuple-element(%sliced), index=0
  %product = (f32[4,4]{1,0}, s8[256]{0}) custom-call(%negated, %negated), \
custom_call_target="__cublas$gemm"
  %first = f32[4,4]{1,0} get-tuple-element(%product), index=0
  %row = f32[4]{0} custom-call(%first), custom_call_target="__gpu$xla.gpu.triton"
  %begun = ((f32[3,4]{1,0}, f32[4]{0}, s32[]), f32[3,4]{1,0}, s32[]) fusion-start(%results, %row, \
%count), kind=kLoop, calls=%fused_stack
  %stack = f32[3,4]{1,0} fusion-done(%begun)
  ROOT %states = (s32[], f32[3,8,4]{2,1,0}, f32[3,4]{1,0}) tuple(%count, %stacked, %stack)
}

%cond (state.6: (s32[], f32[3,8,4], f32[3,4])) -> pred[] {
  %state.6 = (s32[], f32[3,8,4]{2,1,0}, f32[3,4]{1,0}) parameter(0)
  %end = s32[] constant(3)
  %count.6 = s32[] get-tuple-element(%state.6), index=0
  ROOT %less = pred[] compare(%count.6, %end), direction=LT
}

ENTRY %main (given: f32[3,8,4]) -> f32[3,4] {
  %given = f32[3,8,4]{2,1,0} parameter(0)
  %start = s32[] constant(0)
  %empty = f32[3,4]{1,0} custom-call(), custom_call_target="AllocateBuffer"
  %tuple = (s32[], f32[3,8,4]{2,1,0}, f32[3,4]{1,0}) tuple(%start, %given, %empty)
  %loop = (s32[], f32[3,8,4]{2,1,0}, f32[3,4]{1,0}) while(%tuple), condition=%cond, body=%body
  %out = f32[3,4]{1,0} get-tuple-element(%loop), index=2
  ROOT %summed = f32[3,4]{1,0} all-reduce(%out), replica_groups={{0,1}}, to_apply=%add
}
"""


def test_arrays_beside_a_tpus_cores_are_not_in_memory():
    """An asynchronous slice reads the slice, not the array; a product its matrix; a copy writes."""
    assert in_memory("(bf16[4,8]{1,0:T(8,128)(2,1)S(1)}, bf16[4,8]{1,0:T(8,128)(2,1)})") == 64
    assert moved(TPU) == {
        "products": 8 * 8 * 2,
        "kernels": 0,
        "copies and slices": 4 * 8 * 2 + 4 * 8 * 2,
        "all else": 0,
        "collectives": 0,
    }
    # All in memory: both ends of slice and copy, the product's vectors and result, and the rest.
    assert moved(TPU.replace("S(1)", "")) == {
        "products": 64 + 128 + 64,
        "kernels": 0,
        "copies and slices": 2 * 64 + 2 * 64,
        "all else": 2 * 64,
        "collectives": 0,
    }


def test_a_loop_counts_each_trip_and_slices_what_they_take():
    """Of a stack one matrix is read and one row written, also by a fusion that starts alone."""
    matrix, row, square, index = 8 * 4 * 4, 4 * 4, 4 * 4 * 4, 4
    assert moved(GPU) == {
        "products": 3 * (2 * matrix + square),  # without the room that it computes in
        "kernels": 3 * (square + row),
        "copies and slices": 0,
        "all else": 3 * ((matrix + index + matrix + 8 * 4) + (row + index + row)),
        "collectives": 2 * 3 * row,
    }
