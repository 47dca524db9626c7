"""Tokenizers of the `tokenizers` library: text to ids and back, to train, score and write."""

import json
import shutil

import numpy as np
import pytest
import tokenizers

import adaptive_jax
from adaptive_jax.data.corpora.load import load
from adaptive_jax.data.vocabulary import tokenizer
from adaptive_jax.data.vocabulary.lines import Lines
from adaptive_jax.data.vocabulary.on_disk import read_vocabulary
from adaptive_jax.data.vocabulary.token_ids import TokenIds
from adaptive_jax.data.vocabulary.tokenizer import Tokenizer
from adaptive_jax.generation import generate
from adaptive_jax.scores.scores import lengths_of, text_words_of
from adaptive_jax.text.load import LoadedModel
from adaptive_jax.training.loop import train
from tests import refuses
from tests.random_runs import random_run

END, USER = "<|endoftext|>", "<|user|>"
LINES = [
    "In the beginning was the word.",
    "",
    "  The  word, 天地玄黃!",
    "the beginning",
    "In the wörld",
]


def made(kind, size=300):
    """A tokenizer that has learnt from the lines: byte-level as GPT-2's, or as sentencepiece's."""
    program = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=kind == "spaces"))
    alphabet, special = [], [END]
    if kind == "bytes":
        program.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        program.decoder = tokenizers.decoders.ByteLevel()
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    else:
        program.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
        parts = "ByteFallback", "Fuse"
        parts = [getattr(tokenizers.decoders, part)() for part in parts]
        program.decoder = tokenizers.decoders.Sequence(
            [tokenizers.decoders.Replace("▁", " "), *parts, tokenizers.decoders.Strip(" ", 1, 0)]
        )
        alphabet, special = [], [END, *(f"<0x{byte:02X}>" for byte in range(256))]
        size += 256
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    program.train_from_iterator(LINES * 3, trainer)
    program.add_special_tokens([USER])
    content = json.loads(program.to_str())
    added = content["added_tokens"]  # bytes are no special tokens
    content["added_tokens"] = [entry for entry in added if entry["content"] in (END, USER)]
    return content


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    for kind in "bytes", "spaces":
        (directory / f"{kind}.json").write_text(json.dumps(made(kind)))
    for split, lines in ("train", LINES * 8), ("valid", LINES), ("test", LINES[:1]):
        (directory / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return directory


def data_of(directory, kind="bytes", **changes):
    tokenizer = str(directory / f"{kind}.json")
    data = {"corpus": "text_files", "path": str(directory), "tokenizer": tokenizer, "eos": 0}
    return data | changes


def model_of(config, vocabulary, cutoffs=(20, 60)):
    return LoadedModel(random_run(config(**{"input.cutoffs": cutoffs}), vocabulary, 1.5))


@pytest.mark.parametrize("kind", ["bytes", "spaces"])
def test_text_to_ids_and_back(kind, directory, config, tmp_path, own_cache, monkeypatch):
    """The ids of a text are those of the tokenizer, a line at a time, spaces included, in order of
    frequency; it is kept with the run, and a line comes back as it was.
    """
    program = tokenizers.Tokenizer.from_file(str(directory / f"{kind}.json"))
    monkeypatch.setattr(tokenizer, "BATCH", 2)
    corpus = load(data_of(directory, kind))
    vocabulary = corpus.vocabulary
    expected = [i for line in LINES for i in (*program.encode(line).ids, 0)]
    ids = corpus.ids["validation"]
    assert vocabulary.ids[ids].tolist() == expected
    assert (np.diff(vocabulary.counts) <= 0).all() and vocabulary.counts.sum() == 8 * len(expected)
    vocabulary.write(tmp_path / "vocabulary.txt")
    again = read_vocabulary(tmp_path / "vocabulary.txt")
    assert isinstance(again, Tokenizer) and again.digest == vocabulary.digest
    lines = model_of(config, again).lines
    text = "\n".join(LINES) + "\n"
    assert lines.encode(text).tolist() == ids.tolist()
    assert lines.encode(text.replace("\n", "\r\n")).tolist() == ids.tolist()
    # sentencepiece's puts a space before a line, and takes one away.
    assert lines.decode(ids) == (text if kind == "bytes" else text.replace("\n  ", "\n "))
    spelt = b"".join(b"\n" if i == again.eos else again.utf8[i] for i in ids).decode()
    assert [line.lstrip() for line in spelt.split("\n")] == [s.lstrip() for s in text.split("\n")]
    words = len(text.split()) + len(LINES)
    of_words = {"text_words": words, "perplexity_per_text_word": pytest.approx(np.exp(2))}
    assert text_words_of(ids, 2.0 * words, again) == of_words
    # Special tokens were no part of a word, and white space beyond ASCII separated none.
    line = f"the\u3000wörld {USER} beginning"
    assert text_words_of(again.encode_lines([line]), 0.0, again)["text_words"] == 5
    if kind == "bytes":
        assert lengths_of(ids, again) == (len(text), len(text.encode()))
        lengths = lengths_of(again.encode_lines([line]), again)
        assert lengths == (len(line) + 1, len(line.encode()) + 1)


@pytest.mark.parametrize("kind", ["bytes", "spaces"])
def test_text_goes_on_within_a_token(kind, directory, config, own_cache):
    """log p(b | a) >= log p(ab) at any character, and prompts are continued as they stand."""
    model = model_of(config, load(data_of(directory, kind)).vocabulary)
    text = "the wörld 天地"
    [whole] = model.score([text])
    assert "".join(whole.words[:-1]) == text.replace(" ", "")
    assert len(whole.words) == len(whole.log_probs)
    assert whole.by_word().words == (*text.split(), "<eos>")
    assert not whole.unseen.any()
    for cut in range(len(text) + 1):
        [rest] = model.score([text[cut:]], given=text[:cut])
        assert rest.log_prob >= whole.log_prob - 1e-4
        assert rest.by_word().words == (*text[cut:].split(), "<eos>")
    for prompt in "", "the wo", "the ", "天":
        for how in {"seed": 1}, {"beams": 2}, {"temperature": 0}:
            [one] = model.continuations(prompt, words=8, **how)
            ids = [*model.lines.encode_open(prompt)[0], *one.tokens]
            assert model.decode(ids) == prompt + one.text
            assert "".join(model.stream(prompt, words=8, **how)) == one.text
        assert model.next_words(prompt, 2)
    # Tokens that spell the prompt anew are not the words to write.
    for prompt in "the wo", "In the beginning", LINES[0]:
        assert all(word for word, _ in model.next_words(prompt, 4))
        begun = len(model.lines.encode_open(prompt)[1])
        for words, how in (1, {"temperature": 0}), (3, {"temperature": 0}), (2, {"beams": 2}):
            [one] = model.continuations(prompt, words=words, avoid=(), **how)
            ends = np.cumsum([len(model.run.vocabulary.utf8[i]) for i in one.tokens])
            assert (ends > begun).sum() == words
    # " day" is another token than "day": their probabilities were added up.
    texts = model.continuations("In", words=1, beams=40, samples=40, avoid=())
    texts = {one.text.replace("\n", "<eos>") for one in texts}
    likeliest = {word for word, _ in model.next_words("In", 20)}
    assert likeliest <= texts and any(word.startswith(" ") for word in likeliest)
    with refuses("''", "no vector"):  # it has no token; the vectors of the others were returned
        model.embeddings(["天", ""])


@pytest.mark.parametrize("kind", ["bytes", "spaces"])
def test_special_tokens_of_prompts(kind, directory, config, own_cache):
    """A prompt is continued after its special tokens: the model read the letters `<eos>`, or the
    token was lost and the prompt printed twice.
    """
    model = model_of(config, load(data_of(directory, kind)).vocabulary)
    vocabulary, lines = model.run.vocabulary, model.lines
    special = {vocabulary.eos, *vocabulary.special}
    assert sorted(vocabulary.ids[[*special]]) == [0, len(vocabulary) - 1]
    for prompt in END + "In", USER + "In", "In" + USER:
        (ids, begun), whole = lines.encode_open(prompt), lines.encode(prompt)
        assert special & {*whole} == special & {*ids} != set()
        assert b"<eos>" not in begun
        [one] = model.continuations(prompt, words=4, seed=1)
        assert not one.text.startswith(("<eos>", prompt))
        assert model.decode([*ids, *one.tokens]).startswith(model.decode(whole))


@pytest.mark.parametrize("kind", ["bytes", "spaces"])
def test_special_tokens_of_scored_text(kind, directory, config, own_cache):
    """A special token has its letters and is scored: `by_word` gave all that follows to other
    words, and one after `given` had no score.
    """
    model = model_of(config, load(data_of(directory, kind)).vocabulary)
    text = f"Hi{USER} yo"
    [line] = model.score([text])
    assert line.by_word().words == (f"Hi{USER}", "yo", "<eos>")
    covered = {at for begin, end in line.places for at in range(begin, end)}
    assert {at for at, letter in enumerate(text) if letter != " "} <= covered
    [whole] = model.score([f"In{USER}x"])
    for given in "In", f"In{USER}":
        [rest] = model.score([f"In{USER}x".removeprefix(given)], given=given)
        scored = whole.log_probs[len(model.lines.encode(given)) :]
        np.testing.assert_allclose(rest.log_probs, scored, rtol=1e-4)


def test_lengths_where_no_token_ends_a_line(directory):
    """Without `data.eos` the most frequent token counted as the end of a line, of one character."""
    model = (directory / "bytes.json").read_bytes()
    program = tokenizers.Tokenizer.from_str(model.decode())
    counts = np.zeros(program.get_vocab_size(), np.int64)
    ids = program.encode(" the the wörld").ids
    np.add.at(counts, ids, 1)
    vocabulary = Tokenizer.of(TokenIds.of_counts(counts), model)
    assert vocabulary.utf8[0] == b" the"
    tokens = vocabulary.entry_of_id[ids]
    assert lengths_of(tokens, vocabulary) == (14, 15)


def test_lengths_without_the_space_before_each_line(directory, own_cache):
    """Such a tokenizer puts a space before each line, which the text has not: it counted."""
    corpus = load(data_of(directory, "spaces"))
    settings = {"corpus": "text_files", "tokeniser": "none", "lower": False}
    text = Lines.of(settings, corpus.vocabulary)
    for ids in corpus.ids["validation"], corpus.ids["train"]:
        decoded = text.decode(ids)
        assert lengths_of(ids, corpus.vocabulary) == (len(decoded), len(decoded.encode()))


@pytest.mark.parametrize("kind", ["BPE", "Unigram"])
def test_the_unknown_token(kind, config):
    """It is `<unk>`: its share was 0, bits a byte had its nats and none of its bytes, and it was
    written though `avoid` has it.
    """
    letters = [END, "e", "h", "t", " "]
    if kind == "BPE":
        ids = {letter: i for i, letter in enumerate([*letters, "[UNK]"])}
        model = tokenizers.models.BPE(ids, [], unk_token="[UNK]")
    else:
        pieces = [(letter, -1.0) for letter in [*letters, "[UNK]"]]
        model = tokenizers.models.Unigram(pieces, 5, False)
    content = tokenizers.Tokenizer(model).to_str().encode()
    vocabulary = Tokenizer.build({"the ж": 2, "<eos>": 2}, content, 0)
    unknown = vocabulary.index["5"]
    ids = vocabulary.encode_words(["the ж"])[0]
    assert ids[-1] == unknown and vocabulary.unk_rate(ids) == 1 / len(ids)
    assert lengths_of(ids, vocabulary) == (None, None)
    run = model_of(config, vocabulary, (2,))
    assert [*generate._banned(run.lines, ["<unk>"])] == [unknown]
    assert "<unk>" not in Tokenizer.build({"the": 1, "<eos>": 1}, content, 5).index


@pytest.mark.parametrize("kind", ["bytes", "spaces"])
def test_words_to_avoid(kind, directory, config, own_cache):
    """Every token that is the word, with a space or without: after a space it was written."""
    model = model_of(config, load(data_of(directory, kind)).vocabulary)
    vocabulary = model.run.vocabulary
    banned = [*generate._banned(model.lines, ["the", "<eos>", "<unk>"])]
    assert {b" the"} <= {vocabulary.utf8[i] for i in banned} <= {b"the", b" the", b"<eos>"}
    same = [i for i, spelling in enumerate(vocabulary.utf8) if spelling.strip() == b"the"]
    assert banned == [*same, vocabulary.eos]
    assert [*generate._banned(model.lines, [USER])] == [vocabulary.index[str(len(vocabulary) - 1)]]
    for word in "the beginning", "zebra":
        with refuses(f"avoid={word!r}", "no token"):
            model.generate(avoid=[word])


def test_a_run_on_a_tokenizer(directory, config, tmp_path, in_process, own_cache):
    """It scores and writes text when the tokenizer's file is gone, and says perplexity a word and
    bits a byte. Ids prepared elsewhere take the same tokenizer.
    """
    changes = {f"data.{key}": value for key, value in data_of(directory).items()}
    workdir = tmp_path / "run"
    short = {"steps": 2, "evaluate_every": 2, "checkpoint_every": 2, "schedule.cycle_steps": 1}
    train(config(**changes, **short, **{"data.vocabulary_size": 0}), workdir)
    assert (workdir / "tokenizer.json").read_bytes() == (directory / "bytes.json").read_bytes()
    model = adaptive_jax.load(workdir)
    [line] = model.score([LINES[0]])
    assert line.words[:2] == ("In", "the") and line.words[-1] == "<eos>"
    assert isinstance(model.generate("In the", words=3), str)
    done = in_process("evaluate.py", f"--workdir={workdir}", "--split=test")
    assert "bits a character" in done.stdout
    assert f"a word of the text, over {len(LINES[0].split()) + 1} words" in done.stdout
    program = tokenizers.Tokenizer.from_file(str(directory / "bytes.json"))
    for split in "train", "valid", "test":
        np.save(tmp_path / f"{split}.npy", np.tile(program.encode(LINES[0]).ids, 4))
    ids = data_of(directory, corpus="ids", path=str(tmp_path), vocabulary_size=400)
    vocabulary = load(ids).vocabulary
    assert vocabulary.file == "tokenizer.json" and len(vocabulary) == 400
    with refuses("data.vocabulary_size"):
        load(ids | {"vocabulary_size": 200})


def test_a_text_is_counted_once(directory, own_cache, monkeypatch):
    """The size for plans has no effect: a larger one enlarged the model in silence, by ids that the
    tokenizer never makes. Shards may be deleted: the whole text was read again at each start.
    """
    built, build = [], Tokenizer.build
    monkeypatch.setattr(Tokenizer, "build", lambda *a: built.append(build(*a)) or built[-1])
    for size in 0, 10_000:
        vocabulary = load(data_of(directory, vocabulary_size=size)).vocabulary
        assert (len(vocabulary), len(built)) == (len(built[0]), 1)
        assert len(vocabulary) == tokenizer.size_of(vocabulary.model)
        for shards in [*own_cache.rglob("shards")]:  # once ids exist, nothing reads them
            shutil.rmtree(shards)
    assert not [*own_cache.rglob("shards")]


def test_wrong_settings(directory, tmp_path):
    """Settings that a tokenizer.json leaves no room for are refused: ignored, ids would be other
    ones than the settings say.
    """
    (tmp_path / "bytes.json").write_text("{}")
    for model in (
        tokenizers.models.WordPiece({END: 0, "a": 1}, unk_token=END),
        tokenizers.models.WordLevel({END: 0, "a": 1}, unk_token=END),
        tokenizers.models.BPE({END: 0, "a</w>": 1}, [], end_of_word_suffix="</w>"),
    ):
        program = tokenizers.Tokenizer(model)
        if isinstance(model, tokenizers.models.WordLevel):
            program.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        program.save(str(tmp_path / f"{type(model).__name__}.json"))
    for changes, names in (
        ({"eos": -1}, "data.eos"),
        ({"codes": 5}, "data.codes"),
        ({"lower": True}, "data.lower"),
        ({"tokenizer": str(tmp_path / "none.json")}, "none.json"),
        ({"tokenizer": str(tmp_path / "bytes.json")}, "data.tokenizer"),
        ({"tokenizer": str(tmp_path / "WordPiece.json")}, "WordPiece"),
        ({"tokenizer": str(tmp_path / "WordLevel.json")}, "WordLevel"),
        ({"tokenizer": str(tmp_path / "BPE.json")}, "BPE"),  # as CLIP's; `</w>` were letters
    ):
        with refuses(names):
            load(data_of(directory, **changes))


def test_lines_are_neither_cut_nor_filled_up(directory):
    """A tokenizer.json may say so, for other models: the rest of each line was lost, and short
    lines got ids of padding.
    """
    content = (directory / "bytes.json").read_text()
    program = tokenizers.Tokenizer.from_str(content)
    program.enable_truncation(3)
    program.enable_padding(length=20)
    counts = {line: 1 for line in LINES if line} | {"<eos>": len(LINES)}
    expected, vocabulary = (
        Tokenizer.build(counts, model.encode(), 0) for model in (content, program.to_str())
    )
    assert vocabulary.words == expected.words
    np.testing.assert_array_equal(vocabulary.counts, expected.counts)
    ids = vocabulary.encode_words(LINES)[0]
    np.testing.assert_array_equal(ids, expected.encode_words(LINES)[0])


def test_a_file_of_an_early_version(directory):
    """That of GPT-2 has no type of its model: a KeyError. The library reads files without lists of
    added tokens, too.
    """
    content = json.loads((directory / "bytes.json").read_text())
    ids = TokenIds.of_counts(np.zeros(300, np.int64))
    expected = Tokenizer.of(ids, json.dumps(content).encode())
    del content["model"]["type"], content["added_tokens"]
    early = Tokenizer.of(ids, json.dumps(content).encode())
    np.testing.assert_array_equal(early.encode_words(LINES)[0], expected.encode_words(LINES)[0])
    assert early.utf8[1:] == expected.utf8[1:]


def test_a_token_that_no_bytes_spell(directory):
    """A byte-level tokenizer may list a token in plain letters, which the library decodes to
    itself: a KeyError ended every evaluation.
    """
    content = json.loads((directory / "bytes.json").read_text())
    del content["added_tokens"]
    content["model"]["vocab"]["天▁"] = size = len(content["model"]["vocab"])
    ids = TokenIds.of_counts(np.zeros(size + 1, np.int64))
    assert Tokenizer.of(ids, json.dumps(content).encode()).utf8[size] == "天▁".encode()
