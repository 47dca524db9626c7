"""Text that models write: against loops that compute everything anew, exhaustive search, and as
a user meets it.
"""

import json
import shutil
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

import adaptive_jax
from adaptive_jax.config.keys import complete
from adaptive_jax.data.vocabulary.clusters import Header, write_clusters
from adaptive_jax.data.vocabulary.lines import Lines
from adaptive_jax.data.vocabulary.subwords import Subwords
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.generation import generate
from adaptive_jax.generation.generate import DecodeState, ScoredTokens
from adaptive_jax.generation.next_token import Sample, TopK
from adaptive_jax.generation.options import Options
from adaptive_jax.text.load import LoadedModel
from tests import refuses
from tests.generation.test_next_token import chances, check_frequencies
from tests.random_runs import log_probs_of, random_run

WORDS = Vocabulary.build({"<eos>": 30, "<unk>": 20} | {f"w{n}": 19 - n for n in range(17)})
TINY = {
    "data.corpus": "text_files",
    "batches.sequence_length": 8,
    "body.features": 16,
    "body.layers": 1,
    "body.heads": 2,
    "body.feed_forward": 24,
    "input.name": "adaptive",
    "input.cutoffs": (7, 12),
    "input.factor": 2,
}
BODIES = {
    "lstm": {"body.name": "lstm", "body.features": 16, "body.widths": (12, 16)},
    "awd_lstm": {"body.name": "awd_lstm", "body.features": 16, "body.widths": (16,)},
    "gated_conv": {"body.name": "gated_conv", "body.features": 16, "body.blocks": ((2, 3, 16),)},
    "transformer": {},
}
CNN = {
    "input.name": "char_cnn",
    "input.width": 4,
    "input.filters": ((1, 6), (3, 8)),
    "input.highway_layers": 1,
    "input.length": 8,
    "output.name": "softmax",
    "output.table.name": "tied",
}


def fresh(vocabulary=WORDS, scale=3.0, **changes):
    """A model with random parameters, larger than usual, so that words differ in probability."""
    drop = [key for key in TINY if key.startswith("body.") and "body.name" in changes]
    drop += [key for key in TINY if key.startswith("input.") and "input.name" in changes]
    config = complete({key: value for key, value in TINY.items() if key not in drop} | changes)
    return LoadedModel(random_run(config, vocabulary, scale))


@pytest.fixture(scope="module")
def model(trained):
    """The small trained run: a transformer with a window of 16 tokens and two tails."""
    return adaptive_jax.load(trained)


@pytest.fixture(scope="module")
def slow(model):
    return log_probs_of(model.run)


def test_a_model_whose_workdir_is_gone_scores(trained, tmp_path):
    """All of it is read when it is opened: a part that is read when it is first used would not be
    there any more.
    """
    copy = shutil.copytree(trained, tmp_path / "run")
    model = adaptive_jax.load(copy)
    shutil.rmtree(copy)
    assert model.perplexity([" ".join(model.run.vocabulary.words[-3:])]) > 1
    assert model.run.identity


def test_load_opens_a_run(model, trained, text):
    """`load` gives the newest or the asked checkpoint, its words, and text that comes back as it
    was.
    """
    assert isinstance(model, adaptive_jax.LoadedModel)
    assert model.run.step == 240 and len(model.run.vocabulary) == 122
    assert repr(model) == "<LoadedModel adaptive → transformer → adaptive, 122 words, step 240>"
    line = (text / "test.txt").read_text().splitlines()[0]
    ids = model.encode(line + "\n")
    assert ids.dtype == np.int32 and ids[-1] == model.run.vocabulary.eos
    assert model.decode(ids) == line + "\n"
    assert adaptive_jax.load(str(trained), 200).run.step == 200


