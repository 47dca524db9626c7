"""Penn Treebank (0.93M words, vocabulary 10,000): the eight rows of Baevski & Auli 2019, Table 3, on the smallest published
corpus here. The models are those of configs/wikitext2.py.

No numbers are published for these models of 5 to 8M parameters, and none has been trained to the end here yet. The commands,
with a download or with a local copy of the corpus:

    python train.py --config=configs/penn_treebank.py:adp_t --workdir=runs/ptb [--config.data.path=DIR]
    python evaluate.py --workdir=runs/ptb --split=test --window=128 --context=64

The AWD-LSTM, see configs/wikitext2.py, has 24.2M parameters here:

- `awd_lstm`: as Merity et al. 2018 trained it, for 500 epochs, with dropout 0.4 and 0.25 in the places of 0.65 and 0.2. Their
  60.0 / 57.3 is after finetuning; the public code's README gives 61.2 / 58.8 without it, which is what this row can reach.
- `awd_sm`: as Apostoae 2019 did (Table 4.3). The 83 epochs are what it did in its 45 minutes on a GTX 1070.
"""

from configs import base, wikitext2
from configs.base import Paper, Row

SETTINGS = wikitext2.SETTINGS | {
    "data.corpus": "penn_treebank",
    "data.vocabulary_size": 10_000,
    "batches.sequence_length": 128,
}
LAYERS = base.layers(cutoffs=(2_000, 5_000), width=128, narrow=64, tail_dropout=0.2, characters=wikitext2.CHARACTERS)
BPE = {"data.codes": 4_000, "data.vocabulary_size": 4_298}
LAYERS |= {"awd_lstm": base.AWD_LSTM, "awd_sm": base.AWD_SM}
WORDS = 929_589
ROWS = wikitext2.ROWS | {
    "bpe": Row("bpe", BPE),
    "bpe_t": Row("bpe_t", BPE),
    "awd_lstm": Row(
        "awd_lstm",
        {**base.streams(20, WORDS, epochs=500), "body.input_dropout": 0.4, "body.hidden_dropout": 0.25},
        Paper(61.2, 58.8, 24.2, table="Merity et al. 2018, the public code"),
    ),
    "awd_sm": Row(
        "awd_sm",
        {**base.streams(128, WORDS, epochs=83), "optimizer.learning_rate": 0.003},
        Paper(69.41, 67.21, 24.2, 0.7, "Apostoae 2019, Table 4.3"),
    ),
}


def get_config(row="adp_t"):
    """The config of a row of `ROWS`."""
    return base.config_of(row, __file__, ROWS, LAYERS, SETTINGS)
