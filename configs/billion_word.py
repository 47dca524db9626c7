"""Billion Word (768M words, vocabulary 793,471): the rows of Baevski & Auli 2019, Tables 1 and 4.

`ROWS` holds the published numbers; hours are those of 32 V100 GPUs in Table 4, of 64 in Table 1. To print them as a table:

    python -c "from configs import base, billion_word; print(base.table(billion_word.ROWS))"

The text of the paper gives 24.14 where Table 1 has 23.91. None has been trained to the end here yet. The commands, with a
directory of the corpus' train, valid and test text:

    python train.py --config=configs/billion_word.py:adp_t --workdir=runs/bw --config.data.path=DIR
    python evaluate.py --workdir=runs/bw --split=test

The corpus is shuffled sentences. Each is an example that sees no other, in training and in evaluation; a row of 512 tokens packs
as many as fit, with less than 1 % of padding. The paper batches sentences of similar length: `--config.batches.layout=similar`.
A sentence of more than 512 tokens is split into examples of 512.
"""

from configs import base
from configs.base import Paper, Row

SETTINGS = {
    "steps": 975_000,
    "dtype": "bfloat16",
    "tokens_per_update": 65_536,
    "tokens_per_device": 2048,
    "log_every": 100,
    "evaluate_every": 5_000,
    "checkpoint_every": 5_000,
    "keep": 2,
    "data.corpus": "billion_word",
    "data.threshold": 3,
    "data.vocabulary_size": 793_471,
    "batches.sequence_length": 512,
    "batches.break_mode": "eos",
    "body.layers": 16,
    "body.features": 1024,
    "body.heads": 16,
    "body.feed_forward": 4096,
    "body.final_norm": False,
    "schedule.warmup_steps": 16_000,  # 16K + 137K (1 + 2 + 4) = 975K updates
    "schedule.cycle_steps": 137_000,
    "schedule.shrink": 0.6,
}
LAYERS = base.layers(cutoffs=(60_000, 160_000), width=64, narrow=256, characters={"highway_layers": 2})
BPE = {"data.threshold": 1, "data.codes": 32_000, "data.vocabulary_size": 32_347}
OWN_PROJECTIONS = {"output.table.share_projections": False}
MORE_TOKENS = {"tokens_per_update": 131_072}
LARGE = {"body.layers": 20, "body.feed_forward": 6144}
VERY_LARGE = {"body.layers": 24, "body.features": 1536, "body.feed_forward": 8192}

ROWS = {
    "bpe_t": Row("bpe_t", BPE, Paper(27.44, 27.51, 234.7, 34, "Table 4")),
    "bpe": Row("bpe", BPE, Paper(27.02, 27.13, 267.8, 35, "Table 4")),
    "asm": Row("asm", paper=Paper(26.97, 27.06, 532.8, 62, "Table 4")),
    "cnn": Row("cnn", paper=Paper(26.13, 26.25, 365.8, 92, "Table 4")),
    "adp": Row("adp", paper=Paper(26.38, 26.49, 458.4, 65, "Table 4")),
    "adp_t": Row("adp_t", OWN_PROJECTIONS, Paper(25.51, 25.58, 330.8, 43, "Table 4")),
    "cnn_131k": Row("cnn", MORE_TOKENS, Paper(None, 25.88, 366, 79, "Table 1")),
    "adp_t_131k": Row("adp_t", OWN_PROJECTIONS | MORE_TOKENS, Paper(None, 25.22, 331, 55, "Table 1")),
    "large": Row("adp_t", OWN_PROJECTIONS | MORE_TOKENS | LARGE, Paper(None, 23.91, 465, 72, "Table 1")),
    "very_large": Row("adp_t", OWN_PROJECTIONS | MORE_TOKENS | VERY_LARGE, Paper(None, 23.02, 1026, 145, "Table 1")),
}


def get_config(row="adp_t"):
    """The config of a row of `ROWS`."""
    return base.config_of(row, __file__, ROWS, LAYERS, SETTINGS)
