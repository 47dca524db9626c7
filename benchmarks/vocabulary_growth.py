"""Loss and gradient of the output layer as the vocabulary grows from 33 thousand words to a million, ours and its peers.

    python -m benchmarks.vocabulary_growth [--tokens=2048] [--repeats=5] [--json=FILE] [--plot=FILE.png]

At d 256, with the peers of `benchmarks.outputs`, measured as there. All adaptive ones have the same cutoffs: a head of 10,000
words, the smallest that Baevski & Auli (2019, Table 8) found no worse, and tails that each end at four times as many words as the
one before. So the head, which every token visits, does not grow; with a head in proportion to the vocabulary, all work would.
Beside the peers of every size runs `smallest`, adaptive_jax at the smallest size: growth is told, and drawn, in times of that,
since a machine that others use is not equally fast for minutes. A peer whose logits of all tokens, with their gradients, would
need more than 8 GiB, or a minute, is left out.
"""

import importlib.util
import json
from pathlib import Path

import jax
from absl import flags

from adaptive_jax import command
from adaptive_jax.errors import InputError, check_at_least
from benchmarks import outputs

WIKITEXT103 = 267_735
VOCABULARIES = [WIKITEXT103 * 2**k // 8 for k in range(6)]
WIDTH, HEAD, TAIL = 256, 10_000, 4
DENSE = ("masked dense", "full softmax")
GIB, FLOP = 8, 60 * 100e9  # in a minute, at the speed of a small machine


def cutoffs_of(vocabulary: int) -> tuple[int, ...]:
    """10,000, 40,000, 160,000 ... as long as a tail is left; of a vocabulary smaller than 12,500, four fifths of it."""
    cutoffs = [min(HEAD, vocabulary * 4 // 5)]
    while cutoffs[-1] * TAIL < vocabulary:
        cutoffs.append(cutoffs[-1] * TAIL)
    return tuple(cutoffs)


def too_large(vocabulary: int, tokens: int) -> list[str]:
    """Peers that hold logits of all tokens and words, if these are too many: three times (JAX), in float32."""
    logits = vocabulary * tokens
    return list(DENSE) if 3 * 4 * logits > GIB * 2**30 or 6 * logits * WIDTH > FLOP else []


def plot(rows: list[dict], path: Path, label: str) -> None:
    """Time and memory against vocabulary size, a line for each peer."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for peer in dict.fromkeys(row["peer"] for row in rows if row["peak_bytes"] is not None):
        of = [row for row in rows if row["peer"] == peer]
        words = [row["vocabulary"] for row in of]
        values = [row["times_smallest"] for row in of], [row["peak_bytes"] / 2**20 for row in of]
        for axis, value in zip(axes, values, strict=True):
            axis.plot(words, value, "o-", label={"banded": "adaptive_jax"}.get(peer, peer))
    titles = f"time / adaptive_jax at {rows[0]['vocabulary']:,} words", "MiB beside arguments and gradients"
    for axis, title in zip(axes, titles, strict=True):
        axis.set(xscale="log", yscale="log", xlabel="words", ylabel=title)
        axis.grid(alpha=0.3)
    axes[0].legend()
    axes[0].set_title(label, loc="left", fontsize=9)
    figure.savefig(path, dpi=110)


def main(settings):
    """Prints a table, growth last, and writes what is asked for."""
    check_at_least(1, tokens=settings.tokens, repeats=settings.repeats)
    vocabularies = [int(words) for words in settings.vocabularies]
    check_at_least(10, **{"the least of --vocabularies": min(vocabularies)})
    if settings.plot and not Path(settings.plot).absolute().parent.is_dir():
        raise InputError(f"--plot={settings.plot} is in no directory that is there: make it first")
    if settings.plot and not importlib.util.find_spec("matplotlib"):
        raise InputError("--plot needs matplotlib: pip install -r requirements-bench.txt")
    about = f"{settings.tokens:,} tokens, d {WIDTH}"
    print(f"{outputs.machine()}, {about}, median of {settings.repeats}")
    print(outputs.TITLE.replace("size ", "words"))
    cases = [outputs.Case(WIDTH, words, cutoffs_of(words), settings.tokens) for words in vocabularies]
    [(compiled, values)] = outputs.jax_peers(cases[0], DENSE).values()
    beside = {"smallest": lambda: jax.block_until_ready(compiled(*values))}
    rows, growth = [], {}
    for case in cases:
        found = outputs.measure(case, settings.repeats, [*settings.skip, *too_large(case.vocabulary, settings.tokens)], beside)
        smallest = found[-1]["seconds"]
        for row in found:
            print(outputs.line(f"{case.vocabulary:,}", row), flush=True)
            rows.append({"vocabulary": case.vocabulary, "cutoffs": case.cutoffs, "tokens": settings.tokens} | row)
            rows[-1]["times_smallest"] = row["seconds"] / smallest
            growth.setdefault(row["peer"], []).append(f"{row['seconds'] / smallest:.2f}")
    del growth["smallest"]
    for peer, times in growth.items():
        print(f"{peer}: {', '.join(times)} times the time of banded at {vocabularies[0]:,} words")
    if settings.json:
        Path(settings.json).write_text(json.dumps(rows, indent=2) + "\n")
    if settings.plot:
        plot(rows, Path(settings.plot), f"{outputs.machine().split(',')[0]}, {about}")


def _define() -> flags.FlagValues:
    flags.DEFINE_list("vocabularies", [str(words) for words in VOCABULARIES], "Sizes of the vocabulary, in words.")
    flags.DEFINE_integer("tokens", 2048, "Tokens.")
    flags.DEFINE_integer("repeats", 5, "Timed runs of each peer.")
    flags.DEFINE_list("skip", [], "Peers to leave out, of all but banded.")
    flags.DEFINE_string("json", None, "File for the numbers.")
    flags.DEFINE_string("plot", None, "File for a plot of time and memory, .png.")
    return flags.FLAGS


if __name__ == "__main__":
    defined = _define()
    command.run(lambda: main(defined))