def test_a_loop_without_a_cache_writes_the_same(model, slow):
    """Greedily: the likeliest word after the tokens of a window, which slides: when it is full,
    half of it stays.
    """
    [text] = model.continuations("the t1w0", words=30, temperature=0, avoid=())
    tokens, seen = [model.run.vocabulary.eos, *model.encode("the t1w0")], 3
    total = 0.0
    for word in text.tokens:
        seen = 8 if seen == 16 else seen
        expected = slow(tokens[-seen:])
        assert word == np.argmax(expected)
        total += expected[word]
        tokens.append(word)
        seen += 1
    assert len(text.tokens) == 30
    np.testing.assert_allclose(text.log_prob, total, rtol=1e-4)
    # A space that the prompt has is not written twice, whole or in pieces.
    assert text.text.startswith(" ")
    spaced = dict(prompt="the t1w0 ", words=30, temperature=0, avoid=())
    assert model.generate(**spaced) == text.text[1:]
    assert "".join(model.stream(**spaced)) == text.text[1:]


def written(workdir):
    """Text that a run writes by each way, and what it says of the words of a text: what is exact,
    and numbers.
    """
    model, ways = adaptive_jax.load(workdir, "latest"), ({"temperature": 0}, {"top_k": 5})
    ways += {"beams": 3, "samples": 3}, {"samples": 2, "seed": 1}, {"top_p": 0.9}
    texts = [text for way in ways for text in model.continuations("the t1w0", words=12, **way)]
    lines = list(model.score(["the t1w0 the t1w2", "", "the t3w1"], rank_and_entropy=True))
    words = model.next_words("the t1w0", k=5)
    exact = [text.text for text in texts], [word for word, _ in words]
    numbers = [text.log_prob for text in texts] + [probability for _, probability in words]
    for line in lines:
        exact += (line.ranks.tolist(),)
        numbers += [*line.log_probs, *line.entropies]
    return [*exact], [float(number) for number in numbers]


WRITTEN = """
import json, sys
from tests.generation.test_generation import written
print(json.dumps(written(sys.argv[1])))
"""


