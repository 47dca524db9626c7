"""Cuts texts as Grave et al. 2017 and Pappas et al. 2020 (section C.2) do: 2 million words to
train, 2 million, and 10 million.

    python -m adaptive_jax cut news_crawl_2007 --output=news_2007
    python -m adaptive_jax cut news.2007.en.shuffled.gz --output=news_2007
    python -m adaptive_jax cut commoncrawl.de-en.en --output=common_crawl --shuffle_seed=1
    python -m adaptive_jax cut wikitext-103-raw --output=wikitext103_raw

The first downloads a year's file; the address of another file does, too. One file is cut into parts
that follow each other; of a directory with train, valid and test, the beginning of each is taken.
Lines stay whole and as they are: --config.data.tokeniser=moses --config.data.lower=True, as in
configs/news_crawl.py, splits and lowers them when they are read. --lines cuts by lines, as the
paper's public code does: --lines=87000,8700,440000.
"""

import hashlib
import itertools
import logging
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
from adaptive_jax.files import new_directory, path_of

logger = logging.getLogger(__name__)

POSITIONAL = ["TEXT"]
WORDS = (2_000_000, 2_000_000, 10_000_000)
ADDRESS = "https://www.statmt.org/wmt14/training-monolingual-news-crawl/news.{}.en.shuffled.gz"
NEWS_CRAWL = {f"news_crawl_{year}": ADDRESS.format(year) for year in range(2007, 2012)}


def cut(
    source: Path,
    output: Path,
    sizes: Sequence[int] = WORDS,
    by_lines: bool = False,
    seed: int = 0,
) -> dict[str, int]:
    """Writes train.txt, valid.txt and test.txt to `output`, a new directory. Returns how many words
    each has, `<eos>` counted.

    source: a file of text, also .gz, .xz, .bz2 or .zip; or a directory with the three splits.
    sizes: words of each part, those between white space, and `<eos>`; or, `by_lines`, its lines.
    seed: with one, the lines of each part are shuffled.

    Raises:
        InputError: no text there, one that is not UTF-8, or too little for three parts; an output
            that exists.
    """
    _check_new(output)
    if source.is_dir():
        texts = local_texts(source, SPLITS, CORPORA["wikitext103_raw"].patterns)
        streams = [text.lines() for text in texts.values()]
    elif source.is_file():
        streams = [Text((source,)).lines()] * 3
    else:
        raise InputError(
            f"{source} does not exist: use a file of text, or a directory with train, valid and"
            " test"
        )
    counts, short = {}, []
    with new_directory(output) as directory:
        for split, stream, size in zip(SPLITS, streams, sizes, strict=True):
            part = list(itertools.islice(stream, size) if by_lines else first_words(stream, size))
            if not part:
                raise InputError(
                    f"{source} has no text left for the {split} split: use a longer text, or"
                    " smaller --words or --lines"
                )
            if seed:
                random.Random(seed).shuffle(part)
            (directory / f"{NAMES[split][0]}.txt").write_bytes(b"".join(part))
            counts[split] = sum(len(line.split()) + 1 for line in part)
            found, unit = (len(part), "lines") if by_lines else (counts[split], "words")
            if found < size:
                short.append((split, f"{found:,}", f"{size:,}", unit))
    for each in short:
        logger.warning("the text ended: the %s split has %s of %s %s", *each)
    return counts


def _check_new(output: Path) -> None:
    """Raises InputError for an output that exists, except an empty directory."""
    if output.is_dir() and not any(output.iterdir()):
        return
    if output.exists():
        raise InputError(f"--output={output} already exists: use a new directory, or remove it")


def first_words(stream: Iterator[bytes], words: int) -> Iterator[bytes]:
    """Whole lines from the stream until they have `words` words, `<eos>` included."""
    for line in stream:
        words -= len(line.split()) + 1
        yield line
        if words <= 0:
            return


def main(source: str) -> None:
    """Cuts the text, downloaded where it is not here, and says how many words each part has."""
    given = flags.FLAGS
    if given.words and given.lines:
        raise InputError("--words and --lines are both given: use one of them")
    sizes = given.words or given.lines or list(map(str, WORDS))
    if len(sizes) != 3 or not all(n.isdecimal() and int(n) for n in sizes):
        raise InputError(
            f"--words and --lines must be three numbers, 1 or more, got {','.join(sizes)}: use"
            " those of train, valid and test"
        )
    sizes, output = list(map(int, sizes)), path_of(given.output)
    _check_new(output)  # before a download
    text = _text(source, given.cache)
    counts = cut(text, output, sizes, by_lines=bool(given.lines), seed=given.shuffle_seed)
    said = ", ".join(f"{split} {number:,} words" for split, number in counts.items())
    print(f"{given.output}: {said}")


def _text(source, cache):
    """A file or directory; or what it names, downloaded."""
    path = Path(source) if "://" in source else path_of(source)
    if path.exists() or not source.startswith(("news_crawl_", "http://", "https://")):
        return path
    folder = cache_of(cache) / "downloads"
    if "://" in source:  # other addresses may end in the same name
        return download(source, folder / hashlib.sha256(source.encode()).hexdigest()[:8])
    check_known(f"TEXT={source}", source, NEWS_CRAWL)
    return download(NEWS_CRAWL[source], folder)


def define_flags() -> None:
    """Defines the flags of the command."""
    flags.DEFINE_string(
        "output", None, "New directory for train.txt, valid.txt and test.txt.", required=True
    )
    flags.DEFINE_list(
        "words",
        None,
        f"Words of each part, at most a line more; default: {','.join(map(str, WORDS))}.",
    )
    flags.DEFINE_list("lines", None, "Lines of each part, instead of words.")
    flags.DEFINE_integer(
        "shuffle_seed", 0, "Seed to shuffle the lines of each part by; 0: they stay in order."
    )
    flags.DEFINE_string("cache", CACHE, "Directory for downloads.")
