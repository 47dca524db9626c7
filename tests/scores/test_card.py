"""The parts of a result besides its perplexity, several contexts, targets, and scores that are not
finite.
"""

import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptive_jax.config import flags as config_flags
from adaptive_jax.config.keys import complete
from adaptive_jax.data.corpora.published import CORPORA
from adaptive_jax.data.vocabulary.subwords import Subwords
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.runs.run import Run
from adaptive_jax.runs.start import write_published
from adaptive_jax.scores import evaluate as evaluation
from adaptive_jax.scores.card import by_bin, lines, metadata, published
from adaptive_jax.scores.evaluate import Request, evaluate, evaluate_contexts
from adaptive_jax.scores.frequency import Words, words_of
from adaptive_jax.scores.scores import Scores, lengths_of, perplexity_text
from adaptive_jax.scores.scoring import Evaluation
from tests import refuses

WORDS = Vocabulary.build({"<eos>": 9, "the": 7, "é": 5, "naïve": 4, "<unk>": 2, "hat": 1})
UNITS = Subwords.build({"low": 5, "lower": 2, "newest": 6, "widest": 3, "<eos>": 4}, 9)


def without_last(vocabulary, count):
    """The vocabulary before its last words were added."""
    return Vocabulary(vocabulary.words[:-count], vocabulary.counts[:-count])


@given(
    text=st.lists(
        st.lists(st.sampled_from(["the", "é", "naïve", "hat", "lowest", "日本"]), max_size=4),
        min_size=1,
        max_size=5,
    )
)
def test_characters_are_those_of_the_text(text):
    """With spaces and line ends; of units, too, which spell every word; empty lines among them."""
    lines = [" ".join(line) for line in text]
    written = "".join(f"{line}\n" for line in lines)
    count = len(written), len(written.encode())
    assert lengths_of(UNITS.encode_lines(lines), UNITS) == count
    in_vocabulary = not any(word not in WORDS.words for line in text for word in line)
    expected = count if in_vocabulary else (None, None)
    assert lengths_of(WORDS.encode_lines(lines), WORDS) == expected


def test_no_characters():
    """A text with an unknown word, or with no words, has no number of characters."""
    assert lengths_of(WORDS.encode_lines(["the <unk>"]), WORDS) == (None, None)
    assert lengths_of(np.zeros(0, np.int32), WORDS) == (None, None)


def test_a_perplexity_of_text_without_spaces_has_few_digits():
    """It had up to 250 of them."""
    assert perplexity_text(999_999.0) == "999,999.00"
    texts = ["1.2e+06", "3.0e+250", "above 1e+304"]
    assert [*map(perplexity_text, (1.25e6, 3e250, math.inf))] == texts


def test_perplexity_by_bin():
    """Words are binned by how often training has them, new ones apart; losses are of words, not of
    their units; a bin without words that count is left out.
    """
    ends, counts = np.array([0, 1, 3, 4, 5]), np.array([1_001, 10, 11, 0, 5])
    words = Words(np.arange(6, dtype=np.int32), ends, np.zeros(5, np.uint32), 9, counts)
    bins = by_bin(words, np.array([1.0, 3.0, 2.0, 3.0, 7.0, np.nan]), (10, 1_000))
    quarter = {"words": 1, "share": 0.25}
    assert bins == [
        {"least": 0, "most": 0, "perplexity": pytest.approx(math.exp(7))} | quarter,
        {"least": 1, "most": 10, "perplexity": pytest.approx(math.exp(3))} | quarter,
        {"least": 11, "most": 1_000, "perplexity": pytest.approx(math.exp(5))} | quarter,
        {"least": 1_001, "most": None, "perplexity": pytest.approx(math.exp(1))} | quarter,
    ]
    text = list(lines({"bins": bins, "bits_per_character": None}))
    assert text == [
        "perplexity by frequency in training: new 1,096.63 (25.0%), 1-10 20.09 (25.0%), 11-1K"
        " 148.41 (25.0%), 1K+ 2.72 (25.0%)"
    ]


