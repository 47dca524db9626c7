"""Reads WordNet's own files with NLTK: the related words and the definition of a word."""

import importlib.util
import io
import lzma
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from adaptive_jax.errors import InputError

FILES = tuple(
    f"{kind}.{part}" for part in ("noun", "verb", "adj", "adv") for kind in ("index", "data")
)
FILES += ("noun.exc", "verb.exc", "adj.exc", "adv.exc", "lexnames")
NO_NLTK = (
    "input.lexicon is a directory of WordNet, which NLTK reads: run `pip install nltk`, or give a"
    " .jsonl file"
)


def file_of(directory: Path, name: str) -> Path:
    """The file `name` of a directory of WordNet, or `name.xz` where there is only that.

    Raises:
        InputError: neither is there.
    """
    for path in (directory / name, directory / f"{name}.xz"):
        if path.is_file():
            return path
    raise InputError(
        f"{directory} has no {name}, so it is no directory of WordNet: give one with {FILES[0]},"
        f" {FILES[1]} and the others, plain or .xz, such as ~/nltk_data/corpora/wordnet, or a"
        " .jsonl file"
    )


def check_wordnet(directory: Path) -> None:
    """Checks that a directory has the files of WordNet and that NLTK is there. Raises
    InputError.
    """
    for name in FILES:
        file_of(directory, name)
    if not importlib.util.find_spec("nltk"):
        raise InputError(NO_NLTK)


def read_wordnet(
    directory: Path, words: Iterable[str]
) -> Iterator[tuple[str, list[str], list[str], list[str]]]:
    """Yields (word, synonyms, hyponyms, definitions) for every one of `words` that WordNet has,
    those of frequent senses first.

    A word is among its own synonyms: the coverage that Pappas et al. 2020 print rests on that.
    There is one definition a sense, a text. A word is looked up in lower case; if it is not there,
    rules take off its endings until it is, as NLTK 3.5 does.

    Raises:
        InputError: NLTK is missing, or files that it cannot read.
    """
    wordnet = _open(directory)
    for word in words:
        if senses := wordnet.synsets(word):
            synonyms = dict.fromkeys(name for sense in senses for name in sense.lemma_names())
            hyponyms = dict.fromkeys(
                name
                for sense in senses
                for below in sense.hyponyms()
                for name in below.lemma_names()
            )
            yield word, list(synonyms), list(hyponyms), [sense.definition() for sense in senses]


def _open(directory):
    try:
        from nltk.corpus.reader.wordnet import WordNetCorpusReader, WordNetError
        from nltk.data import PathPointer
    except ImportError as error:
        raise InputError(NO_NLTK) from error

    class Elsewhere(PathPointer):
        """A root that is never opened: `Reader` opens files itself, wherever they are."""

        open = file_size = join = None

    class Reader(WordNetCorpusReader):
        """NLTK's reader, on files that may be packed and that lie outside NLTK's own
        directories.
        """

        def open(self, file):
            path = file_of(directory, file)
            content = (
                lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
            )
            return io.StringIO(
                content.decode("latin-1")
            )  # a character a byte, as the files' offsets count

        def map_wn(self, version="wordnet"):
            """No map to other versions: only other languages need it, and it asks for files of
            NLTK.
            """

        def _morphy(self, form, pos, check_exceptions=True):
            """The forms of a word that WordNet has. Later versions than 3.5 of NLTK apply the
            rules only once.
            """

            def known(forms):
                return [
                    each
                    for each in dict.fromkeys(forms)
                    if pos in self._lemma_pos_offset_map.get(each, ())
                ]

            if check_exceptions and form in self._exception_map[pos]:
                return known([form, *self._exception_map[pos][form]])
            shorter, found, rules = [form], [], self.MORPHOLOGICAL_SUBSTITUTIONS[pos]
            while shorter and not found:
                shorter = [
                    each.removesuffix(old) + new
                    for each in shorter
                    for old, new in rules
                    if each.endswith(old)
                ]
                found = known([form, *shorter])
            return found

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there are no other languages
            return Reader(Elsewhere(), None)
    except (WordNetError, ValueError, AssertionError, OSError, EOFError, lzma.LZMAError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{directory} has files that are not WordNet's ({error}): give another directory"
        ) from error
