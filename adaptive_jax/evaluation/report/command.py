"""Reports trained runs on one page: figures by frequency of words, learning curves, tables, and a
passage coloured by surprisal.

    python -m adaptive_jax report runs/quickstart
    python -m adaptive_jax report runs/adp_t runs/adp runs/sm --output=figures/inputs.html

Writes the page, which needs no network, and beside it a directory with the figures as PNG and the
numbers as CSV. A run that evaluate.py has scored with the same settings is not scored again.
docs/evaluation.md says more.
"""

from pathlib import Path

from absl import flags

from adaptive_jax.config import commands
from adaptive_jax.errors import InputError
from adaptive_jax.files import path_of

flags.DEFINE_string(
    "output", "report.html", "The page to write; its files go to report_files beside it."
)
flags.DEFINE_enum("split", "test", ["train", "validation", "test"], "Split to score.")
flags.DEFINE_integer(
    "window", 0, "Tokens the model reads at once; 0: the sequence length it was trained with."
)
flags.DEFINE_integer("context", 0, "Tokens of each window that are given and not scored.")
flags.DEFINE_integer(
    "rows",
    0,
    "Rows of a batch. Of layout streams 0 means 1, which scores exactly; N rows are faster.",
)
flags.DEFINE_string("checkpoint", "best", "best (by validation), latest, or a step.")
flags.DEFINE_string(
    "data_path",
    None,
    "Local copy of the text, for all runs; default: the corpus each was trained on.",
)
flags.DEFINE_list("names", [], "What to call the runs; default: the names of their directories.")
flags.DEFINE_list(
    "bins",
    ["10", "100", "1000", "10000", "100000", "1000000"],
    "Largest frequency of each bin but the last.",
)
flags.DEFINE_integer("sample_from", 0, "First word of the passage to show.")
flags.DEFINE_integer("sample_words", 150, "Words of the passage; 0: none.")
commands.define_allow()
flags.adopt_module_key_flags(commands)  # --help shows them
POSITIONAL = ["RUN..."]
STOPPED = "stopped: the scores of finished runs are kept; the same command resumes"


def main(*workdirs):
    """Makes the report that the flags ask for."""
    # After the flags: their errors should not wait for jax.
    from adaptive_jax.evaluation.evaluate import Request
    from adaptive_jax.evaluation.report.passage import Passage
    from adaptive_jax.evaluation.report.report import Job, report

    given = flags.FLAGS
    asked = "split", "window", "context", "checkpoint", "data_path", "rows"
    job = Job(
        Request(**{name: getattr(given, name) for name in asked}),
        edges(given.bins),
        Passage(given.sample_from, given.sample_words),
        given.names,
        Path(given.output).expanduser(),
    )
    report([path_of(workdir) for workdir in workdirs], job)
    print(job.output)


def edges(given):
    """The numbers of --bins."""
    try:
        return tuple(map(int, given))
    except ValueError:
        raise InputError(
            f"--bins={','.join(given)} must be whole numbers, such as 10,100,1000"
        ) from None
