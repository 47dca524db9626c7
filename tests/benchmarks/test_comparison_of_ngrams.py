"""Inputs with and without n-grams: equal sizes, equal times, bins by the words before."""

import json
from types import SimpleNamespace

import numpy as np

from benchmarks import ngrams


def test_models_have_as_many_parameters():
    """Those with n-grams to within 2 %, and one of words alone to within a tenth."""
    for corpus in ngrams.CORPORA:
        configs = ngrams.configs_of(corpus, "")
        sizes = {name: ngrams.parameters(config) for name, config in configs.items()}
        banded = sizes["banded n-grams"]
        assert all(abs(sizes[name] / banded - 1) < 0.02 for name in sizes if "n-grams" in name)
        wide = sizes.get(ngrams.WIDER, sizes["no narrow words"])
        assert 0.98 * banded <= wide < 1.1 * banded


def test_models_with_ngrams_take_the_time_of_words_alone(tmp_path, monkeypatch, capsys):
    """Every seed makes as many updates; a model that is as fast makes no more than words alone."""
    seconds = dict.fromkeys(ngrams.configs_of("penn_treebank", ""), 2.0) | {ngrams.WORDS: 1.0}
    seconds["counted n-grams"] = 0.9
    (tmp_path / "penn_treebank.json").write_text(json.dumps({"seconds": seconds}))
    made = []
    monkeypatch.setattr(ngrams, "measure", lambda config, workdir: made.append(config) or {})
    monkeypatch.setattr(ngrams, "write_json", lambda path, numbers: None)
    settings = SimpleNamespace(workdir=str(tmp_path), path="", seeds=["0", "1"])
    ngrams.train_all("penn_treebank", settings)
    whole, half = ngrams.UPDATES, ngrams.UPDATES // 2
    steps = [whole, whole, half, whole, half]  # the wider bodies come last
    assert [config["steps"] for config in made] == [*steps, *steps, whole, whole]
    assert [config["seed"] for config in made] == [0] * 5 + [1] * 5 + [0, 1]
    for config in made:
        schedule = config["schedule"]
        assert schedule["warmup_steps"] + schedule["cycle_steps"] == config["steps"]


def test_pairs_of_words_before():
    """The pair before a word is counted in the train split; bins leave out what is not scored."""
    train, text = np.array([3, 1, 2, 3, 1, 5]), np.array([3, 1, 4, 2, 3, 1])
    counts = ngrams.counts_of_pairs(train, text)
    assert counts.tolist() == [0, 0, 2, 0, 0, 1]
    losses = np.array([np.nan, 1.0, 2.0, 3.0, 4.0, 6.0])
    assert ngrams.means(losses, counts, (1,)) == {"0": (3, 8 / 3), "1": (1, 6.0), "2+": (1, 2.0)}
