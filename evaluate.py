"""Evaluates a trained model: `python -m adaptive_jax evaluate`."""

from adaptive_jax.__main__ import main

if __name__ == "__main__":
    main("evaluate")
