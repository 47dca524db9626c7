"""Trains a language model: `python -m adaptive_jax train`."""

from adaptive_jax.__main__ import main

if __name__ == "__main__":
    main("train")
