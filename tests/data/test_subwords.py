"""Units learnt from counts, words split into them, and files that are wrong."""

import collections
import itertools
import lzma
import math
import re
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from adaptive_jax.data.vocabulary import subwords
from adaptive_jax.data.vocabulary.on_disk import (
    read_vocabulary,
    read_with_checksums,
    write_with_checksums,
)
from adaptive_jax.data.vocabulary.subwords import BYTES, MARK, Subwords
from adaptive_jax.data.vocabulary.words import Vocabulary
from tests import refuses

REAL = Path(__file__).parents[3] / "shared" / "data"
COUNTS = {"low": 5, "lower": 2, "newest": 6, "widest": 3, "<eos>": 4}
ODD = (
    "🙂 👩‍👩‍👧 e\u0301 \u0301 ▁ ▁▁ ▁low low▁ lo▁w \u2585 a\u2585b \0 a\0b \x01\x7f \u200b"
    " \ufeff \ufeffnew \ufffd ｌｏｗ 日本語 ﬁ ß İ <unk>s x<eos> <0x41> <0xE2><0x96><0x81> <s>"
    " </s> <pad> ⁇ \U0010ffff # %s\\n ĠĊ ##ing @@"
)
NASTY = [*ODD.split(" "), "l" * 300, "lowest" * 300, "💩" * 300]


@pytest.fixture(scope="module")
def small():
    return Subwords.build(COUNTS, codes=10)


def random_counts(seed, words=150):
    """Made-up words of 2 to 7 of 8 letters, with counts that hardly ever tie."""
    bits = np.random.Generator(np.random.Philox(seed))
    letters = np.array(list("etaoinsr"))
    share = 1 / np.arange(1, 9)
    made = {
        "".join(bits.choice(letters, size, p=share / share.sum()))
        for size in bits.integers(2, 8, words)
    }
    return {
        word: int(count)
        for word, count in zip(sorted(made), bits.integers(1, 10**9, len(made)), strict=True)
    }


def merged(units, pair):
    out = []
    for unit in units:
        if out and (out[-1], unit) == pair:
            out[-1] += unit
        else:
            out.append(unit)
    return out


def slow_codes(counts):
    """Byte-pair encoding as in Sennrich et al. 2016, algorithm 1, up to the first tie, and the
    split of each word by then.
    """
    split = {word: [*word, MARK] for word in counts}
    learnt = []
    while True:
        pairs = collections.Counter()
        for word, units in split.items():
            for pair in itertools.pairwise(units):
                pairs[pair] += counts[word]
        (best, first), (_, second) = pairs.most_common(2)
        if first == second:
            return learnt, split
        assert "".join(best) not in learnt
        learnt.append("".join(best))
        split = {word: merged(units, best) for word, units in split.items()}


def units_of(vocabulary, word):
    return [vocabulary.words[i] for i in vocabulary.encode(word)[:-1]]


@pytest.mark.parametrize("seed", range(3))
def test_units_are_those_of_plain_byte_pair_encoding(seed):
    """The same merges in the same order, and the same split of every word, as the algorithm in
    its plainest form.
    """
    counts = random_counts(seed)
    codes, split = slow_codes(counts)
    assert len(codes) > 30
    vocabulary = Subwords.build(counts | {"<eos>": 1}, len(codes))
    assert subwords._pieces(vocabulary.model)[256 : 256 + len(codes)] == codes
    assert {word: units_of(vocabulary, word) for word in counts} == split


def learnt(vocabulary):
    return {word for word in vocabulary.words if len(word) > 1} - {*BYTES, "<eos>", "<unk>"}


@pytest.mark.parametrize("codes", [1, 15])
def test_as_many_units_are_learnt_as_asked_for(codes):
    """Fifteen merges make every word one unit."""
    vocabulary = Subwords.build(COUNTS, codes)
    assert len(learnt(vocabulary)) == codes
    assert len(vocabulary) == codes + 256 + len(set("lowernewestwidest")) + len([MARK, "<eos>"])
    if codes > 1:
        assert [len(units_of(vocabulary, word)) for word in COUNTS] == [1, 1, 1, 1, 1]


