"""Collectives of compiled programs: of a small text that is counted by hand, and of a program
compiled here.
"""

from benchmarks.collectives import count, size

LOOP = """\
HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[3,8,4]{2,1,0})->f32[4]{0}}

%body (state: (s32[], f32[4])) -> (s32[], f32[4]) {
  %state = (s32[], f32[4]{0}) parameter(0)
  %count = s32[] get-tuple-element(%state), index=0
  %sums = f32[4]{0} get-tuple-element(%state), index=1
  %reduced = (f32[4]{0}, /*index=1*/f32[4]{0}) all-reduce-start(%sums), \
replica_groups={{0,1}}, to_apply=%add
  %ended = f32[4]{0:T(256)} all-reduce-done(%reduced)
  ROOT %states = (s32[], f32[4]{0}) tuple(%count, %ended)
}

%cond (state.6: (s32[], f32[4])) -> pred[] {
  %state.6 = (s32[], f32[4]{0}) parameter(0)
  %count.6 = s32[] get-tuple-element(%state.6), index=0
  %end = s32[] constant(3)
  ROOT %less = pred[] compare(%count.6, %end), direction=LT
}

ENTRY %main (given: f32[4]) -> f32[4] {
  %given = f32[4]{0} parameter(0)
  %start = s32[] constant(0)
  %tuple = (s32[], f32[4]{0}) tuple(%start, %given)
  %loop = (s32[], f32[4]{0}) while(%tuple), condition=%cond, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
  ROOT %out = f32[4]{0} get-tuple-element(%loop), index=1
}
"""


def test_counts_by_hand():
    """A loop's collectives run in every trip; its count stands in the program, in its condition,
    or only on the device.
    """
    in_condition = LOOP.replace(', backend_config={"known_trip_count":{"n":"3"}}', "")
    unknown = in_condition.replace("constant(3)", "get-tuple-element(%state.6), index=0")
    for text, trips in (LOOP, 3), (in_condition, 3), (unknown, 1):
        assert count(text) == [{"kind": "all-reduce", "count": trips, "bytes": 16 * trips}]


def test_sizes_of_every_dtype():
    """Tuples, layouts of TPUs, half bytes and arrays of no size."""
    assert size("(f32[8,16]{1,0}, pred[3], s4[3], token[], u32[])") == 512 + 3 + 2 + 0 + 4
    assert size("bf16[8,16]{1,0:T(8,128)(2,1)S(1)}") == 256 and size("f8e4m3fn[5]") == 5


PROGRAM = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from benchmarks.collectives import collectives
mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
x = jax.device_put(jnp.ones((8, 64)), NamedSharding(mesh, PartitionSpec("data")))
print(collectives(jax.jit(lambda x: x.sum(axis=0)).lower(x).compile()))
print(collectives(jax.jit(lambda x: x @ x).lower(jnp.ones((8, 8))).compile()))
"""


def test_a_program_compiled_here(eight):
    """A sum over all devices moves its result; a program of one device moves nothing."""
    expected = [{"kind": "all-reduce", "count": 1, "bytes": 4 * 64}]
    assert eight(PROGRAM) == f"{expected}\n[]\n"
