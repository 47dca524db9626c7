"""Runs of rows at their own size: what is kept of them for the repository."""

import json
from pathlib import Path
from types import SimpleNamespace

from adaptive_jax.config.keys import complete
from benchmarks import published


def test_places_of_a_machine_are_not_kept(tmp_path, monkeypatch):
    """Nobody else has them: the text's stood in a config that was kept."""
    home, corpus, lexicon = (tmp_path / name for name in ("home", "texts", "wordnet"))
    target = published.Target("penn_treebank:groc_lookup", home)
    target.workdir.mkdir(parents=True)
    (home / "code").symlink_to(published.ROOT)
    config = complete({"data.path": str(corpus)}) | {"lexicon": str(lexicon)}
    (target.workdir / "config.json").write_text(json.dumps(config))
    (target.workdir / "plan.json").write_text(json.dumps({"clone": str(home / "code")}))
    line = {"step": 9, "train/nll": 5.0, "train/step_seconds": 400.0}
    (target.workdir / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    monkeypatch.setattr(published, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(published, "DATA", SimpleNamespace(value=str(corpus)))
    flag = f"--config.input.lexicon={lexicon}"
    monkeypatch.setattr(published, "FLAGS", SimpleNamespace(value=[flag]))
    result = published.keep(target)
    assert (result["updates"], result["hours"], result["ended"]) == (9, 1.0, False)
    files = [*(tmp_path / "kept" / target.name).iterdir()]
    assert len(files) == 4 and not [file for file in files if str(tmp_path) in file.read_text()]


def test_kept_configs_name_no_place_of_a_machine():
    """Those in the repository."""
    for path in Path(published.__file__).with_name("published").glob("*/config.json"):
        assert '": "/' not in path.read_text(), path
