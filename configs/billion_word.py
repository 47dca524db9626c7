"""Billion Word (768M words, vocabulary 793,471): the rows of Baevski & Auli 2019, Tables 1 and 4.

| row          | published in | input and output layers                        | test  | valid | parameters | hours, V100 |
|--------------|--------------|------------------------------------------------|-------|-------|------------|-------------|
| `bpe_t`      | Table 4      | 32K sub-words of 1024, tied full softmax       | 27.51 | 27.44 | 234.7M     | 34 on 32    |
| `bpe`        | Table 4      | the same, not tied                             | 27.13 | 27.02 | 267.8M     | 35 on 32    |
| `asm`        | Table 4      | words of 256, adaptive softmax                 | 27.06 | 26.97 | 532.8M     | 62 on 32    |
| `cnn`        | Table 4      | character CNN, adaptive softmax                | 26.25 | 26.13 | 365.8M     | 92 on 32    |
| `adp`        | Table 4      | adaptive input, adaptive softmax               | 26.49 | 26.38 | 458.4M     | 65 on 32    |
| `adp_t`      | Table 4      | the same, embeddings tied, projections not     | 25.58 | 25.51 | 330.8M     | 43 on 32    |
| `cnn_131k`   | Table 1      | `cnn`, 131K tokens an update                   | 25.88 |       | 366M       | 79 on 64    |
| `adp_t_131k` | Table 1      | `adp_t`, 131K tokens an update                 | 25.22 |       | 331M       | 55 on 64    |
| `large`      | Table 1      | 20 blocks, feed-forward 6144                   | 23.91 |       | 465M       | 72 on 64    |
| `very_large` | Table 1      | 24 blocks of width 1536, feed-forward 8192     | 23.02 |       | 1026M      | 145 on 64   |

The last four make updates of 131K tokens, the others of 65K. The text gives 24.14 where Table 1 has 23.91.
None has been trained to the end here yet. The commands, with a directory of the corpus' train, valid and test text:

    python train.py --config=configs/billion_word.py:adp_t --workdir=runs/bw --config.data.path=DIR
    python evaluate.py --workdir=runs/bw --split=test

Sentences are shuffled, so each is an example that sees no other, in training and in evaluation; as many as fit are packed
into a row of 512 tokens, with less than 1 % of padding. The paper batches sentences of similar length:
`--config.data.rows=similar`. Of a sentence of more than 512 tokens, each 512 are an example.
"""

from ml_collections import ConfigDict

from adaptive_jax.errors import check_known
from configs.factorisation import factorisation

BPE = {"data.threshold": 1, "data.codes": 32_000, "data.vocabulary_size": 32_347}
OWN_PROJECTIONS = {"output.table.share_projections": False}
MORE_TOKENS = {"tokens_per_update": 131_072}

ROWS = {  # layers of `factorisation`, and what else differs
    "bpe_t": ("bpe_t", BPE),
    "bpe": ("bpe", BPE),
    "asm": ("asm", {}),
    "cnn": ("cnn", {}),
    "adp": ("adp", {}),
    "adp_t": ("adp_t", OWN_PROJECTIONS),
    "cnn_131k": ("cnn", MORE_TOKENS),
    "adp_t_131k": ("adp_t", OWN_PROJECTIONS | MORE_TOKENS),
    "large": ("adp_t", OWN_PROJECTIONS | MORE_TOKENS | {"body.layers": 20, "body.feed_forward": 6144}),
    "very_large": (
        "adp_t",
        OWN_PROJECTIONS | MORE_TOKENS | {"body.layers": 24, "body.features": 1536, "body.feed_forward": 8192},
    ),
}


def get_config(row="adp_t"):
    """The config of a row of `ROWS`."""
    check_known(f"row {row!r} of configs/billion_word.py", row, ROWS)
    layers, changes = ROWS[row]
    config = ConfigDict(
        {
            "steps": 975_000,
            "seed": 0,
            "dtype": "bfloat16",
            "tokens_per_update": 65_536,
            "tokens_per_device": 2048,
            "fsdp": 0,
            "log_every": 100,
            "evaluate_every": 5_000,
            "checkpoint_every": 5_000,
            "keep": 2,
            "data": {
                "corpus": "billion_word",
                "path": "",
                "cache": "~/.cache/adaptive_jax",
                "threshold": 3,
                "limit": 0,
                "codes": 0,
                "tokeniser": "none",
                "lower": False,
                "vocabulary_size": 793_471,
                "block": 512,
                "break_mode": "eos",
                "rows": "packed",
            },
            **factorisation(layers, cutoffs=(60_000, 160_000), width=64, narrow=256, highway_layers=2),
            "body": {
                "name": "transformer",
                "layers": 16,
                "features": 1024,
                "heads": 16,
                "feed_forward": 4096,
                "dropout": 0.1,
                "attention_dropout": 0.1,
                "activation_dropout": 0.0,
                "final_norm": False,
                "attention": "auto",
                "remat": "none",
            },
            "optimizer": {  # 16K + 137K (1 + 2 + 4) = 975K updates
                "learning_rate": 1.0,
                "min_learning_rate": 1e-5,
                "warmup_from": 1e-7,
                "warmup_steps": 16_000,
                "cycle_steps": 137_000,
                "cycles": 3,
                "shrink": 0.6,
                "momentum": 0.99,
                "clip_norm": 0.1,
            },
        }
    )
    config.update_from_flattened_dict(changes)
    return config
