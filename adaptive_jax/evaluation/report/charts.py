"""The figures of a report: what each shows, and what it says of itself."""

from collections.abc import Sequence

from adaptive_jax.evaluation.report.figures import Chart, by_bins, by_context, learning_curves
from adaptive_jax.evaluation.report.findings import Bins, Finding

NATS = "nats a word"


def frequency_charts(bins: Bins, numbers: dict[str, int]) -> list[Chart]:
    """Mean and median loss by the frequency of the word and of the word before.

    numbers: of the runs, which choose their colours and markers.
    """
    papers = {
        "word": "Figures 2 and 4 of Baevski & Auli (2019).",
        "previous": "Figures 3 and 5 of Baevski & Auli (2019).",
    }
    whose = {"word": "the word", "previous": "the word before"}
    return [
        Chart(
            f"{statistic}_by_{kind}",
            f"{statistic.capitalize()} loss by frequency of {whose[kind]}",
            papers[kind] if statistic == "mean" else "Outliers count less than in the mean.",
            numbers,
            by_bins(bins[kind], statistic, NATS),
        )
        for statistic in ("mean", "median")
        for kind in ("word", "previous")
    ]


def difference_charts(bins: Bins, numbers: dict[str, int], reference: str) -> list[Chart]:
    """How much more words cost than in the reference, a run, by their frequency."""
    notes = {
        "mean": "Word by word: below 0 the run is better.",
        "median": "Figure 3 of Pappas et al. (2020).",
    }
    others = {run: number for run, number in numbers.items() if run != reference}
    return [
        Chart(
            f"{statistic}_difference",
            f"{statistic.capitalize()} difference from {reference}",
            notes[statistic],
            others,
            by_bins(bins["difference"], statistic, NATS),
        )
        for statistic in ("mean", "median")
    ]


def history_charts(found: Sequence[Finding], numbers: dict[str, int]) -> list[Chart]:
    """Learning curves, and perplexity by context where evaluate.py has scored several; of runs
    that have them.
    """
    curves = {each.name: each.curves for each in found if any(each.curves)}
    contexts = {
        each.name: each.contexts
        for each in found
        if len({context.context for context in each.contexts}) > 1
    }
    charts = []
    if curves:
        note = "Validation with markers; training, with its dropout, as thin lines."
        charts.append(
            Chart(
                "curves",
                "Learning curves",
                note,
                {run: numbers[run] for run in curves},
                learning_curves(curves),
            )
        )
    if contexts:
        note = (
            "As Table 5 of Baevski & Auli (2019): tokens that are read before those that are"
            " scored."
        )
        runs = {run: numbers[run] for run in contexts}
        charts.append(Chart("contexts", "Perplexity by context", note, runs, by_context(contexts)))
    return charts