@pytest.mark.parametrize("changes", [{}, {"fsdp": 4, "shard_words": True}])
def test_eight_devices_write_alike(trained, eight, changes, tmp_path):
    """Text, ranks, log-probabilities and entropies are those of one device, also where each has
    words of its own.
    """
    workdir = shutil.copytree(trained, tmp_path / "run")
    path = workdir / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    exact, numbers = written(workdir)
    texts, others = json.loads(eight(WRITTEN, workdir))
    assert texts == exact and len(numbers) > 20
    np.testing.assert_allclose(others, numbers, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("body", BODIES)
def test_states_remember_what_they_have_read(body):
    """Every body: a prompt in pieces, words one by one, rows taken in another order; the twin
    reads all from the beginning.
    """
    loaded = fresh(**BODIES[body])
    log_probs, size = log_probs_of(loaded.run), len(WORDS)
    options = Options(window=16 if body == "transformer" else 0)
    state = DecodeState(loaded.decoder, np.arange(4, 14, dtype=np.int32) % size, options, rows=2)
    for words in (1, 2), (5, 9):
        state.read(np.array(words, np.int32), np.zeros(2))
    state.take(np.array([1, 0], np.int32))
    state.read(np.array([4, 6], np.int32), np.zeros(2))
    np.testing.assert_array_equal(state.tokens[:, 11:], [[2, 9, 4], [1, 5, 6]])
    best = state.top_k(size)
    for row, tokens in enumerate(state.tokens):
        expected = log_probs(tokens)
        np.testing.assert_allclose(best.log_probs[row], np.sort(expected)[::-1], atol=1e-4)
        np.testing.assert_allclose(expected[best.ids[row]], best.log_probs[row], atol=1e-4)


def test_beam_search_with_beams_enough_is_exhaustive():
    """All texts of two words, and those whose line ends sooner, against their enumeration."""
    loaded = fresh()
    log_probs, eos, size = log_probs_of(loaded.run), WORDS.eos, len(WORDS)
    first = log_probs([eos, 5])
    texts = {(eos,): first[eos]}
    for word in set(range(size)) - {eos}:
        after = log_probs([eos, 5, word])
        texts |= {(word, last): first[word] + after[last] for last in range(size)}
    ranked = sorted(texts, key=lambda text: -texts[text])
    continuations = loaded.continuations(
        WORDS.words[5], words=2, lines=1, beams=size, samples=10, avoid=()
    )
    assert [tuple(one.tokens) for one in continuations] == ranked[:10]
    np.testing.assert_allclose(
        [one.log_prob for one in continuations], [texts[text] for text in ranked[:10]], atol=1e-4
    )


def test_a_beam_that_still_spells_the_prompt_closes_no_tail():
    """Its next token is fixed, so its predictions are not read; those of the other beam lost words
    of tails that were less probable than they.
    """
    loaded = fresh(**{"output.name": "adaptive", "output.table.name": "tied"})
    options, prompt = Options(words=9, avoid=(), beams=2, samples=2), np.array([5, 6], np.int32)
    for word in range(len(WORDS)):
        state = DecodeState(loaded.decoder, prompt, options, 2)
        texts = [([3, 4, 4], -0.1), ([word], -8.0)]
        state.begin([ScoredTokens(np.array(tokens, np.int32), sums) for tokens, sums in texts])
        state.read(np.array([3, word], np.int32), np.zeros(2))
        expected = -np.sort(-state.log_probs()[1])[:4]
        np.testing.assert_allclose(state.top_k(4).log_probs[1], expected, rtol=1e-4)


def test_one_beam_is_greedy(model):
    """Its log-probability too, of texts of several windows."""
    for words in 4, 13, 40:
        [greedy] = model.continuations("the t1w0", words=words, temperature=0)
        [beam] = model.continuations("the t1w0", words=words, beams=1)
        np.testing.assert_array_equal(beam.tokens, greedy.tokens)
        np.testing.assert_allclose(beam.log_prob, greedy.log_prob, rtol=1e-5)


@pytest.mark.parametrize("case", ["clusters", "composed", "no tails"])
def test_next_words_are_the_likeliest(case, tmp_path):
    """Where clusters order the output's words, where vectors are composed, and where there are
    no tails.
    """
    changes = CNN if case == "composed" else {"output.name": "softmax", "input.name": "lookup"}
    if case == "clusters":
        order = [*WORDS.words[5:], *WORDS.words[:5]]
        write_clusters(tmp_path / "c.txt", Header("kmeans", 0, WORDS.digest, (6, 7, 6)), order)
        changes = {
            "input.name": "lookup",
            "output.name": "hierarchical",
            "output.clusters": str(tmp_path / "c.txt"),
        }
    loaded = fresh(**changes)
    words = loaded.run.vocabulary
    expected = log_probs_of(loaded.run)([words.eos, *loaded.encode("w3 w1")])
    best = np.argsort(-expected)[:6]
    next_words = loaded.next_words("w3 w1", 6)
    assert [word for word, _ in next_words] == [words.words[i] for i in best]
    np.testing.assert_allclose(
        [chance for _, chance in next_words], np.exp(expected[best]), rtol=1e-3
    )
    likeliest = words.words[best[0]]
    assert (
        loaded.continuations("w3 w1", words=1, temperature=0, avoid=(likeliest,))[0].tokens
        == best[1]
    )


def test_seeds_make_texts(model):
    """The same seed writes the same text, in pieces or as one of several; another seed writes
    another.
    """
    how = {"words": 12, "top_p": 0.9, "seed": 3}
    text = model.generate("the t2w0", **how)
    assert text.startswith(" ") and len(text.split()) + text.count("\n") == 12
    assert "".join(model.stream("the t2w0", **how)) == text
    three = model.continuations("the t2w0", samples=3, **how)
    assert three[0].text == text and len({one.text for one in three}) == 3
    assert model.generate("the t2w0", **how | {"seed": 4}) != text
    assert model.generate("the t2w0", **how | {"window": 8}).startswith(" ")
    likeliest = model.generate("the t2w0", words=12, temperature=0)
    assert model.generate("the t2w0", words=12, top_p=1e-6) == likeliest


def test_draws_at_a_temperature():
    """Words have the frequencies of p^(1 / temperature), among the best words, too."""
    loaded = fresh(**BODIES["lstm"])
    values = log_probs_of(loaded.run)([WORDS.eos, *loaded.encode("w3")])
    best = np.where(np.argsort(np.argsort(-values)) < 6, values, -np.inf)
    for expected, how in (
        (chances(values, 2.0), {"temperature": 0.5}),
        (chances(best, 0.5, 0.7), {"temperature": 2.0, "top_k": 6, "top_p": 0.7}),
    ):
        texts = loaded.continuations("w3", words=1, samples=2_000, avoid=(), **how)
        check_frequencies(np.concatenate([text.tokens for text in texts]), expected)


def test_text_stops_where_it_is_told_to(model):
    """After lines; a run whose examples are sentences ends with its first, and reads the last
    sentence of a prompt alone.
    """
    assert model.generate("the", lines=2, words=200).count("\n") == 2
    alone = fresh(scale=1.0, **{"batches.break_mode": "eos"})
    text = alone.continuations("w1 w2\nw3", words=300)[0]
    assert (
        text.tokens[-1] == WORDS.eos
        and (text.tokens[:-1] != WORDS.eos).all()
        and len(text.tokens) < 300
    )
    assert alone.next_words("w1 w2\nw3", 3) == alone.next_words("w3", 3)
    documents = fresh(scale=1.0, **{"batches.break_mode": "complete_doc"})
    assert (
        documents.next_words("w1\n\nw3", 3)
        == documents.next_words("w3", 3)
        != documents.next_words("w1\nw3", 3)
    )
    tokens = documents.continuations("w3", words=300, avoid=WORDS.words[4:])[0].tokens
    ends = (tokens[1:] == WORDS.eos) & (tokens[:-1] == WORDS.eos)
    assert ends[-1] and not ends[:-1].any()


def test_words_of_units(monkeypatch):
    """Sub-words: words are counted, not units; next words are whole words with the product of
    their units' probabilities. Words are avoided, not units.
    """
    counts = {"low": 5, "lower": 2, "newest": 6, "widest": 3, "<eos>": 4}
    units = Subwords.build(counts, codes=10)
    loaded = fresh(
        units,
        1.0,
        **{"input.name": "lookup", "output.name": "softmax", "batches.sequence_length": 64},
    )
    assert list(generate._banned(loaded.lines, ["low", "<unk>"])) == [units.index["low▁"]]
    with refuses("avoid='lowest'", "sub-words"):
        loaded.generate("low", avoid=["lowest"])
    by_name = lambda lines, names: [units.index[name] for name in names]
    monkeypatch.setattr(generate, "_banned", by_name)
    parts = [word for word in units.words if not word.endswith("▁")]
    text = loaded.continuations("low newest\t", words=3, temperature=0, avoid=parts)[0]
    assert units.ends_word[text.tokens].sum() == 3 and text.text.startswith(" ")
    ends = [word for word, end in zip(units.words, units.ends_word, strict=True) if end]
    for how in {"temperature": 0}, {"beams": 2}:
        [text] = loaded.continuations("low ", words=2, avoid=ends, **how)
        assert len(text.tokens) == 40  # which would go on for ever
    continuations = loaded.continuations("low ", words=1, beams=8, samples=4, avoid=())
    log_probs, before = log_probs_of(loaded.run), [units.eos, *loaded.encode("low")]
    for one in continuations:
        total = sum(
            log_probs([*before, *one.tokens[:i]])[token] for i, token in enumerate(one.tokens)
        )
        np.testing.assert_allclose(one.log_prob, total, atol=1e-4)
    chances = [chance for _, chance in loaded.next_words("low ", 4)]
    np.testing.assert_allclose(chances, np.exp([one.log_prob for one in continuations]))
    assert chances == sorted(chances, reverse=True)
    # A word that the prompt leaves open: every spelling of it and of what may follow, weighed by
    # the probability of all its units.
    log_probs, before, spellings = log_probs_of(loaded.run), [units.eos, *loaded.encode("a")], {}

    def follow(tokens, rest, total):
        for i, log_prob in enumerate(log_probs([*before, *tokens])):
            unit = units.utf8[i]
            if i == units.eos or not (unit.startswith(rest) or rest.startswith(unit)):
                continue
            if len(unit) < len(rest):
                follow([*tokens, i], rest[len(unit) :], total + log_prob)
            else:
                spellings[*tokens, i] = total + log_prob

    follow([], b"lo", 0.0)
    probs = np.exp(list(spellings.values()))
    writer = generate.Writer(loaded.decoder, loaded.lines, "a lo", Options(avoid=()))
    continuations = {tuple(text.tokens): np.exp(text.log_prob) for text in writer._beginnings}
    assert len(continuations) > 5 and min(map(len, continuations)) < max(map(len, continuations))
    expected = dict(zip(spellings, probs / probs.sum(), strict=True))
    assert {k: pytest.approx(p, rel=1e-3) for k, p in expected.items()} == continuations
    drawn = loaded.continuations("a lo", words=1, samples=3, seed=1, avoid=())
    texts = {tuple(text.tokens[:n]) for text in drawn for n in (1, 2)}
    assert texts & set(continuations)
    best = loaded.continuations("a lo", words=1, beams=4, avoid=())[0]
    assert (loaded.decode([*before[1:], *best.tokens])).removesuffix("\n") == "a lo" + best.text


CYCLE = "天地玄黃宇宙洪荒日月盈昃辰宿列張寒來暑往秋收冬藏"


class Bigrams:
    """A decoder that has learnt which unit follows which in lines of the cycle."""

    limited = False

    def __init__(self, vocabulary, lines):
        batches = {"sequence_length": 64, "break_mode": "none"}
        self.run = SimpleNamespace(config={"batches": batches}, vocabulary=vocabulary)
        counts = np.full((len(vocabulary),) * 2, 1e-6)
        ids = np.append(vocabulary.eos, vocabulary.encode_lines(lines))
        np.add.at(counts, (ids[:-1], ids[1:]), 1)
        self.table = np.log(counts / counts.sum(axis=1, keepdims=True)).astype(np.float32)

    def cache(self, rows, length):
        return None

    def take(self, carry, rows):
        return carry

    def read(self, tokens, carry):
        return self.table[tokens[:, -1]], carry

    def log_probs(self, hidden):
        return hidden

    def top_k(self, hidden, k, scores, banned=()):
        ids = np.argsort(-hidden, axis=1, kind="stable")[:, :k]
        return TopK(np.take_along_axis(hidden, ids, axis=1), ids, 0)

    def draw(self, hidden, carry, sampling, values, fixed):
        ids = np.where(fixed < 0, hidden.argmax(axis=1), fixed).astype(np.int32)
        return Sample(hidden[np.arange(len(ids)), ids], ids), self.table[ids], carry


def test_text_without_spaces_goes_on():
    """The issue's example: after any beginning of a cycle of characters, which is one unfinished
    word, comes the next one. A prompt whose last word were closed would be followed by <eos>.
    """
    bits = np.random.default_rng(0)
    starts, lengths = bits.integers(0, 24, 500), bits.integers(2, 40, 500)
    texts = [(3 * CYCLE)[a : a + n] for a, n in zip(starts, lengths, strict=True)]
    units = Subwords.build(Counter(texts) | {"<eos>": len(texts)}, codes=60)
    lines = Lines.of({"corpus": "text_files", "tokeniser": "none", "lower": False}, units)
    decoder = Bigrams(units, texts)
    for prompt in "天地玄黃", "列張寒來暑往", "秋", 2 * CYCLE, "天 宇宙洪":
        follows = (CYCLE * 2)[CYCLE.index(prompt[-1]) + 1 :]
        for how in {"temperature": 0}, {"beams": 4}:
            options = Options(words=1, avoid=(), **how)
            [text] = generate.Writer(decoder, lines, prompt, options).continuations()
            assert text.text and follows.startswith(text.text[: len(CYCLE)])
            assert text.log_prob <= 0
        probs = dict(generate.next_words(decoder, lines, prompt, 4))
        assert all(follows.startswith(word[: len(CYCLE)]) for word in probs)
        assert 0.1 < sum(probs.values()) <= 1.0001


def test_numbers_of_wikitext():
    """ "1 @,@ 500" is written as 1,500, also where it is written word by word."""
    words = Vocabulary.build(
        {"<eos>": 9, "<unk>": 8, "1": 7, "@,@": 6, "500": 5, "dog": 4, ".": 3, "@.@": 2}
    )
    loaded = fresh(words, **{"data.corpus": "wikitext103", "input.cutoffs": (3, 5)})
    writer = generate.Writer(loaded.decoder, loaded.lines, "a", Options(avoid=()))
    text = "1 @,@ 500 dog 1 @.@ 500 @,@"
    tokens = [words.index[word] for word in text.split()]
    pieces = list(writer._pieces(tokens))
    assert "".join(pieces) == " 1,500 dog 1.500 @,@" and len(pieces) > 4


def test_options_that_mean_nothing_are_one_line(model):
    """An option out of range or without effect is an error in one line: ignored, it would change
    nothing in silence.
    """
    for options, says in [
        ({"words": 0}, "words must be in"),
        ({"temperature": 0.001}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "hot"}, "temperature must be in"),
        ({"top_p": 0}, "top_p must be in"),
        ({"top_p": "0.9"}, "top_p must be in"),
        ({"top_p": 1.5}, "top_p must be in (0, 1], got 1.5"),
        ({"avoid": "nonsense"}, "avoid must be a list of words"),
        ({"avoid": [""]}, "avoid must be a list of words"),
        ({"prompt": None}, "text must be a string, got None"),
        ({"beams": 2, "samples": 3}, "samples=3"),
        ({"beams": 2, "top_k": 5}, "top_k=5 has no effect with beams=2"),
        ({"temperature": 0, "samples": 2}, "samples=2 has no effect with temperature=0"),
        ({"wrods": 3}, 'Did you mean "words"'),
        ({"avoid": ("nonsense",)}, "nonsense"),
        ({"avoid": model.run.vocabulary.words}, "finite"),
        ({"avoid": model.run.vocabulary.words, "beams": 2}, "finite"),
        ({"seed": -1}, "seed must be in"),
        ({"seed": 1 << 32}, "seed must be in"),
    ]:
        with refuses(says):
            model.generate(**{"prompt": "the"} | options)
    with refuses("window=8", "lstm"):
        fresh(**BODIES["lstm"]).generate("w1", window=8)


