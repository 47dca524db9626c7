"""WikiText-2 (2.1M words, vocabulary 33,278): the eight rows of Baevski & Auli 2019, Table 3, on a corpus that suits one small
device.

No numbers are published for these models of 6 to 13M parameters, and none has been trained to the end here yet.
`python -m benchmarks.rows` compares all eight in small (benchmarks/RESULTS.md). The commands, with a download or with a local
copy of the corpus:

    python train.py --config=configs/wikitext2.py:adp_t --workdir=runs/wikitext2 [--config.data.path=DIR]
    python evaluate.py --workdir=runs/wikitext2 --split=test --window=256 --context=128
"""

from configs import base
from configs.base import Row

SETTINGS = {
    "data.corpus": "wikitext2",
    "data.vocabulary_size": 33_278,
    "body.dropout": 0.3,
    "body.activation_dropout": 0.1,
    "optimizer.learning_rate": 0.5,
    "schedule.warmup_steps": 500,  # 500 + 1,000 (1 + 2 + 4) = 7,500 updates
}
CHARACTERS = {"width": 32, "filters": ((1, 32), (2, 64), (3, 96), (4, 128), (5, 128), (6, 128), (7, 128))}
LAYERS = base.layers(cutoffs=(2_500, 10_000), width=128, narrow=64, tail_dropout=0.2, characters=CHARACTERS)
BPE = {"data.codes": 8_000, "data.vocabulary_size": 8_389}
ROWS = {name: Row(name) for name in ("sm", "sm_t", "asm", "cnn", "adp", "adp_t")}
ROWS |= {"bpe": Row("bpe", BPE), "bpe_t": Row("bpe_t", BPE)}


def get_config(row="adp_t"):
    """The config of a row of `ROWS`."""
    return base.config_of(row, __file__, ROWS, LAYERS, SETTINGS)
