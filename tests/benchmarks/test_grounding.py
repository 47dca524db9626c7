"""The cost of composed words: rows of a config against its first, with their FLOPs."""

import types

from benchmarks import grounding

CONFIG = """
from adaptive_jax.config.keys import complete

SETTINGS = {
    "batches.layout": "streams",
    "batches.sequence_length": 4,
    "tokens_per_update": 8,
    "tokens_per_device": 8,
    "body.name": "lstm",
    "body.features": 8,
    "body.widths": (8,),
    "output.name": "softmax",
    "output.table.name": "tied",
}
GROC = {
    "input.name": "groc",
    "input.width": 4,
    "input.filters": ((2, 6),),
    "input.strides": (2,),
    "input.length": 6,
}

def get_config(row="tied"):
    return complete({"input.name": "lookup"} | SETTINGS | (GROC if row == "groc" else {}))
"""


def settings(tmp_path, **changes):
    (tmp_path / "small.py").write_text(CONFIG)
    (tmp_path / "words.jsonl").write_text(
        '{"word": "cat", "relations": ["dog"], "definition": "a animal"}\n'
    )
    for split in "train", "valid", "test":
        (tmp_path / f"{split}.txt").write_text("a cat and a dog\n" * 9)
    given = {
        "text": str(tmp_path),
        "lexicon": str(tmp_path / "words.jsonl"),
        "config": str(tmp_path / "small.py"),
        "rows": ["tied", "groc"],
        "repeats": 1,
        "json": None,
    }
    return types.SimpleNamespace(**given | changes)


def test_rows_are_timed_and_counted(tmp_path, capsys):
    """Ratios are to the first row; the second composes the vectors of all 5 words, one of which
    the lexicon has.
    """
    given = settings(tmp_path, json=str(tmp_path / "out.json"))
    grounding.main(given)
    assert "tied" in capsys.readouterr().out
    tied, groc = grounding.json.loads((tmp_path / "out.json").read_text())["rows"]
    assert (tied["ratio"], tied["flops_ratio"], tied["flops"]["composed"]) == (1.0, 1.0, 0.0)
    word = 3 * 8 * 6 + 6 * 12 + 6 * 8 + 24 * 8
    assert groc["flops"] == {"tokens": tied["flops"]["tokens"], "composed": 3 * 2 * 5 * word}
    assert groc["ratio"] > 0 and groc["coverage"] == {"relations": 0.2, "definitions": 0.2}
