"""Corpora as data sets of tensorflow-datasets, for other programs.

    import adaptive_jax.data.corpora.tfds_builders
    source = tfds.data_source(
        "wikitext2", split="train", builder_kwargs={"file_format": "array_record"}
    )
    source[1]["text"]  # b" = Valkyria Chronicles III = "

Importing this module registers `penn_treebank`, `wikitext2`, `wikitext103`, `billion_word` and
`europarl`, which are downloaded from the addresses of `published.CORPORA` and checked against their
SHA-256. A record is a line, in the order of the text but for `europarl`. `tfds.data_source` with
array_record needs no TensorFlow; `tfds.load` does. Training in this project reads no records of
these: it makes ids from text, which is many times as fast.
"""

from pathlib import Path

from adaptive_jax.data.corpora.corpus import SPLITS
from adaptive_jax.data.corpora.download import url_infos
from adaptive_jax.data.corpora.published import CORPORA
from adaptive_jax.errors import of_extra

with of_extra("train"):
    import tensorflow_datasets as tfds


class _Lines(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """A data set of lines; `HOMEPAGE` is shown in its info."""

    VERSION = tfds.core.Version("1.0.0")
    HOMEPAGE = ""
    SHUFFLED = False  # whether tensorflow-datasets shuffles the lines, always in the same way

    def _info(self):
        return tfds.core.DatasetInfo(
            builder=self,
            description=self.__doc__,
            features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
            homepage=self.HOMEPAGE,
            disable_shuffling=not self.SHUFFLED,
        )

    def _split_generators(self, dl_manager):
        published = CORPORA[self.name]
        files = [Path(path) for path in dl_manager.download(list(published.files))]
        texts = published.splits(files, Path(dl_manager.download_dir) / f"{self.name}_splits")
        return {split: self._generate_examples(texts[split].lines()) for split in SPLITS}

    def _generate_examples(self, lines):
        for number, line in enumerate(lines):
            yield number, {"text": line.removesuffix(b"\n")}

    @property
    def url_infos(self):
        return url_infos(CORPORA[self.name].files)


class PennTreebank(_Lines):
    """Penn Treebank, preprocessed for language models: 0.93M words of the Wall Street Journal,
    10,000 distinct, lower-cased, without punctuation, numbers as N.
    """

    HOMEPAGE = "https://catalog.ldc.upenn.edu/LDC99T42"


class Wikitext2(_Lines):
    """WikiText-2: 2.1M words of Wikipedia's good articles, 33,278 distinct, with blank lines."""

    HOMEPAGE = "https://arxiv.org/abs/1609.07843"


class Wikitext103(_Lines):
    """WikiText-103: 103M words of Wikipedia's good articles, 267,735 distinct."""

    HOMEPAGE = Wikitext2.HOMEPAGE


class BillionWord(_Lines):
    """One Billion Word Benchmark with the splits of published results: held-out shards 1
    (validation) and 0 (test). `lm1b` of tensorflow-datasets has other held-out text.
    """

    HOMEPAGE = "http://www.statmt.org/lm-benchmark/"


class Europarl(_Lines):
    """English lines of Europarl v7, French-English, shuffled, of which a random 1 % is validation
    and test text in equal parts (Apostoae 2019, section 4.1); cased and not tokenised.
    """

    SHUFFLED = True
    HOMEPAGE = "https://www.statmt.org/europarl/"
