"""Reports trained runs on one page: figures by frequency of words, learning curves, tables, and a
passage coloured by surprisal.

    python -m adaptive_jax report runs/quickstart
    python -m adaptive_jax report runs/adp_t runs/adp runs/sm --output=figures/inputs.html

Writes the page, which needs no network, and beside it a directory with the figures as PNG and the
numbers as CSV. A run that evaluate.py has scored with the same settings is not scored again.
docs/evaluation.md says more.
"""

from adaptive_jax.config import commands
from adaptive_jax.config.flags import define_options, options
from adaptive_jax.evaluation.evaluate import Request
from adaptive_jax.evaluation.report.report import Job, report
from adaptive_jax.files import path_of

OTHERS = "method", "break_mode", "vocabulary", "uniform", "down_weight", "share"
POSITIONAL = ["RUN..."]
STOPPED = "stopped: the scores of finished runs are kept; the same command resumes"


def define_flags() -> None:
    """Defines the flags of the command."""
    define_options(Job, Request, commands.Allow, without=OTHERS)


def main(*workdirs):
    """Makes the report that the flags ask for."""
    job = options(Job)
    request = options(Request, without=OTHERS)
    report([path_of(workdir) for workdir in workdirs], request, job)
    print(job.output)
