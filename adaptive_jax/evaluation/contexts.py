"""Results of one model with several contexts, side by side: a table, and a CSV file and a
figure in eval/.
"""

import csv
import importlib.util
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

from adaptive_jax.files import replacing
from adaptive_jax.parallel import hosts

COLUMNS = "window", "context", "scored", "perplexity", "nll", "words", "seconds"


def table(results: Sequence[dict]) -> Iterator[str]:
    """Lines of a table as Table 5 of Baevski & Auli 2019: what a row reads and scores,
    perplexity, and the seconds that it took.
    """
    unit = results[0]["vocabulary"]["unit"]
    yield (
        f"{'window':>8}{'context':>9}{'scored':>9}"
        f"{'perplexity':>13}{f'nats a {unit}':>13}{'seconds':>10}"
    )
    for row in rows(results):
        yield (
            f"{row['window']:>8,}{row['context']:>9,}{row['scored']:>9,}"
            f"{row['perplexity']:>13.2f}{row['nll']:>13.4f}{row['seconds']:>10.1f}"
        )


def rows(results: Sequence[dict]) -> list[dict]:
    """A dict of `COLUMNS` for each result; `scored`: tokens of a window that are, on streams
    all of them.
    """
    found = []
    for result in results:
        window, context, config = (
            result["settings"][key] for key in ("window", "context", "config")
        )
        scored = window if config["batches"]["layout"] == "streams" else window - context
        found.append(
            {"window": window, "context": context, "scored": scored}
            | {key: result[key] for key in COLUMNS[3:]}
        )
    return found


def write(stem: Path, results: Sequence[dict]) -> None:
    """Writes `stem`.csv and, where matplotlib is, `stem`.png; says where they are."""
    if not hosts.first():
        return
    content = io.StringIO()
    writer = csv.DictWriter(content, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows(results))
    with replacing(stem.with_name(f"{stem.name}.csv")) as file:
        file.write(content.getvalue().encode())
    hosts.say(f"{stem}.csv")
    if not importlib.util.find_spec("matplotlib"):
        hosts.say("no figure: it needs matplotlib, pip install 'matplotlib>=3.9'")
        return
    with replacing(stem.with_name(f"{stem.name}.png")) as file:
        figure(results).savefig(file, format="png", dpi=150)
    hosts.say(f"{stem}.png")


def figure(results: Sequence[dict]):
    """Perplexity against the context: a `matplotlib.figure.Figure`."""
    from matplotlib.figure import Figure

    drawn, first = Figure((6, 4), layout="constrained"), results[0]
    axes = drawn.subplots()
    points = sorted((row["context"], row["perplexity"]) for row in rows(results))
    axes.plot(*zip(*points, strict=True), "o-")
    for context, paid in points:
        axes.annotate(
            f"{paid:.2f}", (context, paid), xytext=(0, 7), textcoords="offset points", ha="center"
        )
    axes.set(
        xlabel="context, tokens that are given before the first that is scored",
        ylabel=f"perplexity a {first['vocabulary']['unit']}, {first['split']} split",
        title=f"windows of {first['settings']['window']:,} tokens, after {first['step']:,} updates",
        xticks=[context for context, _ in points],
        ymargin=0.15,
    )
    axes.grid(alpha=0.3)
    return drawn
