"""Europarl, English (57.7M words, vocabulary 63,104): AWD-LSTM with a full softmax, as in Apostoae 2019, Table 4.5.

The vocabulary is that of words seen three times or more in cased text, split by the Moses tokeniser. The thesis has 55M words,
a vocabulary of 63K, and held-out sentences drawn at random. `DIR` decides what is held out. Where that is the last quarter of
2000, as is usual, perplexities do not compare with the thesis; the count of parameters does, 45.5M.

The 4 epochs are what the thesis did in the 3 hours that it allowed, on a P100. It has not been trained to the end here yet. The
commands:

    python train.py --config=configs/europarl.py:awd_sm --workdir=runs/europarl --config.data.path=DIR
    python evaluate.py --workdir=runs/europarl --split=test
"""

from configs import base
from configs.base import Paper, Row

SETTINGS = {
    "log_every": 100,
    "data.corpus": "europarl",
    "data.threshold": 3,
    "data.tokeniser": "moses",
    "data.vocabulary_size": 63_104,
}
LAYERS = {"awd_sm": base.AWD_SM}
ROWS = {
    "awd_sm": Row(
        "awd_sm",
        {**base.streams(64, 57_700_000, epochs=4), "optimizer.learning_rate": 0.001},
        Paper(41.26, 41.58, 45.5, 3.4, "Apostoae 2019, Table 4.5"),
    ),
}


def get_config(row="awd_sm"):
    """The config of a row of `ROWS`."""
    return base.config_of(row, __file__, ROWS, LAYERS, SETTINGS)
