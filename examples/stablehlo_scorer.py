r"""Log-probabilities of lines of text by an exported StableHLO program of any model, with JAX and
without adaptive_jax:

python -m adaptive_jax export --workdir=runs/quickstart --output=exported --format=stablehlo \
    --rows=16
python examples/stablehlo_scorer.py exported < text.txt

It prints the nats of each line with its <eos>, and the line.
"""

import itertools
import json
import re
import sys
import unicodedata
from pathlib import Path

import jax.export
import numpy as np
from safetensors.numpy import load_file

# Words, numbers and punctuation marks, as data.tokeniser=marks separates them
CHARACTERS = map(chr, range(0x300, 0x10000))
COMBINING = "".join(c for c in CHARACTERS if unicodedata.category(c)[0] == "M") + "\u200c\u200d"
LETTERS = rf"[^\W\d_]+(?:[{COMBINING}]+[^\W\d_]*)*"
MARKS = rf"(?<!\S)<(?:unk|eos)>(?!\S)|{LETTERS}(?:['’-]{LETTERS})*|\d+|[^\w\s]|_"


def words_of(line, data):
    """The words of a line, as training with the settings `data` separates them."""
    line = line.removeprefix("\ufeff")  # a byte order mark
    if data["tokeniser"] == "none":
        return line.split()
    return [word.lower() for word in re.findall(MARKS, line)]


def load(folder):
    """The program, its arrays, its description, and the id of each word."""
    program = jax.jit(jax.export.deserialize((folder / "scorer.stablehlo").read_bytes()).call)
    about = json.loads((folder / "scorer.json").read_text())
    data = about["config"]["data"]
    splits = ("none", False), ("marks", True)  # at white space; in lower case at punctuation marks
    readable = (data["tokeniser"], data["lower"]) in splits
    if data["codes"] or data.get("tokenizer") or data["corpus"] == "ids" or not readable:
        sys.exit("this example cannot split text into the words of this model")
    lines = (folder / "vocabulary.txt").read_text(encoding="utf-8").split("\n")[:-1]
    ids = {line.rpartition(" ")[0]: i for i, line in enumerate(lines)}
    return program, load_file(folder / "scorer.safetensors"), about, ids


def log_probs(program, arrays, about, texts):
    """Log-probabilities of the ids in each text but its first, which is only read.

    A model without a carry reads each window by itself.
    """
    window = about["window"]
    windows = -(-(max(map(len, texts)) - 1) // window)
    ids = np.zeros((about["rows"], windows * window + 1), np.int32)  # 0: padding, scored but unused
    for row, text in zip(ids, texts, strict=False):
        row[: len(text)] = text
    carry = [np.zeros(array["shape"], array["dtype"]) for array in about["carry"]]
    scores = []
    for start in range(0, windows * window, window):
        part = ids[:, start : start + window + 1]
        nll, carry = program(arrays, carry, part[:, :-1], part[:, 1:])
        scores.append(-np.asarray(nll))
    scores = np.concatenate(scores, axis=1)
    return [row[: len(text) - 1] for row, text in zip(scores, texts, strict=False)]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/stablehlo_scorer.py EXPORTED < text.txt")
    program, arrays, about, ids = load(Path(sys.argv[1]))
    while lines := list(itertools.islice(sys.stdin, about["rows"])):
        data = about["config"]["data"]
        words = (["<eos>", *words_of(line, data), "<eos>"] for line in lines)
        texts = [[ids.get(word, ids.get("<unk>")) for word in line] for line in words]
        for line, text in zip(lines, texts, strict=True):
            if None in text:
                sys.exit(
                    f"a word of this line is not in the vocabulary, which has no <unk>: {line}"
                )
        for line, nats in zip(lines, log_probs(program, arrays, about, texts), strict=True):
            print(f"{nats.sum():.4f}\t{line}", end="")
