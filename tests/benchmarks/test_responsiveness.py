"""Table 4 of Dauphin et al. 2017: bodies of every kind read both shapes."""

from types import SimpleNamespace

from benchmarks import responsiveness
from configs import billion_word
from tests import refuses


def flags(**changes):
    """Flags for a few tokens."""
    counts = {"sequences": 2, "length": 3, "tokens": 5, "repeats": 1, "json": None}
    return SimpleNamespace(**{"rows": ["lstm_2048", "gcnn_8b"], **counts} | changes)


def test_rows_read_many_sequences_and_one_text(monkeypatch, capsys):
    """A line for each row and measure; the paper's ratios beside ours."""
    full = responsiveness.config_of

    def small(row):
        config = full(row)
        config["data"]["vocabulary_size"] = 97
        config["output"]["table"]["cutoffs"] = (11, 40)
        few = {"blocks": ((1, 2, 16),), "form": "paper"} if row == "gcnn_8b" else {"widths": (16,)}
        config["body"] |= {"features": 16} | few
        return config

    assert not full("gcnn_8b")["body"]["weight_norm"] and len(billion_word.ROWS) > 2
    monkeypatch.setattr(responsiveness, "config_of", small)
    responsiveness.main(flags())
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1:3] for line in lines[-4:]] == [
        [f" `{row}` ", f" {measure} "]
        for measure in ("throughput", "responsiveness")
        for row in ("lstm_2048", "gcnn_8b")
    ]
    assert lines[-1].endswith("|  | 20.10 |") and lines[-3].endswith("| 1.06 | 1.01 |")


def test_flags_that_are_wrong():
    """One line says which."""
    with refuses("--rows=none"):
        responsiveness.main(flags(rows=["none"]))
    with refuses("--tokens"):
        responsiveness.main(flags(tokens=0))
