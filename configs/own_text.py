"""Your own text: the vocabulary, the model and the training are chosen for the text, for this
machine and for the time you have.

    python train.py --config=configs/own_text.py --config.data.path=DIR --workdir=runs/mine \\
        --hours=1
    python evaluate.py --workdir=runs/mine --split=test

DIR holds train.txt, valid.txt and test.txt, or one text file, or is that file: of one file, the
last tenth of the lines (at most 10,000 + 10,000) is split into validation and test text. The copies
lie in data.cache; your folder stays as it is. White space separates words, and a line ends a
sentence or a paragraph.

Training prints what it chose and why; `--dry_run` prints it too. The rules are in
adaptive_jax/planning/choose.py. A setting of yours is kept, and the others are chosen around it:
`--config.body.layers=4`, `--config.data.threshold=3`, `--config.data.codes=8000`. The choice is
made once: the same command resumes the run with it.

Ids of a tokenizer of your own, in train, valid and test as .npy or flat .bin (docs/own_data.md):

    python train.py --config=configs/own_text.py --config.data.corpus=ids --config.data.path=DIR \\
        --config.data.vocabulary_size=128256 --workdir=runs/mine --hours=1

This file needs nothing but the package: a copy of it trains anywhere, also without a clone.

Reproduces: nothing published. It is the model of Baevski & Auli 2019 (ADP-T: adaptive input, tied
adaptive softmax), from 0.2M to some 700M parameters.
"""

from adaptive_jax.config import rows

SETTINGS = {"data.corpus": "text_files", "schedule.cycles": 1, "early_stopping": 4}
LAYERS = {
    "input.name": "adaptive",
    "output.name": "adaptive",
    "output.tail_dropout": 0.0,
    "output.table.name": "tied",
}
CHOSEN = [
    "steps",
    "dtype",
    "tokens_per_update",
    "tokens_per_device",
    "log_every",
    "evaluate_every",
    "checkpoint_every",
    *(f"data.{key}" for key in ("threshold", "limit", "codes", "vocabulary_size")),
    "batches.sequence_length",
    "input.cutoffs",
    *(f"body.{key}" for key in ("layers", "features", "heads", "feed_forward")),
    "body.dropout",
    "body.attention_dropout",
    "optimizer.learning_rate",
    "schedule.warmup_steps",
    "schedule.cycle_steps",
]


def get_config():
    """The config: what is None is chosen when training begins. `choose.hours` is the time that
    it may take.
    """
    return rows.config(SETTINGS, LAYERS, dict.fromkeys(CHOSEN), {"choose.hours": 1.0})
