"""examples/notebook.ipynb: every cell runs, with a few updates in place of hundreds."""

import os

import pytest

from tests.pages import ROOT

nbformat = pytest.importorskip(
    "nbformat", reason="nbformat is not installed: pip install -e '.[test]'"
)
nbclient = pytest.importorskip(
    "nbclient", reason="nbclient is not installed: pip install -e '.[test]'"
)
pytest.importorskip("ipykernel", reason="ipykernel is not installed: pip install -e '.[test]'")
PATH = ROOT / "examples" / "notebook.ipynb"


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    """It trains, plots, scores and writes without an error, and the losses that it plots are
    those of the updates asked for.
    """
    notebook = nbformat.read(PATH, 4)
    [settings] = [cell for cell in notebook.cells if "STEPS = 300" in cell.source]
    settings.source = settings.source.replace("STEPS = 300", "STEPS = 3")
    [training] = [cell for cell in notebook.cells if "get_config()" in cell.source]
    small = {
        "body.layers": 1,
        "tokens_per_update": 256,
        "evaluate_every": 0,
        "log_every": 1,
    }
    training.source = training.source.replace(
        "train(", f"config.update_from_flattened_dict({small})\ntrain("
    )
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": tmp_path}}
    ).execute()
    printed = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ())
    )
    assert "nats in all, perplexity" in printed
    drawn = [
        output
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if "image/png" in output.get("data", {})
    ]
    assert len(drawn) == 2
    lines = (tmp_path / "runs" / "notebook" / "metrics.jsonl").read_text().splitlines()
    assert '"step": 3' in lines[-1]


def test_the_notebook_was_run():
    """It shows what its cells print, from the first to the last, and no error."""
    cells = [cell for cell in nbformat.read(PATH, 4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [
        output for cell in cells for output in cell.outputs if output.output_type == "error"
    ]