def test_a_card_is_of_the_tokens_that_count():
    """Bits a character and a byte are those of all tokens that count."""
    text = words_of(WORDS.encode_lines(["the é", "", "hat"]), WORDS, {})
    nll = np.array([1, 2, 3, np.nan, 5, 6], np.float32) * math.log(2)
    result = metadata(WORDS, text, nll, (5, 7))
    summary = Scores(text.ids, nll).summary(WORDS)
    assert (summary["characters"], summary["bits_per_character"]) == (10, pytest.approx(1.7))
    assert (summary["bytes"], summary["bits_per_byte"]) == (11, pytest.approx(17 / 11))
    shares = [(part["most"], part["share"]) for part in result["bins"]]
    assert shares == [(5, 0.4), (7, 0.2), (None, 0.4)]
    assert result["vocabulary"] == {"size": 6, "fingerprint": WORDS.digest, "unit": "word"}
    assert {"python", "device", "jax"} <= result["versions"].keys()


def test_words_without_counts():
    """Of a converted list of words nothing is said by frequency."""
    words = Vocabulary(("a", "b", "<eos>"), np.ones(3, np.int64))
    result = metadata(words, words_of(np.array([0, 1, 2]), words, {}), np.ones(3), (10,))
    assert result["bins"] == [] and list(lines(result | {"bits_per_character": None})) == []


def test_the_published_text_is_known_by_its_words():
    """Wherever it lies; another text of that corpus is none, nor is a mixture with other scores.
    Of a run's own text, no other text is.
    """
    words = CORPORA["wikitext103"].words["test"]
    for corpus, request, count, comparable in (
        ("wikitext103", Request(), words, True),
        ("wikitext103", Request(data_path="/copy"), words, True),
        ("wikitext103", Request(), words - 1, False),
        ("wikitext103", Request(uniform=0.1), words, False),
        ("wikitext103", Request(share=0.5), words, False),
        ("wikitext103", Request(vocabulary="union"), words, False),
        ("wikitext103", Request(method="dynamic"), words, False),
        ("text_files", Request(), 9, True),
        ("text_files", Request(data_path="/other"), 9, False),
    ):
        config = {"data": {"corpus": corpus}}
        assert evaluation._is_published(request, config, count) == comparable


def test_scores_that_are_not_finite():
    """The error counts them; tokens that do not count are left out, and new words may have
    probability 0.
    """
    run = Run(None, {}, without_last(WORDS, 1), vocabulary=WORDS)
    run = run.with_parts(config={"dtype": "bfloat16"}, step=40)
    ids = np.array([0, 5, 1, 2, 3], np.int32)
    job = Evaluation(run, ids, None, 0.0, 1.0, None, None, None, None)
    with refuses("2 of 4", "token 2", "step 40", "bfloat16"):
        job.with_uniform(np.array([1, np.inf, np.inf, np.nan, np.inf], np.float32))
    finite = np.array([1, np.inf, 2, np.nan, 3], np.float32)
    np.testing.assert_array_equal(job.with_uniform(finite), finite)


def test_a_run_of_damaged_parameters(trained_copy, monkeypatch):
    """Fails in one line, and leaves no result."""
    run = Run.open(trained_copy, "latest")
    broken = run.with_parts(params=jax.tree.map(lambda a: a + np.nan, run.params))
    monkeypatch.setattr(Run, "params", broken.params)
    with refuses("426 of 426"):
        evaluate(trained_copy, Request(window=10))
    assert not list(trained_copy.glob("eval/test-10-*"))


def test_several_contexts(trained_copy, monkeypatch):
    """Each is what it is alone; the losses of its tokens lie beside it. Word vectors are composed
    once for all, which takes most of the time of a model that composes them.
    """
    request = Request("validation", checkpoint="latest", context=12)
    one, times, compose = evaluate(trained_copy, request), [], evaluation.composed
    monkeypatch.setattr(
        evaluation, "composed", lambda run, ids: times.append(0) or compose(run, ids)
    )
    results = evaluate_contexts(trained_copy, request, (0, 12, 0))
    assert len(times) == 1
    assert [result["settings"]["context"] for result in results] == [0, 12]
    now = {"seconds": 0, "date": ""}
    assert results[1] | now == one | now
    nll = np.load(trained_copy / "eval" / "validation-16-12-240.npy")
    assert np.mean(nll, dtype=float) == pytest.approx(one["nll"], rel=1e-6)


