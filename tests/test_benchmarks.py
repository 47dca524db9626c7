"""The benchmarks' own parts that can go wrong unseen: the configs they train, and the section they write."""

import pytest

from adaptive_jax.plan import plan
from benchmarks import rows


@pytest.mark.parametrize("size", rows.SIZES)
def test_rows_differ_only_in_input_and_output(size):
    """Every row is planned at every size, with the same body, updates and schedule; the schedule is as long as the run."""
    configs = [rows.config_of(row, size, "") for row in rows.PAPER]
    for config in configs:
        plan(config, config["data"]["vocabulary_size"], 1)
        rates = config["optimizer"]
        assert config["steps"] == rates["warmup_steps"] + rates["cycle_steps"] * (2 ** rates["cycles"] - 1)
        assert {key: config[key] for key in config if key not in ("input", "output", "data")} == {
            key: configs[0][key] for key in configs[0] if key not in ("input", "output", "data")}
    layers = {repr((config["input"], config["output"], config["data"]["codes"])) for config in configs}
    assert len(layers) == len(rows.PAPER) == 8


def test_a_section_replaces_the_one_of_its_heading(tmp_path):
    """Other sections stay as they are; a new one comes last."""
    path = tmp_path / "RESULTS.md"
    path.write_text("# Results\n\nwords\n\n## One\n\n1\n\n## Two\n\n### Under\n\n2\n")
    rows.write_section(path, "## Three\n\n3\n")
    rows.write_section(path, "## One\n\nnew\n")
    assert path.read_text() == "# Results\n\nwords\n\n## Two\n\n### Under\n\n2\n\n## Three\n\n3\n\n## One\n\nnew\n"


def test_the_table_sets_ours_beside_the_papers():
    """One line a row: ours, then what the paper printed."""
    numbers = {"row": "adp_t", "validation": 123.44, "test": 119.96, "seconds": 61.2, "unigram": 900.0,
               "words_per_second": 20_000.4, "parameters": 2_500_000, "curve": [(1, 9.0)]}
    text = rows.table([numbers], "cpu")
    assert "| `adp_t` | 123.4 | 120.0 | 61 | 20,000 | 2.5M | 19.79 | 20.51 | 30 | 246.9M |" in text.splitlines()
    assert text.startswith(rows.heading("cpu"))
