"""Counts of compiled programs: of a small text that is counted by hand, and of a program
compiled here.
"""

import jax
import jax.numpy as jnp

from benchmarks.programs import Program, read, report, sizes

# Three trips: a slice of 3 stacked matrices of 128 bytes, a whole mask of 64 bytes, a product, a
# stack of results.
TEXT = """\
HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[3,8,4]{2,1,0})->f32[3,8]{1,0}}

%fused_slice (param_0.1: f32[3,8,4], param_1.2: s32[]) -> f32[8,4] {
  %param_0.1 = f32[3,8,4]{2,1,0} parameter(0)
  %param_1.2 = s32[] parameter(1)
  %zero.1 = s32[] constant(0)
  %dynamic-slice.1 = f32[1,8,4]{2,1,0} dynamic-slice(%param_0.1, %param_1.2, %zero.1, %zero.1), \
dynamic_slice_sizes={1,8,4}
  ROOT %bitcast.1 = f32[8,4]{1,0} bitcast(%dynamic-slice.1)
}

%fused_mask (param_0.3: f32[4,4], param_1.3: pred[4,16]) -> (f32[4,4], f32[4]) {
  %param_0.3 = f32[4,4]{1,0} parameter(0)
  %param_1.3 = pred[4,16]{1,0} parameter(1)
  %slice.3 = pred[4,4]{1,0} slice(%param_1.3), slice={[0:4], [0:4]}
  %select.3 = f32[4,4]{1,0} select(%slice.3, %param_0.3, %param_0.3)
  %reduce.3 = f32[4]{0} reduce(%select.3, %param_1.3), dimensions={1}, to_apply=%add
  ROOT %tuple.3 = (f32[4,4]{1,0}, /*index=1*/f32[4]{0}) tuple(%select.3, %reduce.3)
}

%fused_stack (param_0.4: f32[3,4], param_1.4: f32[4], param_2.4: s32[]) -> f32[3,4] {
  %param_0.4 = f32[3,4]{1,0} parameter(0)
  %param_1.4 = f32[4]{0} parameter(1)
  %bitcast.4 = f32[1,4]{1,0} bitcast(%param_1.4)
  %param_2.4 = s32[] parameter(2)
  ROOT %dynamic-update-slice.4 = f32[3,4]{1,0} dynamic-update-slice(%param_0.4, %bitcast.4, \
%param_2.4, %param_2.4)
}

%triton_product (param_0.5: f32[8,4], param_1.5: f32[8,4]) -> f32[4,4] {
  %param_0.5 = f32[8,4]{1,0} parameter(0)
  %param_1.5 = f32[8,4]{1,0} parameter(1)
  ROOT %dot.5 = f32[4,4]{1,0} dot(%param_0.5, %param_1.5), lhs_contracting_dims={0}, \
rhs_contracting_dims={0}
}

%body (state: (s32[], f32[3,8,4], pred[4,16], f32[3,4])) \
-> (s32[], f32[3,8,4], pred[4,16], f32[3,4]) {
  %state = (s32[], f32[3,8,4]{2,1,0}, pred[4,16]{1,0}, f32[3,4]{1,0}) parameter(0)
  %count = s32[] get-tuple-element(%state), index=0
  %stacked = f32[3,8,4]{2,1,0} get-tuple-element(%state), index=1
  %mask = pred[4,16]{1,0} get-tuple-element(%state), index=2
  %results = f32[3,4]{1,0} get-tuple-element(%state), index=3
  %sliced = f32[8,4]{1,0} fusion(%stacked, %count), kind=kLoop, calls=%fused_slice, \
metadata={op_name="jit(step)/slice"}
  %product = f32[4,4]{1,0} fusion(%sliced, %sliced), kind=kCustom, calls=%triton_product
  %again = (f32[4,4]{1,0}, s8[256]{0}) custom-call(%product, %product), \
custom_call_target="__cublas$gemm"
  %first = f32[4,4]{1,0} get-tuple-element(%again), index=0
  %masked = (f32[4,4]{1,0}, f32[4]{0}) fusion(%first, %mask), kind=kInput, calls=%fused_mask
  %sums = f32[4]{0} get-tuple-element(%masked), index=1
  %reduced = (f32[4]{0}, f32[4]{0}) all-reduce-start(%sums), replica_groups={{0,1}}, to_apply=%add
  %ended = f32[4]{0} all-reduce-done(%reduced)
  %begun = ((f32[3,4], f32[4], s32[]), f32[3,4]{1,0}, u32[]) fusion-start(%results, %ended, \
%count), calls=%fused_stack
  %stack = f32[3,4]{1,0} fusion-done(%begun)
  %one = s32[] constant(1)
  %next = s32[] add(%count, %one)
  ROOT %states = (s32[], f32[3,8,4]{2,1,0}, pred[4,16]{1,0}, f32[3,4]{1,0}) tuple(%next, \
%stacked, %mask, /*index=3*/%stack)
}

ENTRY %main (given: f32[3,8,4]) -> f32[3,4] {
  %given = f32[3,8,4]{2,1,0} parameter(0)
  %start = s32[] constant(0)
  %ones = pred[4,16]{1,0} broadcast(%start), dimensions={}
  %empty = f32[3,4]{1,0} custom-call(), custom_call_target="AllocateBuffer"
  %tuple = (s32[], f32[3,8,4]{2,1,0}, pred[4,16]{1,0}, f32[3,4]{1,0}) tuple(%start, %given, \
%ones, %empty)
  %loop = (s32[], f32[3,8,4]{2,1,0}, pred[4,16]{1,0}, f32[3,4]{1,0}) while(%tuple), \
condition=%cond, body=%body, \
metadata={op_name="jit(step)/blocks/while"}, backend_config={"known_trip_count":{"n":"3"}}
  %copied = f32[3,4]{1,0} get-tuple-element(%loop), index=3
  ROOT %out = f32[3,4]{1,0} copy(%copied)
}
"""


