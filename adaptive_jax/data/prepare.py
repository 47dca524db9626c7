"""Prepares the corpus of a config ahead of a run; train.py does the same when it is needed.

    python -m adaptive_jax.data.prepare --config=configs/billion_word.py --config.data.path=DIR
    python -m adaptive_jax.data.prepare --config=configs/billion_word.py --to=gs://my-bucket/billion_word

Counts and encodes in parallel processes; after an interruption the same command goes on where it was. With --to, vocabulary
and ids are also copied to object storage, from where runs read them with --config.data.path=gs://my-bucket/billion_word.
"""

import time

from absl import flags
from ml_collections import config_flags

from adaptive_jax import command
from adaptive_jax.data.corpora import load as corpora
from adaptive_jax.data.corpora import storage

CONFIG = config_flags.DEFINE_config_file("config", None, "Config file, with :row where it has rows.", lock_config=True)
TO = flags.DEFINE_string("to", None, "URL to copy vocabulary and ids to: gs://..., s3://..., file:///...")


def main():
    """Prepares, and prints what there is then."""
    data = CONFIG.value.to_dict()["data"]
    start = time.perf_counter()
    corpus = corpora.load(data)
    tokens = ", ".join(f"{split} {len(ids):,}" for split, ids in corpus.ids.items())
    print(f"{data['corpus']}: vocabulary {len(corpus.vocabulary):,}; tokens {tokens}; {time.perf_counter() - start:.1f} s")
    if TO.value:
        storage.copy(corpus, TO.value)
        print(f"copied to {TO.value}")


if __name__ == "__main__":
    flags.mark_flags_as_required(["config"])
    command.run(main)
