"""Penn Treebank (0.93M words, vocabulary 10,000): the eight rows of Baevski & Auli 2019, Table 3, on the smallest published
corpus here. The models are those of configs/wikitext2.py.

No numbers are published for these models of 5 to 8M parameters, and none has been trained to the end here yet. The commands,
with a download or with a local copy of the corpus:

    python train.py --config=configs/penn_treebank.py:adp_t --workdir=runs/ptb [--config.data.path=DIR]
    python evaluate.py --workdir=runs/ptb --split=test --window=128 --context=64
"""

from configs import base, wikitext2

SETTINGS = wikitext2.SETTINGS | {
    "data.corpus": "penn_treebank",
    "data.vocabulary_size": 10_000,
    "batches.sequence_length": 128,
}
LAYERS = base.layers(cutoffs=(2_000, 5_000), width=128, narrow=64, tail_dropout=0.2, characters=wikitext2.CHARACTERS)
BPE = {"data.codes": 4_000, "data.vocabulary_size": 4_298}
ROWS = wikitext2.ROWS | {"bpe": base.Row("bpe", BPE), "bpe_t": base.Row("bpe_t", BPE)}


def get_config(row="adp_t"):
    """The config of a row of `ROWS`."""
    return base.config_of(row, __file__, ROWS, LAYERS, SETTINGS)