def most_units(counts):
    """As many units as the refusal of too many says that there are."""
    with refuses("data.codes=1000000000000") as error:
        Subwords.build(counts, 10**12)
    return Subwords.build(
        counts, int(re.search(r"set data.codes=(\d+) or less", str(error.value))[1])
    )


def test_more_units_than_there_are():
    """Are refused with the number that there are; a sixteenth would be of a pair that does not
    occur.
    """
    assert len(learnt(most_units(COUNTS))) == 15
    with refuses("data.codes=16", "15 merges"):
        Subwords.build(COUNTS, 16)


def test_units_may_be_long_and_of_many_kinds():
    """Only the text decides where a unit ends, not scripts, digits, punctuation or length."""
    long = "".join(map(chr, range(0x100, 0x100 + 40)))
    words = ["abc-123", "日本x9", "9", "2019", "don't", "naïveΩя", long]
    vocabulary = most_units(dict.fromkeys(words, 2) | {"<eos>": 1})
    assert [units_of(vocabulary, word) for word in words] == [[word + MARK] for word in words]


def test_units_are_learnt_from_words_longer_than_a_unit_may_be():
    """Text without spaces has a word a paragraph: all of 512 characters or more were left out, and
    of a text with such alone nothing could be learnt.
    """
    cycle = "天地玄黃宇宙洪荒日月盈昃辰宿列張寒來暑往秋收冬藏"
    counts = {(cycle * 30)[i : i + 600]: 1 for i in range(12)} | {"<eos>": 12}
    subwords = Subwords.build(counts, codes=40)
    assert {*cycle} <= {*subwords.words}
    [word] = [word for word in counts if word.startswith(cycle)]
    assert len(subwords.encode(word)) < 600 / 8


def test_characters_of_text_without_spaces_get_units():
    """13 paragraphs of 1,500 characters as frequent as those of a language: 41 % of the characters
    had no unit, and were spelt in bytes.
    """
    bits, share = np.random.default_rng(0), 1 / np.arange(1, 1501)
    drawn = [bits.choice(1500, n, p=share / share.sum()) for n in bits.integers(200, 1500, 13)]
    texts = ["".join(chr(0x4E00 + i) for i in numbers) for numbers in drawn]
    subwords = Subwords.build(dict.fromkeys(texts, 1) | {"<eos>": 13}, codes=200)
    units = {*subwords.words}
    assert sum(c in units for text in texts for c in text) > 0.99 * sum(map(len, texts))


def test_order_and_counts_are_those_of_the_encoded_text(small):
    """Units stand by falling counts, which cutoffs rely on, and counts are those of the ids that a
    run trains on.
    """
    lines = ["low " * 5, "lower " * 2 + "newest " * 6, "widest " * 3, ""]
    ids = small.encode_lines(lines)
    assert ids.dtype == np.int32
    assert small.counts.tolist() == np.bincount(ids, minlength=len(small)).tolist()
    assert small.counts.dtype == np.int64
    assert list(zip(-small.counts, small.words, strict=True)) == sorted(
        zip(-small.counts, small.words, strict=True)
    )
    assert small.counts[-1] == 0
    assert set(BYTES) <= set(small.words)


def test_learning_depends_on_the_counts_alone():
    """Not on the order of the words, and not on the process."""
    counts = random_counts(1) | {"<eos>": 7, "<unk>": 3, "日本": 5}
    one, two = Subwords.build(counts, 80), Subwords.build(dict(reversed(counts.items())), 80)
    assert one.digest == two.digest
    assert one.digest != Subwords.build(counts, 81).digest
    assert one.digest != Subwords.build(counts | {"<eos>": 8}, 80).digest
    assert one.digest != Subwords(one.words, one.counts, two.model + b"\0").digest


