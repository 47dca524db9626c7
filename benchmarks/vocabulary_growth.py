"""Loss and gradient of the output layer as the vocabulary grows from 33 thousand words to a
million, against its peers.

    python -m benchmarks.vocabulary_growth [--tokens=2048] [--repeats=5] [--json=FILE]
        [--plot=FILE.png]

The peers are those of `benchmarks.outputs`, at d 256. All adaptive ones have the same cutoffs: the
head has 10,000 words, the smallest size that Baevski & Auli (2019, Table 8) found no worse, and
each tail ends at four times as many words as the one before. Every token visits the head, so all
work would grow with the vocabulary if the head did.

`smallest`, which is adaptive_jax at the smallest size, runs beside the peers of every size, and
growth is measured in its time, because the speed of a busy machine changes within minutes. A peer
that computes logits of all tokens and words is left out where these, with their gradients, would
need more than 8 GB or a minute.
"""

import importlib.util
import json
from pathlib import Path

import jax
from absl import flags

from adaptive_jax.config import commands
from adaptive_jax.errors import InputError, check_at_least
from benchmarks import outputs

VOCABULARIES = [267_735 * 2**k // 8 for k in range(6)]  # that of WikiText-103 is the fourth
WIDTH, HEAD, TAIL = 256, 10_000, 4
DENSE = ("masked dense", "full softmax")
LABELS = {
    "banded": "adaptive_jax",
    "masked dense": "adaptive softmax with a mask",
    "torch": "torch, adaptive softmax",
}
BYTES, FLOP = 8e9, 60 * 100e9  # in a minute, at the speed of a small machine


def cutoffs_of(vocabulary: int) -> tuple[int, ...]:
    """10,000, 40,000, 160,000 and so on, below the vocabulary size; four fifths of a vocabulary
    of less than 12,500 words.
    """
    cutoffs = [min(HEAD, vocabulary * 4 // 5)]
    while cutoffs[-1] * TAIL < vocabulary:
        cutoffs.append(cutoffs[-1] * TAIL)
    return tuple(cutoffs)


def too_large(vocabulary: int, tokens: int) -> list[str]:
    """Peers to leave out: those that hold logits of all tokens and words, three times (JAX) in
    float32.
    """
    logits = vocabulary * tokens
    return list(DENSE) if 3 * 4 * logits > BYTES or 6 * logits * WIDTH > FLOP else []


def plot(rows: list[dict], path: Path, label: str) -> None:
    """Draws time and memory against vocabulary size, a line for each peer."""
    from matplotlib.figure import Figure

    figure = Figure((11, 4.2), layout="constrained")
    axes = figure.subplots(1, 2)
    for peer in dict.fromkeys(row["peer"] for row in rows if row["peak_bytes"] is not None):
        points = [
            (row["vocabulary"], row["times_smallest"], row["peak_bytes"] / 1e6)
            for row in rows
            if row["peer"] == peer
        ]
        words, *values = zip(*points, strict=True)
        for axis, value in zip(axes, values, strict=True):
            axis.plot(words, value, "o-", label=LABELS.get(peer, peer))
    units = f"time (1: adaptive_jax at {rows[0]['vocabulary']:,} words)", "memory, MB"
    for axis, unit in zip(axes, units, strict=True):
        axis.set(xscale="log", yscale="log", xlabel="words in the vocabulary", ylabel=unit)
        axis.grid(alpha=0.3)
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False
    )
    figure.suptitle(f"Output layer, loss and gradient: {label}", fontsize=10)
    figure.savefig(path, dpi=110)


def check(settings) -> None:
    """Finds what is wrong with the flags before anything runs. Raises InputError."""
    least = {"the smallest of --vocabularies": min(map(int, settings.vocabularies))}
    check_at_least(1, tokens=settings.tokens, repeats=settings.repeats)
    check_at_least(10, **least)
    if settings.plot and not Path(settings.plot).absolute().parent.is_dir():
        raise InputError(f"--plot={settings.plot}: its directory does not exist; make it first")
    if settings.plot and not importlib.util.find_spec("matplotlib"):
        raise InputError("--plot needs matplotlib: pip install -r requirements-bench.txt")


def main(settings):
    """Prints a table and then the growth of each peer, and writes the files."""
    check(settings)
    about = f"{settings.tokens:,} tokens, d {WIDTH}"
    print(f"{outputs.machine()}, {about}, median of {settings.repeats}")
    print(outputs.TITLE.replace("size ", "words"))
    cases = [
        outputs.Case(WIDTH, words, cutoffs_of(words), settings.tokens)
        for words in map(int, settings.vocabularies)
    ]
    [(compiled, values)] = outputs.jax_peers(cases[0], DENSE).values()
    beside = {"smallest": lambda: jax.block_until_ready(compiled(*values))}
    rows, growth = [], {}
    for case in cases:
        found = outputs.measure(
            case,
            settings.repeats,
            [*settings.skip, *too_large(case.vocabulary, settings.tokens)],
            beside,
        )
        for row in found:
            print(outputs.line(f"{case.vocabulary:,}", row), flush=True)
            times = row["seconds"] / found[-1]["seconds"]
            growth.setdefault(row["peer"], []).append(f"{times:.2f}")
            about_case = {
                "vocabulary": case.vocabulary,
                "cutoffs": case.cutoffs,
                "tokens": settings.tokens,
            }
            rows.append(about_case | row | {"times_smallest": times})
    del growth["smallest"]
    for peer, times in growth.items():
        print(
            f"{peer}: {', '.join(times)} times the time of banded at {cases[0].vocabulary:,} words"
        )
    if settings.json:
        Path(settings.json).write_text(json.dumps(rows, indent=2) + "\n")
    if settings.plot:
        plot(rows, Path(settings.plot), f"{outputs.machine().split(',')[0]}, {about}")


if __name__ == "__main__":
    flags.DEFINE_list("vocabularies", VOCABULARIES, "Sizes of the vocabulary, in words.")
    flags.DEFINE_integer("tokens", 2048, "Tokens.")
    flags.DEFINE_integer("repeats", 5, "Timed runs of each peer.")
    flags.DEFINE_list("skip", [], "Peers to leave out; banded always runs.")
    flags.DEFINE_string("json", None, "File for the numbers.")
    flags.DEFINE_string("plot", None, "File for a plot of time and memory, .png.")
    commands.run(lambda: main(flags.FLAGS))
