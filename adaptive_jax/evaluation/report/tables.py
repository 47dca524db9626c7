"""The numbers of a report: lines of its CSV files, and tables of its page."""

from collections.abc import Sequence

from adaptive_jax.evaluation.report.findings import Bins, Finding
from adaptive_jax.evaluation.report.page import Table
from adaptive_jax.evaluation.scoring import perplexity

HEADS = {"word": "Loss by the frequency of the word", "previous": "Loss by the frequency of the word before"}


def tables_of(found: Sequence[Finding], bins: Bins) -> dict[str, list[dict]]:
    """The numbers of the report as lines of CSV files, by file."""
    frequency = [
        {"run": run, "by": kind} | _numbers(each) for kind, runs in bins.items() for run, inner in runs.items() for each in inner
    ]
    curves = [
        {"run": each.name, "split": split, "updates": step, "nll": loss}
        for each in found
        for split, curve in each.curves._asdict().items()
        for step, loss in curve
    ]
    contexts = [{"run": each.name} | context._asdict() for each in found for context in each.contexts]
    columns = "text", "bits", "rank", "entropy", "count"
    sample = [
        {"run": each.name} | {column: getattr(token, column) for column in columns}
        for each in found
        for token in each.sample
    ]
    return {"runs": list(map(_about, found)), "frequency": frequency, "curves": curves, "contexts": contexts, "sample": sample}


def _numbers(each):
    low, high = each.mean_interval or ("", "")
    below, above = each.median_interval or ("", "")
    found = {"bin": each.label, "least": each.least, "most": "" if each.most is None else each.most, "words": each.words}
    return found | {
        "mean": each.mean, "mean_low": low, "mean_high": high, "median": each.median, "median_low": below, "median_high": above
    }  # fmt: skip


def _about(each):
    """What a run is, and its numbers."""
    config, result = each.subject.config, each.result
    table = config["output"]["table"]["name"]
    return {
        "run": each.name,
        "input": config["input"]["name"],
        "body": config["body"]["name"],
        "output": config["output"]["name"] + (f", {table}" if table != "own" else ""),
        "validation_perplexity": "" if each.validation is None else perplexity(each.validation),
        "perplexity": result["perplexity"],
        "nll": result["nll"],
        "words": result["words"],
        "unknown": result["unknown"],
        "parameters": each.parameters or "",
        "hours": each.hours or "",
        "words_per_second": each.speed or "",
        "updates": each.subject.step,
    }


def runs_table(found: Sequence[Finding], split: str) -> Table:
    """What Table 3 of Baevski & Auli (2019) says of each model, ours in rows; the best perplexities stand out."""
    numbers = {
        "Valid": ("validation_perplexity", "{:.2f}".format),
        split.capitalize(): ("perplexity", "{:.2f}".format),
        "Parameters": ("parameters", _millions),
        "Hours": ("hours", "{:.2f}".format),
        "Words/s": ("words_per_second", "{:,.0f}".format),
        "<unk>": ("unknown", "{:.1%}".format),
        "Updates": ("updates", "{:,}".format),
    }
    lines, what = list(map(_about, found)), ("run", "input", "body", "output")
    rows = [
        [line[key] for key in what] + ["" if line[key] == "" else show(line[key]) for key, show in numbers.values()]
        for line in lines
    ]
    best = {}
    for column, key in enumerate(("validation_perplexity", "perplexity"), len(what)):
        values = {number: line[key] for number, line in enumerate(lines) if line[key] != ""}
        if len(values) > 1:
            best[column] = min(values, key=values.__getitem__)
    columns = [each.capitalize() for each in what] + list(numbers)
    return Table("Perplexity is per word of the text, <eos> included.", columns, rows, len(what), best)


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
            cells = {(each.least, each.label): f"{each.mean:.3f} ({each.median:.3f})" for each in found}
            rows.append([run, *(cells.get(label, "") for label in labels)])
        first = {(each.least, each.label): each.words for each in next(iter(runs.values()))}
        rows.append(["words of the first run", *(f"{first.get(label, 0):,}" for label in labels)])
        title = f"{heads[kind]}: mean (median) in nats a word"
        tables.append(Table(title, ["Run", *(label for _, label in labels)], rows))
    return tables
