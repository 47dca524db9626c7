"""Cuts texts as Grave et al. 2017 and Pappas et al. 2020 (section C.2) do: 2 million words to
train, 2 million, and 10 million.

    python -m adaptive_jax cut news_crawl_2007 --output=news_2007
    python -m adaptive_jax cut news.2007.en.shuffled.gz --output=news_2007
    python -m adaptive_jax cut commoncrawl.de-en.en --output=common_crawl --shuffle_seed=1
    python -m adaptive_jax cut wikitext-103-raw --output=wikitext103_raw

The first downloads a year's file; the address of another file does, too. One file is cut into parts
that follow each other; of a directory with train, valid and test, the beginning of each is taken.
Lines stay whole and as they are:
--config.data.tokeniser=moses --config.data.lower=True, as in configs/news_crawl.py, splits and
lowers them when they are read.
--lines cuts by lines, as the paper's public code does: --lines=87000,8700,440000.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from absl import flags

from adaptive_jax.data.corpora.cached import CACHE, cache_of
from adaptive_jax.data.corpora.corpus import SPLITS
from adaptive_jax.data.corpora.download import download
from adaptive_jax.data.corpora.known import CORPORA
from adaptive_jax.data.corpora.text import NAMES, Text, local_texts
from adaptive_jax.errors import InputError, check_known
from adaptive_jax.files import replacing

POSITIONAL = ["TEXT"]
WORDS = (2_000_000, 2_000_000, 10_000_000)
ADDRESS = "https://www.statmt.org/wmt14/training-monolingual-news-crawl/news.{}.en.shuffled.gz"
NEWS_CRAWL = {f"news_crawl_{year}": ADDRESS.format(year) for year in range(2007, 2012)}


def cut(
    source: Path,
    output: Path,
    words: Sequence[int] = WORDS,
    lines: Sequence[int] = (),
    seed: int = 0,
) -> dict[str, int]:
    """Writes train.txt, valid.txt and test.txt to `output`. Returns how many words each has,
    `<eos>` counted.

    source: a file of text, plain, .xz or .gz; or a directory with the three splits.
    words: in each part at most, white space between them; or, where `lines` are given, lines of
        each.
    seed: with one, the lines of each part are shuffled.

    Raises:
        InputError: no text there, or too little for three parts.
    """
    if source.is_dir():
        texts = local_texts(str(source), SPLITS, CORPORA["wikitext103_raw"].patterns)
        streams = [text.lines() for text in texts.values()]
    elif source.is_file():
        streams = [Text((source,)).lines()] * 3
    else:
        raise InputError(
            f"{source} does not exist: give a file of text, or a directory with train, valid and"
            " test"
        )
    counts = {}
    for number, (split, stream) in enumerate(zip(SPLITS, streams, strict=True)):
        part = itertools.islice(stream, lines[number]) if lines else _first(stream, words[number])
        part = list(part)
        if not part:
            raise InputError(
                f"{source} has no text left for the {split} split: give a longer text, or smaller"
                " --words"
            )
        if seed:
            random.Random(seed).shuffle(part)
        with replacing(output / f"{NAMES[split][0]}.txt") as file:
            file.writelines(part)
        counts[split] = sum(len(line.split()) + 1 for line in part)
    return counts


def _first(stream: Iterator[bytes], words: int) -> Iterator[bytes]:
    """Whole lines from the stream until they have `words` words, `<eos>` included."""
    for line in stream:
        words -= len(line.split()) + 1
        yield line
        if words <= 0:
            return


def main(source: str) -> None:
    """Cuts the text, downloaded where it is not here, and says how many words each part has."""
    given = flags.FLAGS
    words, lines = list(map(int, given.words)), list(map(int, given.lines))
    if len(words) != 3 or len(lines) not in (0, 3) or min(words + lines) < 1:
        raise InputError(
            f"--words={given.words} and --lines={given.lines} must be three numbers, for train,"
            " valid and test"
        )
    text, output = _text(source, given.cache), Path(given.output).expanduser()
    counts = cut(text, output, words, lines, given.shuffle_seed)
    said = ", ".join(f"{split} {number:,} words" for split, number in counts.items())
    print(f"{given.output}: {said}")


def _text(source, cache):
    """A file or directory; or what it names, downloaded."""
    path = Path(source).expanduser()
    if path.exists() or not source.startswith(("news_crawl_", "http://", "https://")):
        return path
    if "://" not in source:
        check_known(f"TEXT={source}", source, NEWS_CRAWL)
    return download(NEWS_CRAWL.get(source, source), cache_of(cache) / "downloads")


def define_flags() -> None:
    """Defines the flags of the command."""
    flags.DEFINE_string(
        "output", None, "Directory for train.txt, valid.txt and test.txt.", required=True
    )
    flags.DEFINE_list("words", list(map(str, WORDS)), "Words of each part, at most a line more.")
    flags.DEFINE_list("lines", [], "Lines of each part, instead of words.")
    flags.DEFINE_integer(
        "shuffle_seed", 0, "Seed to shuffle the lines of each part by; 0: they stay in order."
    )
    flags.DEFINE_string("cache", CACHE, "Directory for downloads.")
