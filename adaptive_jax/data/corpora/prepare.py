"""Prepares the corpus of a config before a run; otherwise train.py does so when it starts.

    python -m adaptive_jax prepare --config=configs/billion_word.py --config.data.path=DIR

After an interruption the same command resumes.
"""

import time

from adaptive_jax.config import flags as config_flags
from adaptive_jax.errors import InputError

STOPPED = "stopped: the same command resumes the preparation"


def define_flags() -> None:
    """Defines the flags of the command."""
    config_flags.define()


def main():
    """Prepares the corpus and prints its sizes."""
    config, _ = config_flags.config()
    from adaptive_jax.data.corpora.load import load  # after the flags: their errors should not wait

    if config["own_text"]:
        raise InputError(
            "configs/own_text.py splits a text and chooses its vocabulary when training begins: run"
            " train.py, which prepares the text, or train.py --dry_run"
        )
    data = config["data"]
    start = time.perf_counter()
    corpus = load(data)
    tokens = ", ".join(f"{split} {len(ids):,}" for split, ids in corpus.ids.items())
    print(
        f"{data['corpus']}: vocabulary {len(corpus.vocabulary):,}; tokens {tokens};"
        f" {time.perf_counter() - start:.1f} s"
    )
