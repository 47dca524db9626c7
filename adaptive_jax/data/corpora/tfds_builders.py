"""Corpora as data sets of tensorflow-datasets, for programs of other people.

    import adaptive_jax.data.corpora.tfds_builders
    source = tfds.data_source(
        "wikitext2", split="train", builder_kwargs={"file_format": "array_record"}
    )
    source[1]["text"]  # b" = Valkyria Chronicles III = "

Importing this module registers `penn_treebank`, `wikitext2`, `wikitext103`, `billion_word` and
`europarl`, which are downloaded from the addresses of `known.CORPORA` and checked against their
SHA-256, and `news_crawl2007`, whose file lies in the `manual_dir` of tensorflow-datasets. A record
is a line, in the order of the text but for `europarl`. `tfds.data_source` with array_record needs
no TensorFlow; `tfds.load` does. Training in this project reads no records of these: it makes ids
from text, which is many times as fast.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from adaptive_jax.data.corpora.corpus import SPLITS
from adaptive_jax.data.corpora.download import url_infos
from adaptive_jax.data.corpora.known import CORPORA
from adaptive_jax.data.corpora.text import Text
from adaptive_jax.errors import InputError, of_extra

with of_extra("train"):
    import tensorflow_datasets as tfds

WORDS = (2_000_000, 2_000_000, 10_000_000)  # of the splits of News Crawl, at least


class _Lines(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """A data set of lines; `CITATION` and `HOMEPAGE` are shown in its info."""

    VERSION = tfds.core.Version("1.0.0")
    CITATION = HOMEPAGE = ""
    SHUFFLED = False  # whether tensorflow-datasets shuffles the lines, always alike

    def _info(self):
        return tfds.core.DatasetInfo(
            builder=self,
            description=self.__doc__,
            features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
            homepage=self.HOMEPAGE,
            citation=self.CITATION,
            disable_shuffling=not self.SHUFFLED,
        )

    def _split_generators(self, dl_manager):
        lines = self._lines(dl_manager)
        return {split: self._generate_examples(lines[split]) for split in SPLITS}

    def _generate_examples(self, lines):
        for number, line in enumerate(lines):
            yield number, {"text": line.removesuffix(b"\n")}

    @property
    def url_infos(self):
        published = CORPORA.get(self.name)
        return url_infos(published.files) if published else {}

    def _lines(self, dl_manager) -> Mapping[str, Iterable[bytes]]:
        published = CORPORA[self.name]
        files = [Path(path) for path in dl_manager.download(list(published.files))]
        texts = published.splits(files, Path(dl_manager.download_dir) / f"{self.name}_splits")
        return {split: text.lines() for split, text in texts.items()}


class PennTreebank(_Lines):
    """Penn Treebank as language models read it: 0.93M words of the Wall Street Journal, 10,000
    distinct, lower-cased, without punctuation, numbers as N.
    """

    HOMEPAGE = "https://catalog.ldc.upenn.edu/LDC99T42"
    CITATION = """@inproceedings{mikolov2010recurrent,
  title = {Recurrent neural network based language model},
  author = {Mikolov, Tom{\\'a}{\\v{s}} and Karafi{\\'a}t, Martin and Burget, Luk{\\'a}{\\v{s}} and
    {\\v{C}}ernock{\\'y}, Jan and Khudanpur, Sanjeev},
  booktitle = {Interspeech}, year = {2010}
}"""


class Wikitext2(_Lines):
    """WikiText-2: 2.1M words of Wikipedia's good articles, 33,278 distinct; a blank line is a
    line.
    """

    HOMEPAGE = "https://arxiv.org/abs/1609.07843"
    CITATION = """@inproceedings{merity2017pointer,
  title = {Pointer sentinel mixture models},
  author = {Merity, Stephen and Xiong, Caiming and Bradbury, James and Socher, Richard},
  booktitle = {International Conference on Learning Representations}, year = {2017}
}"""


class Wikitext103(_Lines):
    """WikiText-103: 103M words of Wikipedia's good articles, 267,735 distinct."""

    HOMEPAGE, CITATION = Wikitext2.HOMEPAGE, Wikitext2.CITATION


class BillionWord(_Lines):
    """One Billion Word Benchmark, held-out shards 1 (validation) and 0 (test), by which published
    results are measured. `lm1b` of tensorflow-datasets has other held-out text.
    """

    HOMEPAGE = "http://www.statmt.org/lm-benchmark/"
    CITATION = """@inproceedings{chelba2014one,
  title = {One billion word benchmark for measuring progress in statistical language modeling},
  author = {Chelba, Ciprian and Mikolov, Tomas and Schuster, Mike and Ge, Qi and Brants, Thorsten
    and Koehn, Phillipp and Robinson, Tony},
  booktitle = {Interspeech}, year = {2014}
}"""


class Europarl(_Lines):
    """English lines of Europarl v7, French-English, shuffled, of which a random 1 % is validation
    and test text in equal parts (Apostoae 2019, section 4.1); cased and not tokenised.
    """

    SHUFFLED = True
    HOMEPAGE = "https://www.statmt.org/europarl/"
    CITATION = """@inproceedings{koehn2005europarl,
  title = {Europarl: A parallel corpus for statistical machine translation},
  author = {Koehn, Philipp}, booktitle = {MT Summit}, year = {2005}
}"""


class NewsCrawl2007(_Lines):
    """News Crawl 2007: the first 2 million words to train, the next 2 to validate and 10 to test
    (Grave et al. 2017; Pappas et al. 2020); cased and not tokenised.
    """

    MANUAL_DOWNLOAD_INSTRUCTIONS = "news.2007.en.shuffled, plain, .gz or .xz"
    HOMEPAGE = "https://www.statmt.org/wmt14/translation-task.html"

    def _lines(self, dl_manager):
        files = sorted(Path(dl_manager.manual_dir).glob("news.2007.en.shuffled*"))
        if len(files) != 1:
            raise InputError(
                f"{dl_manager.manual_dir} must have one file news.2007.en.shuffled*, got"
                f" {len(files)}: put it there, or use tfds.download.DownloadConfig(manual_dir=DIR)"
            )
        stream = Text((files[0],)).lines()
        return {
            split: list(first_words(stream, words))
            for split, words in zip(SPLITS, WORDS, strict=True)
        }


def first_words(stream: Iterator[bytes], words: int) -> Iterator[bytes]:
    """Whole lines from the stream until they have `words` words, `<eos>` included."""
    for line in stream:
        words -= len(line.split()) + 1
        yield line
        if words <= 0:
            return