def test_the_command(quick_command, in_process, trained, model, tmp_path):
    """Prompts from flags, a file and stdin; text and JSON; bad input in one line."""
    run = "-m", "adaptive_jax", "generate", f"--workdir={trained}", "--words=5"
    done = quick_command(*run, "--prompt=the t1w0", "--seed=2")
    assert done.returncode == 0
    assert done.stdout.removesuffix("\n") == "the t1w0" + model.generate(
        "the t1w0", words=5, seed=2
    ).removesuffix("\n")
    assert done.stderr == ""  # what is said of speed is for terminals
    every = model.generate("the t1w0", words=5, seed=2, top_k=10**9)  # more words than there are
    assert every == model.generate("the t1w0", words=5, seed=2)
    (tmp_path / "prompts.txt").write_text("the t1w0\nthe\n")
    done = in_process(
        *run, f"--prompts={tmp_path / 'prompts.txt'}", "--format=jsonl", "--samples=2", "--beams=3"
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["prompt"] for one in lines] == ["the t1w0", "the t1w0", "the", "the"]
    assert (
        lines[0]["text"] == model.generate("the t1w0", words=5, beams=3)
        and lines[0]["log_prob"] >= lines[1]["log_prob"]
    )
    for flags, says in [
        (["--prompt=a", "--prompts=b"], "use one"),
        (["--prompt=the", "--avoid=,"], "avoid must be a list of words"),
        (["--prompt=the \udcff", "--top_p=0.5"], "UTF-8"),
    ]:
        done = in_process(*run, *flags)
        assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1
