"""Penn Treebank (0.93M words, vocabulary 10,000): the eight rows of Baevski & Auli 2019, Table 3, on the smallest published
corpus here. The models are those of configs/wikitext2.py.

No numbers are published for these models of 5 to 8M parameters, and none has been trained to the end here yet. The commands,
with a download or with a local copy of the corpus:

    python train.py --config=configs/penn_treebank.py:adp_t --workdir=runs/ptb [--config.data.path=DIR]
    python evaluate.py --workdir=runs/ptb --split=test --window=128 --context=64

The AWD-LSTM, see configs/wikitext2.py, has 24.2M parameters here:

- `awd_lstm`: as Merity et al. 2018 trained it, for 500 epochs, with dropout 0.4 and 0.25 in the places of 0.65 and 0.2. Their
  60.0 / 57.3 is after finetuning; the public code's README gives 61.2 / 58.8 without it, which is what this row can reach.
- `awd_sm`: as Apostoae 2019 did (Table 4.3). The 83 epochs are what it did in its 45 minutes on a GTX 1070. The other rows of that
  table are in docs/rows.md.
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
LAYERS |= {"awd_lstm": base.AWD_LSTM} | base.thesis_layers((1_000, 4_000))
WORDS = 929_589
ROWS = wikitext2.ROWS | {
    "bpe": Row("bpe", BPE),
    "bpe_t": Row("bpe_t", BPE),
    "awd_lstm": Row(
        "awd_lstm",
        {**base.streams(20, WORDS, epochs=500), "body.input_dropout": 0.4, "body.hidden_dropout": 0.25},
        Paper(61.2, 58.8, 24.2, table="Merity et al. 2018, the public code"),
    ),
}
THESIS = {  # perplexity on valid and test, seconds an epoch and in all
    "awd_sm": (69.41, 67.21, 31.9, 2651),
    "hsm_weighted_kmeans_pretrained": (78.26, 75.25, 25.5, 1506),
    "hsm_weighted_kmeans_glove": (83.93, 80.69, 25.9, 1139),
    "hsm_kmeans_pretrained": (79.04, 75.06, 25.8, 1598),
    "hsm_kmeans_glove": (83.93, 80.75, 25.8, 1108),
    "hsm_mixture_pretrained": (80.64, 77.10, 25.7, 1438),
    "hsm_mixture_glove": (80.64, 77.89, 26.2, 1417),
    "hsm_frequency": (82.27, 79.57, 25.7, 1542),
    "awd_asm_autoencoder": (79.04, 76.44, 25.8, 1650),
    "awd_asm": (78.26, 74.91, 24.5, 1447),
    "awd_air_autoencoder": (91.84, 87.15, 25.3, 1541),
    "awd_air": (84.77, 80.47, 24.6, 1597),
}
SETUPS = {  # streams, rate, millions of parameters
    "awd_sm": (128, 0.003, 24.2),
    "awd_hsm": (256, 0.003, 24.7),
    "awd_asm": (256, 0.003, 24.9),
    "awd_air": (256, 0.003, 21.9),
}
ROWS |= base.thesis_rows("penn_treebank", WORDS, SETUPS, "4.3", THESIS)


def get_config(row="adp_t"):
    """The config of a row of `ROWS`."""
    return base.config_of(row, __file__, ROWS, LAYERS, SETTINGS)
