"""A small adaptive-input transformer that learns on a laptop in minutes.

Reproduces: nothing published; the model of Baevski & Auli 2019 (ADP-T: adaptive input, tied adaptive softmax) in small.
Corpus: the American Standard Version of the Bible, from the package `pythonbible`: no download.
Ours: test perplexity 79.87 where counting words alone gives 291.70; 1.3M parameters, about 2 minutes on 2 CPU cores.

    python train.py --config=configs/quickstart.py --workdir=runs/quickstart
    python evaluate.py --workdir=runs/quickstart --split=test
"""

from ml_collections import ConfigDict

from adaptive_jax.errors import check_known


def get_config(row="adp_t"):
    """There is one row, `adp_t`."""
    check_known(f"row {row!r} of configs/quickstart.py", row, ["adp_t"])
    return ConfigDict(
        {
            "steps": 600,
            "seed": 0,
            "dtype": "float32",
            "tokens_per_update": 2048,
            "tokens_per_device": 2048,
            "fsdp": 0,
            "log_every": 20,
            "evaluate_every": 100,
            "checkpoint_every": 200,
            "keep": 1,
            "data": {
                "corpus": "embedded",
                "path": "",
                "cache": "~/.cache/adaptive_jax",
                "threshold": 2,
                "limit": 0,
                "codes": 0,
                "tokeniser": "none",
                "lower": False,
                "vocabulary_size": 8_447,
                "block": 64,
                "break_mode": "none",
                "rows": "packed",
            },
            "input": {"name": "adaptive", "cutoffs": (1_000, 4_000), "factor": 4, "width": 0},
            "body": {
                "name": "transformer",
                "layers": 2,
                "features": 192,
                "heads": 4,
                "feed_forward": 768,
                "dropout": 0.1,
                "attention_dropout": 0.0,
                "activation_dropout": 0.0,
                "final_norm": True,
                "attention": "auto",
                "remat": "none",
            },
            "output": {
                "name": "adaptive",
                "table": {"name": "tied", "share_projections": True, "share_head_projection": False, "cutoffs": ()},
                "tail_dropout": 0.0,
                "input_dropout": 0.0,
                "label_smoothing": 0.0,
                "z_loss": 0.0,
            },
            "optimizer": {
                "learning_rate": 0.5,
                "min_learning_rate": 1e-5,
                "warmup_from": 1e-7,
                "warmup_steps": 50,
                "cycle_steps": 550,
                "cycles": 1,
                "shrink": 0.75,
                "momentum": 0.99,
                "clip_norm": 0.1,
            },
        }
    )
