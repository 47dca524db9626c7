"""Penn Treebank (0.93M words, vocabulary 10,000): the eight rows of Baevski & Auli 2019, Table 3, on the smallest published
corpus here.

| row     | input and output layers                       | parameters |
|---------|-----------------------------------------------|------------|
| `sm`    | words of 128, full softmax                    |       7.4M |
| `sm_t`  | the same, tied                                |       6.1M |
| `bpe`   | 4K sub-words of 256, full softmax             |       6.9M |
| `bpe_t` | the same, tied                                |       5.8M |
| `asm`   | words of 64, adaptive softmax                 |       6.2M |
| `cnn`   | character CNN, adaptive softmax               |       6.8M |
| `adp`   | adaptive input, adaptive softmax              |       6.4M |
| `adp_t` | the same, tied                                |       5.6M |

There are no published numbers of these. Not yet trained to the end; `python -m benchmarks.rows` compares all eight in small
(benchmarks/RESULTS.md). The commands, with a download or with a local copy of the corpus:

    python train.py --config=configs/penn_treebank.py:adp_t --workdir=runs/ptb [--config.data.path=DIR]
    python evaluate.py --workdir=runs/ptb --split=test --window=128 --context=64
"""

from ml_collections import ConfigDict

from adaptive_jax.errors import check_known
from configs.factorisation import factorisation

FILTERS = ((1, 32), (2, 64), (3, 96), (4, 128), (5, 128), (6, 128), (7, 128))
BPE = {"data.codes": 4_000, "data.vocabulary_size": 4_298}
ROWS = {"sm": {}, "sm_t": {}, "bpe": BPE, "bpe_t": BPE, "asm": {}, "cnn": {}, "adp": {}, "adp_t": {}}


def get_config(row="adp_t"):
    """The config of a row of `ROWS`."""
    check_known(f"row {row!r} of configs/penn_treebank.py", row, ROWS)
    config = ConfigDict(
        {
            "steps": 7_500,
            "seed": 0,
            "dtype": "float32",
            "tokens_per_update": 8_192,
            "tokens_per_device": 8_192,
            "fsdp": 0,
            "log_every": 50,
            "evaluate_every": 500,
            "checkpoint_every": 500,
            "keep": 1,
            "data": {
                "corpus": "penn_treebank",
                "path": "",
                "cache": "~/.cache/adaptive_jax",
                "threshold": 1,
                "limit": 0,
                "codes": 0,
                "tokeniser": "none",
                "lower": False,
                "vocabulary_size": 10_000,
                "block": 128,
                "break_mode": "none",
                "rows": "packed",
            },
            **factorisation(
                row, cutoffs=(2_000, 5_000), width=128, narrow=64, characters=32, filters=FILTERS, tail_dropout=0.2
            ),
            "body": {
                "name": "transformer",
                "layers": 6,
                "features": 256,
                "heads": 8,
                "feed_forward": 1024,
                "dropout": 0.3,
                "attention_dropout": 0.1,
                "activation_dropout": 0.1,
                "final_norm": True,
                "attention": "auto",
                "remat": "none",
            },
            "optimizer": {  # 500 + 1,000 (1 + 2 + 4) = 7,500 updates
                "learning_rate": 0.5,
                "min_learning_rate": 1e-5,
                "warmup_from": 1e-7,
                "warmup_steps": 500,
                "cycle_steps": 1_000,
                "cycles": 3,
                "shrink": 0.75,
                "momentum": 0.99,
                "clip_norm": 0.1,
            },
        }
    )
    config.update_from_flattened_dict(ROWS[row])
    return config
