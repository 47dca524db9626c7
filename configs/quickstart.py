"""A small adaptive-input transformer that learns on a laptop in minutes.

Reproduces: nothing published. It is the model of Baevski & Auli 2019 (ADP-T: adaptive input, tied
adaptive softmax), scaled down. Corpus: the American Standard Version of the Bible, from the package
`pythonbible`, so nothing is downloaded. Result: test perplexity 79.86, where word counts alone give
291.70; 1.3M parameters, about 2 minutes on 2 CPU cores.

    python train.py --config=configs/quickstart.py --workdir=runs/quickstart
    python evaluate.py --workdir=runs/quickstart --split=test

`ngrams` adds pairs and triples of words to the input, docs/ngrams.md: test perplexity 69.08, with
4.8M parameters.

`row_wise` trains the same model by Adam, and its tables by Adagrad with one number a row,
docs/large_tables.md: test perplexity 45.79 after as many updates.

The rows `learned` and `alibi` differ in positions alone; `evaluate.py --window=512` shows how they
read longer windows than those of training.
"""

from adaptive_jax.config import rows
from configs import own_text, papers

SETTINGS = {
    "steps": 600,
    "tokens_per_update": 2048,
    "tokens_per_device": 2048,
    "log_every": 20,
    "evaluate_every": 100,
    "checkpoint_every": 200,
    "data.corpus": "embedded",
    "data.tokeniser": "marks",
    "data.lower": True,
    "data.threshold": 2,
    "data.vocabulary_size": 8_447,
    "batches.sequence_length": 64,
    "body.layers": 2,
    "body.features": 192,
    "body.heads": 4,
    "body.feed_forward": 768,
    "body.attention_dropout": 0.0,
    "optimizer.learning_rate": 0.5,
    "schedule.warmup_steps": 50,
    "schedule.cycle_steps": 550,
    "schedule.cycles": 1,
}
LAYERS = papers.layers(cutoffs=(1_000, 4_000), width=96, narrow=48)
LAYERS["ngrams"] = papers.with_ngrams(LAYERS["adp_t"], **papers.banded(60_000))
ROWS = {"adp_t": rows.Row("adp_t")}
# Other positions, which decide how well the model reads beyond the 64 tokens of its training
ROWS |= {
    "learned": rows.Row(
        "adp_t",
        {"body.positions": "learned", "body.max_positions": SETTINGS["batches.sequence_length"]},
    ),
    "alibi": rows.Row("adp_t", {"body.positions": "alibi"}),
}

ROWS["ngrams"] = rows.Row("ngrams")
ROWS["row_wise"] = rows.Row("adp_t", own_text.ROW_WISE)


def get_config(row="adp_t"):
    """The config of a row of `ROWS`."""
    return rows.config_of(row, __file__, ROWS, LAYERS, SETTINGS)
