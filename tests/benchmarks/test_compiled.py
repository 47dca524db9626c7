"""Counts of updates compiled for devices that are not here: what belongs to the layers, and
what the head computes.
"""

import json

from benchmarks.compiled import head_rows, of_layers
from benchmarks.programs import Program, read
from tests.training.test_compiled_for import compiles

TEXT = """\
%body (state: (s32[], bf16[640,8])) -> (s32[], bf16[640,8]) {
  %state = (s32[], bf16[640,8]{1,0}) parameter(0)
  %count = s32[] get-tuple-element(%state), index=0
  %hidden = bf16[640,8]{1,0} get-tuple-element(%state), index=1
  %chunk = bf16[64,8]{1,0} dynamic-slice(%hidden, %count, %count), dynamic_slice_sizes={64,8}
  %table = bf16[1000,8]{1,0} constant({...})
  %logits = f32[64,1000]{1,0} dot(%chunk, %table), lhs_contracting_dims={1}, \
rhs_contracting_dims={1}
  %small = bf16[64,1000]{1,0} convert(%logits)
  %d_table = f32[1000,8]{1,0} dot(%small, %chunk), lhs_contracting_dims={0}, \
rhs_contracting_dims={0}
  %d_chunk = f32[64,8]{1,0} dot(%small, %table), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %states = (s32[], bf16[640,8]{1,0}) tuple(%count, %hidden)
}

ENTRY %main (given: bf16[640,8]) -> bf16[640,8] {
  %given = bf16[640,8]{1,0} parameter(0)
  %start = s32[] constant(0)
  %tuple = (s32[], bf16[640,8]{1,0}) tuple(%start, %given)
  %loop = (s32[], bf16[640,8]{1,0}) while(%tuple), condition=%cond, body=%body, \
backend_config={"known_trip_count":{"n":"10"}}
  ROOT %out = bf16[640,8]{1,0} get-tuple-element(%loop), index=1
}
"""


def test_rows_of_the_head():
    """Rows of logits alone: not those of other products, nor of other tables."""
    program = Program(*read(TEXT))
    assert [head_rows(program, words, 8) for words in (998, 1000, 1001, 700)] == [640, 640, 0, 0]
    assert head_rows(program, 998, 16) == 0


def test_loops_of_layers():
    """Those over the blocks of one batch: no loop inside them, over chunks or over microbatches."""
    loop = {
        "trips": 6,
        "runs": 1,
        "source": "jit(update)/jvp(LanguageModel)/LanguageModel.hidden/body/while",
    }
    others = [
        loop | {"trips": 5},
        loop | {"runs": 6},
        loop | {"source": "jit(update)/output/while"},
    ]
    assert of_layers([loop, *others], 6) == [loop]


@compiles
def test_counts_of_a_small_update(quick_command, tmp_path):
    """Compiled for an H100: all that is promised is printed and written; the head computes
    every token, in whole tiles.
    """
    flags = [
        "--config=configs/quickstart.py",
        "--config.data.vocabulary_size=3000",
        "--config.input.cutoffs=(2000,2500)",
        "--rows=8",
        "--config.body.layers=3",
        "--config.dtype=bfloat16",
        f"--json={tmp_path / 'counts.json'}",
    ]
    done = quick_command("-m", "benchmarks.compiled", *flags)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads((tmp_path / "counts.json").read_text())
    assert found["tokens"] <= found["head_rows"] < found["tokens"] + 128 * 8
    assert f"| rows that the head computes | {found['head_rows']:,} |" in done.stdout
    assert (
        of_layers(found["loops"], 3) == []
        and found["moved_bytes"] / 20 < 3 * found["layer_bytes"] < found["moved_bytes"]
    )
