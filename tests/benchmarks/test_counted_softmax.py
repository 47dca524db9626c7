"""The counted full softmax: its bounds, its arguments, and counts for an H100 that is not here."""

import importlib.util
import json
import sys
from types import SimpleNamespace

import pytest

from benchmarks import counted_softmax, full_softmax
from benchmarks.counted_softmax import OURS, REFERENCE, Row, Size, excesses
from tests import refuses

SIZE = Size(128_256, 2048, 8192)
OPTAX = Row(REFERENCE, SIZE, "float32", False, 20.0, 6.0, int(8e9), 14, 1, 1)
GOOD = OPTAX._replace(peer=OURS, milliseconds=20.9, temporary=int(2.2e9), chunks=4)


def test_bounds():
    """Time, products, memory and a frozen table's arrays each exceed a bound alone."""
    assert excesses(GOOD, OPTAX, "h100") == []
    assert excesses(GOOD._replace(milliseconds=21.1), OPTAX, "h100") == ["time > 1.05"]
    assert excesses(GOOD._replace(milliseconds=21.1), OPTAX, "v5e:2x2") == []
    assert excesses(GOOD._replace(products=6.4), OPTAX, "h100") == ["products > 6.30"]
    # 2,048 tokens x 128,256 words x 8 bytes, and 128,256 x 2,048 x 4 bytes
    assert excesses(GOOD._replace(temporary=int(3.2e9)), OPTAX, "h100") == ["temporaries > 3.15 GB"]
    frozen = GOOD._replace(frozen=True, products=4.0)
    assert excesses(frozen, OPTAX, "h100") == ["float32 arrays of the table's shape"]
    assert excesses(frozen._replace(wide=0, products=6.0), OPTAX, "h100") == ["products > 4.20"]
    short = OPTAX._replace(size=SIZE._replace(tokens=512))
    slow = GOOD._replace(size=short.size, chunks=1, temporary=0, milliseconds=27.0)
    assert excesses(slow, short, "h100") == ["time > 1.30"]


@pytest.mark.parametrize("text", ["128256x2048", "axbxc", "0x1x1", ""])
def test_invalid_sizes(text):
    """One line with the form."""
    with refuses(f"--sizes={text}", "WORDSxWIDTHxTOKENS"):
        counted_softmax.sizes_of([text])


LACKS_COMPILER = sys.version_info < (3, 12) or importlib.util.find_spec("nvidia") is None


@pytest.mark.skipif(LACKS_COMPILER, reason="needs the extra targets and Python 3.12")
def test_counts_for_an_h100(capsys, tmp_path):
    """The table of one small size: optax makes all logits in 3 products, or in 2 with the table
    frozen; its scan over chunks of 512 tokens makes them twice.
    """
    file = tmp_path / "rows.json"
    asked = {"sizes": ["4096x128x1024"], "grid": False, "chunk": None, "table": "bfloat16"}
    settings = SimpleNamespace(target="h100", json=str(file), **asked)
    names = REFERENCE, OURS, "optax chunked"
    counted_softmax.main(settings, {name: full_softmax.JAX[name] for name in names})
    printed = capsys.readouterr().out
    assert "h100: counted, not measured" in printed and "worst: " in printed
    rows = json.loads(file.read_text())
    optax, ours, chunked, frozen, _ = rows
    assert [row["peer"] for row in rows] == [*names, REFERENCE, OURS]
    assert (optax["products"], optax["chunks"], optax["times_optax"]) == (6, 1, 1)
    assert optax["temporary"] > 4096 * 1024 * 4 and 6 <= ours["products"] <= 8
    assert (chunked["products"], chunked["chunks"], chunked["rows"]) == (8, 2, 512)
    assert frozen["frozen"] and frozen["products"] == 4
    assert optax["wide"] == frozen["wide"] == 0  # gradients are bfloat16
