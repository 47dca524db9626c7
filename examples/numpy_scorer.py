"""Log-probabilities of lines of text by an exported transformer with adaptive input and softmax, in
NumPy:

python examples/numpy_scorer.py EXPORTED < text.txt

It prints the nats of each line with its <eos>, and the line.
"""

import json
import re
import sys
import unicodedata
from pathlib import Path

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
    """The parameters by name, the config, and the id of each word."""
    p = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    body, input, table = config["body"], config["input"], config["output"]["table"]
    data, bands = config["data"], range(len(input.get("cutoffs", ())) + 1)
    marks = data["tokeniser"] == "marks"
    arrays = [f"{kind}_{i}" for kind in ("table", "projection") for i in bands]
    parameters = {f"{group}.{name}" for group in ("input", "output.table") for name in arrays}
    parameters = (parameters | {"output.clusters"}) - {"output.table.projection_0"}
    differences = {
        "body.name": body["name"] != "transformer",
        "input.name": input["name"] != "adaptive",
        "output.name": config["output"]["name"] != "adaptive",
        "body.positions": body.get("positions", "sinusoidal") != "sinusoidal",
        "body.scaled": not body.get("scaled"),
        "input.scaled": input.get("scaled"),
        "output.table.share_head_projection": table.get("share_head_projection"),
        "data.codes": data["codes"],
        "data.tokenizer": data.get("tokenizer"),
        "data.tokeniser": data["tokeniser"] == "moses",
        "data.corpus": data["corpus"] == "ids",
        "data.lower": data["lower"] != marks,
        "one band of words": not {"output.clusters", "input.table_0"} <= set(p),
        "parameters": not all(name.startswith("body.") or name in parameters for name in p),
    }
    if names := [name for name, differs in differences.items() if differs]:
        sys.exit(
            "this example reads only models like the quickstart's, with several bands of words;"
            f" this one differs in {', '.join(names)}"
        )
    vectors = [p[f"input.table_{i}"] @ p[f"input.projection_{i}"] for i in bands]
    p["vectors"] = np.concatenate(vectors)
    lines = (folder / "vocabulary.txt").read_text(encoding="utf-8").split("\n")[:-1]
    return p, config, {line.rpartition(" ")[0]: i for i, line in enumerate(lines)}


def log_probs(p, config, ids):
    """Log-probabilities of all words after each of the token ids [time]: [time, words]."""

    def log_softmax(x):
        return x - np.logaddexp.reduce(x, axis=-1, keepdims=True)

    def norm(x, name, *layer):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return x * p[f"body.{name}.scale"][layer] + p[f"body.{name}.bias"][layer]

    def dense(x, name, layer):
        return x @ p[f"body.blocks.{name}.kernel"][layer] + p[f"body.blocks.{name}.bias"][layer]

    time, width, heads = len(ids), config["body"]["features"], config["body"]["heads"]
    angles = np.outer(np.arange(time) + 2, 10_000.0 ** (-np.arange(width // 2) / (width // 2 - 1)))
    x = p["vectors"][ids] * width**0.5 + np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    for i in range(config["body"]["layers"]):
        joint = dense(norm(x, "blocks.norm_attention", i), "query_key_value", i).reshape(
            time, 3, heads, width // heads
        )
        q, k, v = joint.transpose(1, 2, 0, 3)  # each [heads, time, width / heads]
        scores = q @ k.transpose(0, 2, 1) / q.shape[2] ** 0.5 + np.triu(
            np.full((time, time), -np.inf), 1
        )
        x = x + dense(
            (np.exp(log_softmax(scores)) @ v).transpose(1, 0, 2).reshape(time, width), "attended", i
        )
        x = x + dense(
            np.maximum(dense(norm(x, "blocks.norm_feed_forward", i), "inner", i), 0), "outer", i
        )
    x, tails = norm(x, "norm") if config["body"]["final_norm"] else x, len(p["output.clusters"])
    words = "input" if config["output"]["table"]["name"] == "tied" else "output.table"
    head = log_softmax(x @ np.concatenate([p[f"{words}.table_0"], p["output.clusters"]]).T)
    parts = [head[:, :-tails]]  # the last columns of the head are for the tails
    for i in range(1, tails + 1):
        projection = p.get(f"output.table.projection_{i}", p.get(f"input.projection_{i}"))
        parts.append(
            head[:, i - tails - 1, None] + log_softmax(x @ projection.T @ p[f"{words}.table_{i}"].T)
        )
    return np.concatenate(parts, axis=1)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/numpy_scorer.py EXPORTED < text.txt")
    p, config, ids = load(Path(sys.argv[1]))
    for line in sys.stdin:
        words = [*words_of(line, config["data"]), "<eos>"]
        words = [ids.get(word, ids.get("<unk>")) for word in words]
        if None in words:
            sys.exit(f"a word of this line is not in the vocabulary, which has no <unk>: {line}")
        scores = log_probs(p, config, [ids["<eos>"], *words[:-1]])[range(len(words)), words]
        print(f"{scores.sum():.4f}\t{line}", end="")