def test_the_command(trained_copy, quick_command, in_process):
    """Several contexts and a target: status 3 above it, 0 below, and 2 for what is none."""
    arguments = (
        "evaluate.py",
        f"--workdir={trained_copy}",
        "--split=validation",
        "--checkpoint=latest",
    )
    done = quick_command(*arguments, "--context=0,12", "--target_perplexity=1.5")
    assert done.returncode == 3, done.stderr
    paths = [line for line in done.stdout.splitlines() if line.endswith(".json")]
    best = min(json.loads(Path(path).read_text())["perplexity"] for path in paths)
    assert len(paths) == 2
    assert done.stderr == f"perplexity {best:.4f} is above --target_perplexity=1.5\n"
    assert in_process(*arguments, "--target_perplexity=1e6").returncode == 0
    for flag, says in [
        ("--context=0,many", "--context must be whole numbers, such as 10 or 10,100, got 0,many"),
        ("--context=", "--context must be whole numbers"),
        ("--target_perplexity=0", "--target_perplexity must be in (0, inf), got 0"),
    ]:
        done = in_process(*arguments, flag)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert done.stderr.startswith(f"error: {says}")


CONFIG = """
from configs import quickstart
from adaptive_jax.config.rows import Paper, Row

ROWS = {"small": Row("adp_t", paper=Paper(18.1, None, table="Table 7")), "own": Row("adp_t")}

def get_config(row="small"):
    return quickstart.get_config()
"""


def test_evaluations_that_change_updates_are_listed(tmp_path):
    """If the schedule depends on evaluations, another `evaluate_every` is a change of the row."""
    for name, changed in ("plateau", ["seed", "evaluate_every"]), ("constant", ["seed"]):
        config = complete({"schedule.name": name})
        write_published(tmp_path, config, {}, ["seed", "evaluate_every", "log_every"])
        assert json.loads((tmp_path / "published.json").read_text())["changed"] == changed


def test_other_words_are_a_difference_from_the_row(tmp_path):
    """A run on other words stood beside the paper's perplexity as if it were the row. Where the
    text lies is no difference.
    """
    for key in "data.words", "data.tokenizer":
        write_published(tmp_path, complete({}), {}, [key, "data.path"])
        assert json.loads((tmp_path / "published.json").read_text())["changed"] == [key]


def test_published_numbers(in_process, flags, tmp_path):
    """train.py keeps what the paper prints of its row, and which keys differ; a result shows
    it, of its own split.
    """
    (tmp_path / "mine.py").write_text(CONFIG)
    workdir = tmp_path / "run"
    _, *rest = flags(workdir, steps=1, evaluate_every=1, checkpoint_every=1)
    rest.append("--config.seed=0")  # as in the row
    done = in_process("train.py", f"--config={tmp_path / 'mine.py'}", *rest)
    assert done.returncode == 0, done.stderr
    changed = json.loads((workdir / "published.json").read_text())["changed"]
    assert {"steps", "body.layers", "optimizer.learning_rate"} <= set(changed)
    assert not {"data.path", "log_every", "tokens_per_device", "seed"} & set(changed)
    result = evaluate(workdir, Request("validation"))
    assert result["published"] == {
        "perplexity": 18.1,
        "row": "mine.py:small",
        "table": "Table 7",
        "changed": changed,
    }
    says = f"Table 7 prints 18.1 for mine.py:small; this run changes {', '.join(changed)}"
    assert list(lines(result))[-1] == says
    assert published(workdir, "test") is None and published(workdir, "train") is None


def test_rows_with_and_without_numbers(tmp_path):
    """Of the paper's files, of a row without numbers, and of a file without rows."""
    assert config_flags._read("configs/wikitext103.py:adp_t").published == {
        "validation": 19.79,
        "test": 20.51,
        "table": "Table 3",
        "row": "wikitext103.py:adp_t",
    }
    assert config_flags._read("configs/wikitext103.py").published["row"] == "wikitext103.py:adp_t"
    (tmp_path / "mine.py").write_text(CONFIG)
    assert config_flags._read(f"{tmp_path / 'mine.py'}:own").published is None
    (tmp_path / "mine.py").write_text("ROWS = [1]\ndef get_config():\n    return {}\n")
    assert config_flags._read(str(tmp_path / "mine.py")).published is None