@pytest.mark.parametrize(
    "counts", [COUNTS, COUNTS | {"<unk>": 9}, COUNTS | dict.fromkeys(NASTY, 2)]
)
def test_any_word_is_split_and_only_its_last_unit_ends_it(counts):
    """Words learnt from, and others: joined, the units are the bytes of the word and one mark."""
    vocabulary = Subwords.build(counts, 15)
    bits = np.random.Generator(np.random.Philox(4))
    random = [
        "".join(map(chr, bits.integers(0x21, limit, size)))
        for limit in (0x7F, 0x2FF, 0xD800)
        for size in range(1, 30)
    ]
    random = [part for word in random for part in word.split()]
    assert len(random) > 80
    for word in [*NASTY, *random, *COUNTS]:
        (*ids, last), eos = np.split(np.array(vocabulary.encode(word)), [-1])
        assert vocabulary.words[eos[0]] == "<eos>"
        assert not vocabulary.ends_word[ids].any(), word
        assert vocabulary.ends_word[last], word
        if word != "<eos>":
            assert b"".join(vocabulary.utf8[i] for i in (*ids, last)) == (word + MARK).encode(), (
                word
            )


def test_special_words_are_units_of_their_own(small):
    """<eos> always; <unk> if the text has it, and otherwise it is a word like any other."""
    unknown = Subwords.build(COUNTS | {"<unk>": 9}, 10)
    assert units_of(unknown, "<unk> low") == ["<unk>", *units_of(unknown, "low")]
    assert "<unk>" not in small.words
    assert len(units_of(small, "<unk>")) > 3
    assert units_of(small, "<eos>") == ["<eos>"]
    assert unknown.counts[unknown.index["<unk>"]] == 9


def test_units_never_read_like_special_ones(capfd):
    """Words that hold one are split, but nothing is learnt from them."""
    odd = dict.fromkeys(["<unk>s", "x<eos>", "<0x41>y", "lo▁w", "l\u2585"], 99)
    vocabulary = Subwords.build(COUNTS | odd, 15)
    assert capfd.readouterr() == ("", "")
    assert learnt(vocabulary) == learnt(Subwords.build(COUNTS, 15))
    assert units_of(vocabulary, "<eos>") == ["<eos>"]


def test_rare_characters_are_bytes():
    """Characters beyond 99.99% of the text have no unit, and nothing is learnt from their words."""
    counts = {"ab": 40_000, "cb": 20_000, "日b": 2, "<eos>": 1}
    vocabulary = Subwords.build(counts, 2)
    assert learnt(vocabulary) == {"b▁", "ab▁"}
    assert units_of(vocabulary, "日b") == ["<0xE6>", "<0x97>", "<0xA5>", "b▁"]
    assert vocabulary.utf8[vocabulary.index["<0xE6>"]] == b"\xe6"
    assert units_of(Subwords.build(counts | {"日b": 20}, 2), "日b") == ["日", "b▁"]


