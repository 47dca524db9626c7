"""WikiText-2 (2.1M words, vocabulary 33,278): the eight rows of Baevski & Auli 2019, Table 3, on a corpus that one small device
can hold.

| row     | input and output layers                       | parameters |
|---------|-----------------------------------------------|------------|
| `sm`    | words of 128, full softmax                    |      13.3M |
| `sm_t`  | the same, tied                                |       9.1M |
| `bpe`   | 8K sub-words of 256, full softmax             |       9.0M |
| `bpe_t` | the same, tied                                |       6.9M |
| `asm`   | words of 64, adaptive softmax                 |       8.4M |
| `cnn`   | character CNN, adaptive softmax               |       7.5M |
| `adp`   | adaptive input, adaptive softmax              |       7.8M |
| `adp_t` | the same, tied                                |       6.3M |

There are no published numbers of these. Not yet trained to the end; `python -m benchmarks.rows` compares all eight in small
(benchmarks/RESULTS.md). The commands, with a download or with a local copy of the corpus:

    python train.py --config=configs/wikitext2.py:adp_t --workdir=runs/wikitext2 [--config.data.path=DIR]
    python evaluate.py --workdir=runs/wikitext2 --split=test --window=256 --context=128
"""

from ml_collections import ConfigDict

from adaptive_jax.errors import check_known
from configs.factorisation import factorisation

FILTERS = ((1, 32), (2, 64), (3, 96), (4, 128), (5, 128), (6, 128), (7, 128))
BPE = {"data.codes": 8_000, "data.vocabulary_size": 8_389}
ROWS = {"sm": {}, "sm_t": {}, "bpe": BPE, "bpe_t": BPE, "asm": {}, "cnn": {}, "adp": {}, "adp_t": {}}


def get_config(row="adp_t"):
    """The config of a row of `ROWS`."""
    check_known(f"row {row!r} of configs/wikitext2.py", row, ROWS)
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
                "corpus": "wikitext2",
                "path": "",
                "cache": "~/.cache/adaptive_jax",
                "threshold": 1,
                "limit": 0,
                "codes": 0,
                "tokeniser": "none",
                "lower": False,
                "vocabulary_size": 33_278,
                "block": 256,
                "break_mode": "none",
                "rows": "packed",
            },
            **factorisation(
                row, cutoffs=(2_500, 10_000), width=128, narrow=64, characters=32, filters=FILTERS, tail_dropout=0.2
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
