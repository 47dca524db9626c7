r"""Your own text: one of three models, with a vocabulary and cutoffs from the text.

    python train.py --config=configs/own_text.py:small --config.data.path=DIR \
        --workdir=runs/mine --hours=1
    python evaluate.py --workdir=runs/mine --split=test

| row | parameters of the blocks | tokens read | for |
|---|---:|---:|---|
| small | 0.9M | 6M | a laptop, minutes |
| medium | 11M | 330M | one accelerator, an hour or two |
| large | 200M | 6,600M | several accelerators, a day |

DIR holds train.txt, valid.txt and test.txt, or the files of one text, nested and of any suffix, or
is one file: the last tenth of the lines of one text (at most 10,000 + 10,000) becomes validation
and test text, and an empty line stands between two files. The copies lie in the cache; your folder
stays as it is. White space separates words, and a line ends a sentence or a paragraph.

`small` trains by Adam, and its tables by Adagrad with one number a row; the others by the paper's
optimizer, which needs many updates. On the Penn Treebank, after 900 updates of `small`, test
perplexity is 190.6, and 277.3 by the paper's (one run each). A model without tables of words, such
as `--config.input.name=char_cnn`, needs `--config.optimizer.tables=`.

Training prints the vocabulary that it chose and why; `--dry_run` prints it too, with the size of
the model. `--config.data.threshold=3` or `--config.data.codes=8000` chooses another, and any key
changes the model. Training ends after `steps` updates, after `--hours`, or when four evaluations in
a row are no better.

Ids of a tokenizer of your own, in train, valid and test as .npy or flat .bin (docs/own_data.md):

    python train.py --config=configs/own_text.py --config.data.corpus=ids --config.data.path=DIR \
        --config.data.vocabulary_size=128256 --workdir=runs/mine --hours=1

This file needs nothing but the package: a copy of it trains anywhere, also without a clone.

Reproduces: nothing published. It is the model of Baevski & Auli 2019 (ADP-T: adaptive input, tied
adaptive softmax).
"""

from adaptive_jax.config import rows
from adaptive_jax.config.rows import Row

SETTINGS = {"own_text": True, "data.corpus": "text_files", "schedule.cycles": 1}
SETTINGS |= {"early_stopping": 4}
LAYERS = {
    "adp_t": {
        "input.name": "adaptive",
        "output.name": "adaptive",
        "output.tail_dropout": 0.0,
        "output.table.name": "tied",
    }
}


def size(layers, features, heads, length, batch, steps):
    """The settings of a model, its rows, its updates and their schedule."""
    return {
        "body.layers": layers,
        "body.features": features,
        "body.heads": heads,
        "body.feed_forward": 4 * features,
        "batches.sequence_length": length,
        "tokens_per_update": batch,
        "tokens_per_device": min(batch, 8_192),
        "steps": steps,
        "evaluate_every": steps // 20,
        "checkpoint_every": steps // 20,
        "optimizer.learning_rate": 1.0 if batch >= 16_384 else 0.5,
        "schedule.warmup_steps": steps // 10,
        "schedule.cycle_steps": steps - steps // 10,
    }


ROW_WISE = {  # of configs/quickstart.py:row_wise, too
    "optimizer.name": "adam",
    "optimizer.learning_rate": 0.002,
    "optimizer.clip_norm": 1.0,
    "optimizer.tables": "row_wise_adagrad",
    "optimizer.tables_scale": 25.0,
}
ROWS = {
    "small": Row("adp_t", size(2, 192, 4, 64, 2_048, 3_000) | ROW_WISE),
    "medium": Row("adp_t", size(6, 384, 8, 256, 16_384, 20_000)),
    "large": Row(
        "adp_t",
        size(16, 1_024, 16, 512, 65_536, 100_000) | {"dtype": "bfloat16", "tokens_per_device": 0},
    ),
}


def get_config(row="small"):
    """The config of a row of `ROWS`."""
    return rows.config_of(row, __file__, ROWS, LAYERS, SETTINGS)
