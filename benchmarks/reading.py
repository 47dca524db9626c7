"""Runs a script with letters read as GroC's public code reads them, to see which reading predicts
better.

    python -m benchmarks.reading train.py --config=configs/penn_treebank.py:groc \\
        --workdir=runs/misread --config.input.lexicon=DIR
    python -m benchmarks.reading evaluate.py --workdir=runs/misread

The public code takes the `[20, 16]` numbers of a word's letters for `[16, 20]` ones, without
transposing them. So its filters see no n-grams of letters, and padding is no longer at the end. A
run must be evaluated as it was trained; nothing in it tells.
"""

import runpy
import sys

import jax

from adaptive_jax.inputs import groc, letters


def misread(characters: jax.Array, read: jax.Array) -> jax.Array:
    """What the public code's convolutions see, `[words, columns, width]`, in the place of
    `letters.letter_vectors`.
    """
    words, columns, width = *read.shape, characters.shape[1]
    return characters[read].reshape(words, width, columns).transpose(0, 2, 1)


if __name__ == "__main__":
    letters.letter_vectors = misread
    groc.SHORT = ()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