CONDITION = """
%cond (state.6: (s32[], f32[3,8,4], pred[4,16], f32[3,4])) -> pred[] {
  %state.6 = (s32[], f32[3,8,4]{2,1,0}, pred[4,16]{1,0}, f32[3,4]{1,0}) parameter(0)
  %count.6 = s32[] get-tuple-element(%state.6), index=0
  %end = s32[] constant(3)
  ROOT %less = pred[] compare(%count.6, %end), direction=LT
}
"""


def test_counts_by_hand():
    """Arrays that the program makes, largest first, and what crosses devices in every trip."""
    told = TEXT.replace(', backend_config={"known_trip_count":{"n":"3"}}', "").replace(
        "\nENTRY", CONDITION + "\nENTRY"
    )
    unknown = told.replace(
        "%end = s32[] constant(3)", "%end = s32[] get-tuple-element(%state.6), index=0"
    )
    for text, trips in (TEXT, 3), (told, 3), (unknown, 1):
        crossing = Program(*read(text)).collectives()
        assert crossing == [{"kind": "all-reduce", "count": trips, "bytes": 16 * trips}]
    program = Program(*read(TEXT))
    first, second, *_ = program.largest()
    assert first == {"bytes": 256, "shape": "s8[256]", "count": 1, "source": ""}
    assert second == {
        "bytes": 128,
        "shape": "f32[1,8,4]",
        "count": 1,
        "source": "jit(step)/slice",
    }
    assert "f32[3,8,4]" not in [one["shape"] for one in program.largest(99)]  # an argument
    for layout, largest in (
        ("0:T(1024)", 256),
        ("0:T(1024)S(1)", 128),
        ("0S(1)", 256),
    ):  # a TPU keeps the second beside its cores
        assert (
            Program(*read(TEXT.replace("s8[256]{0}", f"s8[256]{{{layout}}}"))).largest()[0]["bytes"]
            == largest
        )


def test_sizes_of_every_dtype():
    """Tuples, layouts of TPUs, half bytes and arrays of no size."""
    assert sizes("(f32[8,16]{1,0}, /*index=1*/pred[3], s4[3], token[], u32[])") == [512, 3, 2, 0, 4]
    assert sizes("bf16[8,16]{1,0:T(8,128)(2,1)S(1)}") == [256] and sizes("f8e4m3fn[5]") == [5]


def test_a_program_compiled_here():
    """Its memory is the compiler's, and its largest array the product that it makes."""
    x = jnp.ones((64, 64))
    found = report(jax.jit(lambda x: jnp.tanh(x @ x) @ x).lower(x).compile())
    assert found["state_bytes"] == 4 * 64 * 64 and found["temp_bytes"] >= 4 * 64 * 64
    assert found["largest"][0]["bytes"] == 4 * 64 * 64 and found["collectives"] == []
