"""The numbers of a report: lines of its CSV files, and tables of its page."""

from collections.abc import Sequence

from adaptive_jax.evaluation.report.findings import Bins, Finding
from adaptive_jax.evaluation.report.page import Table
from adaptive_jax.evaluation.scoring import perplexity

HEADS = {
    "word": "Loss by the frequency of the word",
    "previous": "Loss by the frequency of the word before",
}


def tables_of(found: Sequence[Finding], bins: Bins) -> dict[str, list[dict]]:
    """The numbers of the report as lines of CSV files, by file."""
    frequency = [
        {"run": run, "by": kind} | _numbers(each)
        for kind, runs in bins.items()
        for run, inner in runs.items()
        for each in inner
    ]
    curves = [
        {"run": each.name, "split": split, "updates": step, "nll": loss}
        for each in found
        for split, curve in each.curves._asdict().items()
        for step, loss in curve
    ]
    contexts = [
        {"run": each.name} | context._asdict() for each in found for context in each.contexts
    ]
    columns = "text", "bits", "rank", "entropy", "count"
    sample = [
        {"run": each.name} | {column: getattr(token, column) for column in columns}
        for each in found
        for token in each.sample
    ]
    return {
        "runs": list(map(_about, found)),
        "frequency": frequency,
        "curves": curves,
        "contexts": contexts,
        "sample": sample,
    }


def _numbers(each):
    low, high = each.mean_interval or ("", "")
    below, above = each.median_interval or ("", "")
    found = {
        "bin": each.label,
        "least": each.least,
        "most": "" if each.most is None else each.most,
        "words": each.words,
    }
    return found | {
        "mean": each.mean,
        "mean_low": low,
        "mean_high": high,
        "median": each.median,
        "median_low": below,
        "median_high": above,
    }


def _about(each):
    """What a run is, and its numbers; "" where they are not known."""
    config, windows, result = each.subject.config, each.subject.windows, each.result
    table = config["output"]["table"]["name"]
    found = {
        "run": each.name,
        "input": config["input"]["name"],
        "body": config["body"]["name"],
        "output": config["output"]["name"] + (f", {table}" if table != "own" else ""),
        "reads": (
            "stream"
            if windows.layout == "streams"
            else f"{windows.window}, context {windows.context}"
        ),
        "validation_perplexity": None if each.validation is None else perplexity(each.validation),
        "perplexity": result["perplexity"],
        "published_validation_perplexity": each.published[0],
        "published_perplexity": each.published[1],
        "nll": result["nll"],
        "words": result["words"],
        "unknown": result["unknown"],
        "parameters": each.parameters,
        "hours": each.hours,
        "words_per_second": each.speed,
        "updates": each.subject.step,
    }
    return {key: "" if value is None else value for key, value in found.items()}


def runs_table(found: Sequence[Finding], split: str) -> Table:
    """What Table 3 of Baevski & Auli (2019) says of each model, ours in rows; the best
    perplexities stand out.
    """
    lines, what = list(map(_about, found)), ("run", "input", "body", "output", "reads")
    numbers = {
        "validation_perplexity": ("Valid", "{:.2f}".format),
        "perplexity": (split.capitalize(), "{:.2f}".format),
        "published_validation_perplexity": ("Paper: valid", "{:.2f}".format),
        "published_perplexity": (f"Paper: {split}", "{:.2f}".format),
        "parameters": ("Parameters", _millions),
        "hours": ("Hours", "{:.2f}".format),
        "words_per_second": ("Words/s", "{:,.0f}".format),
        "unknown": ("<unk>", "{:.1%}".format),
        "updates": ("Updates", "{:,}".format),
    }
    numbers = {key: how for key, how in numbers.items() if any(line[key] != "" for line in lines)}
    rows = [
        [line[key] for key in what]
        + ["" if line[key] == "" else show(line[key]) for key, (_, show) in numbers.items()]
        for line in lines
    ]
    best = {}
    for key in ("validation_perplexity", "perplexity"):
        values = {number: line[key] for number, line in enumerate(lines) if line[key] != ""}
        if len(values) > 1:
            best[len(what) + list(numbers).index(key)] = min(values, key=values.__getitem__)
    columns = [each.capitalize() for each in what] + [column for column, _ in numbers.values()]
    return Table(
        "Perplexity is per word of the text, <eos> included.", columns, rows, len(what), best
    )


def _millions(number):
    return f"{number / 1e6:.1f}M"


def bins_tables(bins: Bins, reference: str) -> list[Table]:
    """The numbers of the figures by frequency: mean (median) of each run and bin."""
    heads = HEADS | {"difference": f"Difference from {reference}, by the frequency of the word"}
    tables = []
    for kind, runs in bins.items():
        labels = sorted({(each.least, each.label) for found in runs.values() for each in found})
        rows = []
        for run, found in runs.items():
            cells = {
                (each.least, each.label): f"{each.mean:.3f} ({each.median:.3f})" for each in found
            }
            rows.append([run, *(cells.get(label, "") for label in labels)])
        first = {(each.least, each.label): each.words for each in next(iter(runs.values()))}
        rows.append(["words of the first run", *(f"{first.get(label, 0):,}" for label in labels)])
        title = f"{heads[kind]}: mean (median) in nats a word"
        tables.append(Table(title, ["Run", *(label for _, label in labels)], rows))
    return tables
