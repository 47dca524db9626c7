"""Reports trained runs on one page: figures by frequency of words, learning curves, tables, and a
passage coloured by surprisal.

    python -m adaptive_jax report runs/quickstart
    python -m adaptive_jax report runs/adp_t runs/adp runs/sm --output=figures/inputs.html
    python -m adaptive_jax report runs/adp_t/eval/test-512-*-286000.json --names=0,480

Writes the page, which needs no network, and beside it a directory with the figures as PNG and PDF,
their numbers as CSV and the table of runs as Markdown and LaTeX. For a run it reads the newest
result of evaluate.py on a text that all runs have scored. docs/evaluation.md says more.
"""

from adaptive_jax.config.flags import define_options, options
from adaptive_jax.files import path_of
from adaptive_jax.scores.report.report import ReportOptions, report

POSITIONAL = ["RUN..."]


def define_flags() -> None:
    """Defines the flags of the command."""
    define_options(ReportOptions)


def main(*places):
    """Makes the report of these runs with the settings of the flags."""
    report_options = options(ReportOptions)
    report([path_of(place) for place in places], report_options)
    print(report_options.output)