def test_words_are_counted_by_their_ends(small):
    """Perplexity is by this number of words; by the number of units it would be far lower."""
    ids = small.encode_lines(["lowest new", "", "日本"])
    assert small.count_words(ids) == small.ends_word[ids].sum() == 3 + 3
    assert len(ids) > 6
    many = np.tile(ids, (1 << 20) // len(ids) + 2)
    assert small.count_words(many) == 6 * (len(many) // len(ids))
    assert small.count_words(ids[:0]) == 0


def test_unigram_nll_is_per_word(small):
    """The slow twin multiplies the probabilities of the units of each word; all share one
    count, so none is 0.
    """
    text = ["low", "lower", "newest", "widest", "<eos>", "low"]
    total, units = sum(small.counts.tolist()), len(small)
    chance = {
        unit: (count + 1 / units) / (total + 1)
        for unit, count in zip(small.words, small.counts.tolist(), strict=True)
    }
    assert sum(chance.values()) == pytest.approx(1)
    slow = [math.prod(chance[unit] for unit in units_of(small, word)) for word in text]
    ids = small.encode_lines(["low lower newest widest", "low"])[:-1]
    assert small.unigram_nll(ids) == pytest.approx(-sum(map(math.log, slow)) / len(text))
    assert small.unigram_nll(small.encode_lines(["é"])) < math.inf


def test_written_units_are_read_back_the_same(tmp_path):
    """A vocabulary of words is read as one, too, even beside the model that another left."""
    vocabulary = Subwords.build(COUNTS | dict.fromkeys(NASTY, 2) | {"<unk>": 1}, 12)
    path = tmp_path / "deeper" / "vocabulary.txt"
    vocabulary.write(path)
    assert {file.name for file in path.parent.iterdir()} == {"vocabulary.txt", "subwords.model"}
    again = read_vocabulary(path)
    assert isinstance(again, Subwords)
    assert (again.words, again.digest) == (vocabulary.words, vocabulary.digest)
    assert again.encode(" ".join(NASTY)) == vocabulary.encode(" ".join(NASTY))
    words = Vocabulary.build(COUNTS)
    words.write(path)
    assert (type(read_vocabulary(path)), read_vocabulary(path).digest) == (Vocabulary, words.digest)


def test_a_damaged_vocabulary_is_refused_with_the_cure(tmp_path, small, capfd):
    """Half of the files, part of a model, another model, a flipped bit."""
    path, model = tmp_path / "vocabulary.txt", tmp_path / "subwords.model"
    write_with_checksums(small, path)
    model.unlink()
    with refuses("subwords.model", "damaged", "restore"):
        read_with_checksums(path, "restore it")
    with pytest.raises(FileNotFoundError, match=r"subwords\.model"):
        read_vocabulary(path)
    another = Subwords.build(COUNTS, 11).model
    flipped = [bytearray(small.model) for _ in range(0, len(small.model), 97)]
    for k, damaged in enumerate(flipped):
        damaged[97 * k] ^= 1 << k % 8
    half = small.model[: len(small.model) // 2]
    for content in (b"", b"garbage", another, half, small.model[:-1], small.model * 2, *flipped):
        model.write_bytes(content)
        with refuses("subwords.model", "damaged", "restore"):
            read_with_checksums(path, "restore it")
    model.write_bytes(small.model)
    path.write_bytes(path.read_bytes().replace(b"est\xe2\x96\x81 ", b"ast\xe2\x96\x81 "))
    with refuses(str(path), "damaged"):
        read_with_checksums(path, "restore it")
    path.unlink()
    with refuses(str(path), "No such file"):
        read_with_checksums(path, "restore it")
    assert capfd.readouterr() == ("", "")


def test_the_model_is_one_for_other_programs_too(tmp_path, small):
    """sentencepiece itself reads the file and finds the same units."""
    small.write(tmp_path / "vocabulary.txt")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "subwords.model"))
    assert processor.encode("lowest", out_type=str) == units_of(small, "lowest") == ["low", "est▁"]


@pytest.mark.skipif(not REAL.is_dir(), reason="the real corpora are not here")
def test_open_text_is_scored_without_unk():
    """WikiText-2 as it was before its rare words became <unk>: read back word for word, few of
    them in bytes.
    """
    with lzma.open(REAL / "wikitext-2" / "train.txt.xz", "rt", encoding="utf-8") as lines:
        counts = collections.Counter(word for line in lines for word in (*line.split(), "<eos>"))
    vocabulary = Subwords.build(counts, 8000)
    assert len(learnt(vocabulary)) == 8000
    with lzma.open(REAL / "wikitext-2-raw" / "valid.txt.xz", "rb") as file:
        lines = file.read().decode("utf-8").removesuffix("\n").split("\n")
    ids = vocabulary.encode_lines(lines)
    assert vocabulary.count_words(ids) == 217_646
    assert vocabulary.index["<unk>"] not in ids
    joined = b"".join(vocabulary.utf8[i] for i in ids).decode("utf-8")
    joined = joined.replace("<eos>", "<eos>▁")
    assert joined.split(MARK)[:-1] == [word for line in lines for word in (*line.split(), "<eos>")]
    assert len(ids) < 1.35 * 217_646
    assert np.isin(ids, [vocabulary.index[byte] for byte in BYTES]).sum() < 0.01 * len(ids)
