"""Scores of lines: each token once, after what the settings say and nothing else, whatever
lines are scored together.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax.data.batches.windows import Windows
from adaptive_jax.data.corpora.line_files import TextLine
from adaptive_jax.data.vocabulary.clusters import Header, write_clusters
from adaptive_jax.data.vocabulary.subwords import Subwords
from adaptive_jax.data.vocabulary.token_ids import TokenIds
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.numerics.batch import Batch
from adaptive_jax.scores import surprisal
from adaptive_jax.scores.scoring import score_split
from adaptive_jax.text.load import LoadedModel
from tests import refuses
from tests.random_runs import quiet, random_run

WINDOW, CONTEXT = 16, 8
COUNTS = {f"{'ab' * (n % 7)}{n}": 60 - n for n in range(58)}
WORDS = Vocabulary.build({"<eos>": 57, "<unk>": 3} | COUNTS)
LSTM = {
    "body": {
        "name": "lstm",
        "features": 16,
        "widths": (12, 16),
        "dropout": 0.0,
        "biases": 1,
    }
}
STREAMS = {"batches": {"sequence_length": WINDOW, "break_mode": "none", "layout": "streams"}}
CNN = {
    "name": "char_cnn",
    "width": 4,
    "filters": ((1, 6), (3, 8)),
    "highway_layers": 1,
    "length": 12,
}
CONV = {"body": {"name": "gated_conv", "features": 16, "blocks": ((2, 3, 16),)}}
LINES = [
    "0 ab1",
    "",
    "abab2 abab2 unheard 0 1 7 <unk>",
    " ".join(f"ab{n}" for n in range(50)),
    "  ab1\tab8  ",
    "7",
    "",
    "21 22 23",
]


def opened(config, layers=(), vocabulary=WORDS, break_mode="none"):
    """A model of random parameters, whose words differ much in probability."""
    config = config(
        **{
            "body.features": 16,
            "body.feed_forward": 16,
            "batches.sequence_length": WINDOW,
            "batches.break_mode": break_mode,
            "input.cutoffs": (10, 30),
            "tokens_per_device": 64,
        }
    )
    return LoadedModel(random_run(config | dict(layers), vocabulary, 1.5))


@pytest.fixture(scope="module")
def model(config):
    return opened(config)


@pytest.fixture(scope="module")
def lstm(config):
    return opened(config, LSTM | STREAMS)


class Twin:
    """The distribution of each word of a row that stands alone, one row at a time."""

    def __init__(self, model, longest):
        run, self.longest, self.eos = model.run, longest, model.run.vocabulary.eos

        @jax.jit
        def log_probs(seen):
            zeros = jnp.zeros(seen.shape, jnp.int32)
            positions = jnp.arange(longest, dtype=jnp.int32)[None]
            variables = {"params": run.params, "lexicon": run.lexicon}
            return run.model.apply(
                variables,
                Batch(seen, zeros, zeros, jnp.zeros(1, jnp.int32)),
                positions,
                method="log_probs",
            )[0]

        self.log_probs = log_probs

    def __call__(self, ids, before=None):
        """float32 `[tokens, words]`, for a row of these tokens."""
        seen = np.zeros((1, self.longest), np.int32)
        seen[0, : len(ids)] = [self.eos if before is None else before, *ids[:-1]]
        return np.asarray(self.log_probs(seen))[: len(ids)]

    def in_windows(self, given, ids, window, context):
        """As `__call__` for `ids` after `given`, read in windows."""
        whole, found, begin = [*given, *ids], [], 0
        while begin < len(ids):
            fits = window - min(len(given), context) if begin == 0 else window - context
            end = min(len(ids), begin + fits)
            start = max(0, len(given) + end - window)
            row = self(whole[start : len(given) + end], whole[start - 1] if start else None)
            found.append(row[begin - end :])
            begin = end
        return np.concatenate(found)


@pytest.fixture(scope="module")
def twin(model):
    return Twin(model, WINDOW)


@pytest.fixture(scope="module")
def long_twin(lstm):
    return Twin(lstm, 128)


def tokens_of(model, line):
    return model.encode(line + "\n")


def of_targets(log_probs, ids):
    return log_probs[np.arange(len(ids)), ids]


@pytest.mark.parametrize("given", ["", "ab1 abab2\n7", "\n".join(LINES)])
def test_lines_alone_in_windows(model, twin, given, monkeypatch):
    """A transformer sees the line and what is given, in windows where they are longer than it;
    and rank and entropy are right.
    """
    context = model.encode(given)
    monkeypatch.setattr(surprisal, "FIRST", 3)  # lines scored together
    for line, scored in zip(
        LINES, model.score(LINES, given=given, context=CONTEXT, rank_and_entropy=True), strict=True
    ):
        ids = tokens_of(model, line)
        expected = twin.in_windows(context.tolist(), ids.tolist(), WINDOW, CONTEXT)
        assert scored.text == line and scored.words == (*line.split(), "<eos>")
        np.testing.assert_allclose(scored.log_probs, of_targets(expected, ids), atol=2e-5)
        np.testing.assert_array_equal(
            scored.ranks, 1 + (expected > of_targets(expected, ids)[:, None]).sum(1)
        )
        np.testing.assert_allclose(
            scored.entropies, -(np.exp(expected) * expected).sum(1), rtol=1e-4
        )


@pytest.mark.parametrize("given", ["", "ab1 abab2\n7 " + "ab8 " * 20])
def test_lines_alone_with_a_carry(lstm, long_twin, given):
    """A run on streams reads a line of any length as one."""
    context = lstm.encode(given).tolist()
    for line, scored in zip(LINES, lstm.score(LINES, given=given), strict=True):
        ids = tokens_of(lstm, line).tolist()
        np.testing.assert_allclose(
            scored.log_probs, of_targets(long_twin(context + ids)[len(context) :], ids), atol=2e-5
        )


@pytest.mark.parametrize("layers", [{}, LSTM | STREAMS], ids=["window", "carry"])
@pytest.mark.parametrize("given", ["", "9 9 8"])
def test_lines_alone_without_an_end(config, layers, given):
    """Of ids none of which ends a document, a line was scored after the last id of the line before
    it, and an empty line alone raised an IndexError.
    """
    model = opened(config, layers, TokenIds.of_counts(np.arange(60, 0, -1)))
    lines = ["1 2 3", "4 5 6 7", "", "4 5 6 7"]
    settings = {"given": given, "rank_and_entropy": True}
    for line, text in zip(model.score(lines, **settings), lines, strict=True):
        (alone,) = model.score([text], **settings)
        np.testing.assert_allclose(line.log_probs, alone.log_probs, atol=1e-5)
        assert line.ranks.tolist() == alone.ranks.tolist() and line.words == alone.words


@pytest.mark.parametrize(
    "break_mode, context", [("none", CONTEXT), ("complete", CONTEXT), ("complete_doc", 0)]
)
def test_a_running_text_is_scored_as_a_split(model, break_mode, context, monkeypatch):
    """Whatever lines are read at a time, also where each is scored when it comes, and where
    evaluation breaks in another way than training.
    """
    config = model.run.config | {"evaluate_break_mode": break_mode}
    assert config["batches"]["break_mode"] == "none"
    model = LoadedModel(model.run.with_parts(config=config))
    ids = model.encode("".join(f"{line}\n" for line in LINES * 3))
    nll, _ = score_split(
        model.run,
        ids,
        Windows(WINDOW, context, break_mode, "packed", rows=4),
        quiet,
    )
    for most, eager in (1, False), (1_000, False), (1_000, True):
        monkeypatch.setattr(surprisal, "FIRST", most)
        monkeypatch.setattr(surprisal, "MOST", most)
        scored = list(model.score(LINES * 3, "previous", context=context, eager=eager))
        assert [line.text for line in scored] == LINES * 3
        np.testing.assert_allclose(
            np.concatenate([line.log_probs for line in scored]), -nll[~np.isnan(nll)], atol=2e-5
        )
    found = model.perplexity(LINES * 3, context=context)
    assert found == pytest.approx(float(np.exp(np.nanmean(nll, dtype=np.float64))), rel=1e-5)
    assert [len(line.words) for line in scored[:2]] == [3, 0 if break_mode == "complete_doc" else 1]


def test_a_running_text_with_a_carry(lstm, long_twin):
    """A body with a carry sees all text before, also what was given, line by line or at once."""
    given = lstm.encode("7 ab8\n").tolist()
    ids = lstm.encode("".join(f"{line}\n" for line in LINES)).tolist()
    expected = of_targets(long_twin(given + ids)[len(given) :], ids)
    for eager in False, True:
        scored = lstm.score(LINES, "previous", given="7 ab8\n", eager=eager)
        np.testing.assert_allclose(
            np.concatenate([line.log_probs for line in scored]), expected, atol=2e-5
        )


def test_an_eager_line_does_not_wait(model, twin):
    """Of a running text, too, each line sees the `context` tokens before it."""
    read = []
    scored = model.score(
        map(lambda line: read.append(line) or line, LINES), "previous", context=CONTEXT, eager=True
    )
    first = next(scored)
    assert read == LINES[:1]
    ids = tokens_of(model, LINES[0])
    np.testing.assert_allclose(first.log_probs, of_targets(twin(ids.tolist()), ids), atol=2e-5)
    next(scored)
    third = next(scored)
    before, ids = tokens_of(model, "\n".join(LINES[:2])), tokens_of(model, LINES[2])
    expected = twin(np.concatenate([before, ids]).tolist())[len(before) :]
    np.testing.assert_allclose(third.log_probs, of_targets(expected, ids), atol=2e-5)


def test_text_that_sentences_see(model):
    """Of what is given, a run of separate sentences sees the last one, if it is not complete."""
    config = model.run.config | {"batches": model.run.config["batches"] | {"break_mode": "eos"}}
    model = LoadedModel(model.run.with_parts(config=config))
    for given, seen in ("ab1 abab2\n7", "7"), ("ab1 abab2\n", ""):
        for one, other in zip(
            model.score(LINES, given=given), model.score(LINES, given=seen), strict=True
        ):
            np.testing.assert_array_equal(one.log_probs, other.log_probs)
    with refuses("one sentence", "break_mode=eos"):
        list(model.score(["7\n0 ab1"]))


def test_unseen_words_and_frequencies(model):
    """A word that became `<unk>` is marked, as its probability is not its own."""
    line = next(model.score(["0 unheard <unk> ab1"]))
    assert line.unseen.tolist() == [False, True, False, False, False]
    assert line.frequencies.tolist() == [60, 0, 3, 59, 57]
    assert line.log_probs[1] < 0 and line.log_prob == pytest.approx(line.log_probs.sum())
    assert line.perplexity == pytest.approx(np.exp(-line.log_probs.mean()))
    assert line._replace(log_probs=line.log_probs - np.inf).perplexity == np.inf
    # Of a converted list of words every frequency was 1.
    of_list = Vocabulary(WORDS.words, np.ones(60, np.int64))
    line = next(LoadedModel(model.run.with_parts(vocabulary=of_list)).score(["0 unheard"]))
    assert line.frequencies is None and line.unseen.tolist() == [False, True, False]


@pytest.mark.parametrize("kind", ["composed", "clusters", "convolution"])
def test_all_kinds_of_models(config, kind, tmp_path):
    """Vectors composed from letters, clusters in an order of their own, and the carry of a
    convolution.
    """
    layers = CONV | STREAMS
    if kind == "composed":
        layers = {"input": CNN, "output": {"name": "softmax", "table": {"name": "tied"}}}
    if kind == "clusters":
        order = np.random.default_rng(0).permutation(len(WORDS))
        header = Header("kmeans", 0, WORDS.digest, (10, 20, 30))
        write_clusters(tmp_path / "clusters.txt", header, [WORDS.words[i] for i in order])
        layers = {
            "output": {
                "name": "adaptive",
                "clusters": str(tmp_path / "clusters.txt"),
                "table": {"name": "tied"},
            }
        }
    model, given, lines = opened(config, layers), "7 ab8\n", ["0 ab1 unheard", "", "7 7 7"]
    twin, context = Twin(model, WINDOW), model.encode(given).tolist()
    for line, scored in zip(
        lines, model.score(lines, given=given, rank_and_entropy=True), strict=True
    ):
        ids = tokens_of(model, line).tolist()
        expected = twin(context + ids)[len(context) :]
        np.testing.assert_allclose(scored.log_probs, of_targets(expected, ids), atol=2e-5)
        np.testing.assert_array_equal(
            scored.ranks, 1 + (expected > of_targets(expected, ids)[:, None]).sum(1)
        )


def test_embeddings_are_what_the_body_reads(model):
    """Rows of the words asked for, as the input composes them; unknown words are refused."""
    words = ["7", "<eos>", "ab1"]
    ids = np.array([[WORDS.index[word] for word in words]])
    vectors = lambda given: model.run.model.apply(given, ids, method=lambda m, ids: m.input(ids))
    expected = jax.jit(vectors)({"params": model.run.params})[0]
    found = model.embeddings(words)
    assert found.dtype == np.float32 and found.shape == (3, 16)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    for words, names in (["7", "unheard"], ("'unheard'", "60 words")), ("7 ab1", ("words",)):
        with refuses(*names):
            model.embeddings(words)


def test_words_of_several_units(config):
    """The log-probability of a word is the sum of those of its units."""
    vocabulary = Subwords.build(COUNTS | {"<eos>": 57}, codes=30)
    model, line = opened(config, {}, vocabulary), "0 ab1 Ж"
    [scored], ids = model.score([line]), tokens_of(model, line)
    log_probs = of_targets(Twin(model, WINDOW)(ids.tolist()), ids)
    ends = np.flatnonzero(vocabulary.ends_word[ids]) + 1
    assert scored.words == (*line.split(), "<eos>") and len(ends) == 4 < len(ids)
    np.testing.assert_allclose(
        scored.log_probs,
        [sum(log_probs[a:b]) for a, b in itertools.pairwise([0, *ends])],
        atol=5e-5,
    )
    # A word's probability holds its end: words of one unit, and those that begin with a unit that
    # ends none, have all of the probability.
    first = np.exp(Twin(model, WINDOW)([0])[0].astype(np.float64))
    closed = [word for word in vocabulary.words if word.endswith("▁") and len(word) > 1]
    words = [word.removesuffix("▁") for word in closed]
    assert [vocabulary.encode_words([word])[1].tolist() for word in words] == [[1]] * len(words)
    of_words = sum(np.exp(line.log_probs[0]) for line in model.score(words))
    others = [i for i, word in enumerate(vocabulary.words) if word not in closed]
    assert of_words > 0.01 and of_words + first[others].sum() == pytest.approx(1, abs=1e-5)
    assert scored.unseen is None and scored.frequencies is None
    with refuses("rank and entropy"):
        model.score([line], rank_and_entropy=True)
    with refuses("several units"):
        model.embeddings(["0", "Ж"])


@pytest.mark.parametrize("layers", [(), LSTM | STREAMS])
def test_units_may_cross_the_border_of_given_text(config, layers):
    """log p(b | a) >= log p(ab) for cuts at any character: the last word of a has no end, and is
    written in one with b.
    """
    vocabulary = Subwords.build(COUNTS | {"<eos>": 57}, codes=60)
    model, text = opened(config, layers, vocabulary), "ab1 Ж abab12\n7 ab8"
    whole = {"window": 2 * WINDOW}  # all is seen
    assert len(model.encode(text)) < WINDOW
    joint = next(model.score([text])).log_prob
    for cut in range(len(text) + 1):
        a, b = text[:cut], text[cut:]
        [alone] = model.score([b], given=a, **whole)
        [follows] = model.score([b], "previous", given=a, **whole)
        assert alone.log_prob >= joint - 1e-4 and follows.words == alone.words
        np.testing.assert_allclose(follows.log_prob, alone.log_prob, atol=1e-4)
        if cut == 0 or a[-1].isspace():
            assert alone.words == (*b.replace("\n", " <eos> ").split(), "<eos>")
    before, whole = next(model.score(["abab1"])), next(model.score(["2"], given="abab1"))
    assert whole.words == ("abab12", "<eos>") != before.words
    [after] = model.score([" 2"], given="abab12")  # the end of its word is still to come
    assert after.words == ("abab12", "2", "<eos>") and after.log_probs[0] > before.log_probs[0]


def test_settings_that_do_not_fit(model, lstm, config):
    """Settings that do not fit are refused in a short line: a string scored as a list would be
    letters.
    """
    sentences = opened(config, break_mode="eos")
    wrong = [
        (lambda: model.score("0 ab1"), ("lines", "'0 ab1'")),
        (lambda: model.score(None), ("lines", "None")),
        (lambda: list(model.score([1, 2])), ("text", "1")),
        (lambda: model.encode(b"0"), ("text", "b'0'")),
        (lambda: model.score(["0"], windwo=3), ("windwo=3", '"window"')),
        (lambda: model.score(["0"], window="3"), ("window",)),
        (lambda: lstm.score(["0"], context=3), ("context=3",)),
        (lambda: model.score(["0"], "before"), ("context_from='before'",)),
        (lambda: model.score(["0"], context=WINDOW), ("window=16", "context=16")),
        (lambda: sentences.score(["0"], "previous"), ("context_from='previous'", "sentences")),
        (lambda: model.perplexity([]), ("lines",)),
    ]
    for call, names in wrong:
        with refuses(*names) as error:
            call()
        assert len(str(error.value)) < 220


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("kind", ["model", "lstm"])
def test_documents_begin_anew(kind, eager, request, monkeypatch):
    """The items of a study leaked into each other, and a blank line was scored as a sentence. The
    numbers of a document are those that it has alone, by blank lines as by files.
    """
    monkeypatch.setattr(surprisal, "FIRST", 2)
    monkeypatch.setattr(surprisal, "MOST", 4)  # documents end in the middle of blocks
    model = request.getfixturevalue(kind)
    documents = [LINES[:1], LINES[2:5], LINES[3:4] * 3, LINES[5:6], LINES[2:4]]
    texts = ["", *(line for document in documents for line in (*document, "", " "))]
    files = [
        TextLine(line, number, str(document))
        for document, lines in enumerate(documents)
        for number, line in enumerate(lines, start=1)
    ]
    for before in "", "ab1 abab2\n7":
        alone = [
            line
            for document in documents
            for line in model.score(document, "previous", given=before)
        ]
        options = {"given": before, "eager": eager}
        for lines in (
            model.score(texts, "previous", documents="blank", **options),
            model.score(files, "previous", **options),
        ):
            for line, expected in zip(lines, alone, strict=True):
                assert line.text == expected.text
                np.testing.assert_allclose(line.log_probs, expected.log_probs, atol=3e-5)
    assert [line.file for line in model.score(files)] == [line.file for line in files]
    texts = list(itertools.chain(*documents))
    leaked = [line.log_prob for line in model.score(texts, "previous")]
    assert not np.allclose(leaked, [line.log_prob for line in model.score(texts)])
