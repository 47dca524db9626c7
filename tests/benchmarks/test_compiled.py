"""Counts of updates compiled for devices that are not here."""

import json

from tests.training.test_compiled_for import compiles


@compiles
def test_counts_of_a_small_update(quick_command, tmp_path):
    """Compiled for an H100: all that is promised is printed and written."""
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
    assert found["tokens"] == 8 * 64 and found["collectives"] == []
    assert f"| temporary memory, GiB | {found['temp_bytes'] / 2**30:.2f} |" in done.stdout
