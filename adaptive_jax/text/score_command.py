"""Scores text with a trained model: the log-probability of each line, or the surprisal of each
word.

    python -m adaptive_jax score --workdir=runs/quickstart < text.txt
    python -m adaptive_jax score --workdir=runs/quickstart --words --bits text.txt > words.tsv
    python -m adaptive_jax score --workdir=runs/quickstart --nbest --weight=0.5 lists.txt

Reads files, also .gz and .xz, or standard input. docs/text.md says more.
"""

from absl import flags

from adaptive_jax.config import commands

CHECKPOINT = flags.DEFINE_string("checkpoint", "best", "best (by validation), latest, or a step.")
WORDS = flags.DEFINE_boolean(
    "words", False, "Print a line for each word instead of each line of text."
)
COLUMNS = flags.DEFINE_list(
    "columns", None, "Of --words: surprisal, rank, entropy, frequency, unseen; default: all."
)
BITS = flags.DEFINE_boolean(
    "bits", False, "Log-probabilities, surprisal and entropy in bits instead of nats."
)
FORMAT = flags.DEFINE_enum(
    "format",
    "tsv",
    ["tsv", "jsonl"],
    "Columns separated by tabs, or an object of JSON on each line.",
)
CONTEXT_FROM = flags.DEFINE_string(
    "context_from", "none", "none: lines stand alone; previous: each follows the last; or a FILE."
)
WINDOW = flags.DEFINE_integer(
    "window", 0, "Tokens the model reads at once; 0: the sequence length it was trained with."
)
CONTEXT = flags.DEFINE_integer(
    "context", None, "Tokens read again where text is longer than a window; default: half."
)
LINE_BUFFERED = flags.DEFINE_boolean(
    "line_buffered", False, "Score each line when it comes; so it is with text that is typed."
)
NBEST = flags.DEFINE_boolean(
    "nbest", False, "The text is n-best lists, `id ||| text ||| score`: rescore them."
)
WEIGHT = flags.DEFINE_float(
    "weight", None, "Of --nbest: weight of the model's log-probability, in nats."
)
WORD_BONUS = flags.DEFINE_float("word_bonus", 0.0, "Of --nbest: added for each word.")
ONE_BEST = flags.DEFINE_boolean(
    "one_best", False, "Of --nbest: print the best text of each list only."
)
REFERENCES = flags.DEFINE_string(
    "references",
    None,
    "Of --nbest: a file of right texts; choose --weight and --word_bonus by them.",
)
METRIC = flags.DEFINE_enum(
    "metric", "wer", ["wer", "bleu"], "Of --references: word error rate, or BLEU."
)
commands.define_workdir("Directory of a run that train.py made.", several_hosts=False)
flags.adopt_module_key_flags(commands)  # --help shows them
POSITIONAL = ["[FILE...]"]


def main(*files: str) -> None:
    """Scores these files, or standard input."""
    from adaptive_jax.text import score as printing

    workdir, _ = commands.workdir()
    read = printing.Asked(
        files,
        CHECKPOINT.value,
        CONTEXT_FROM.value,
        WINDOW.value,
        CONTEXT.value,
        LINE_BUFFERED.value,
    )
    nbest = (
        printing.NBest(
            WEIGHT.value, WORD_BONUS.value, ONE_BEST.value, REFERENCES.value, METRIC.value
        )
        if NBEST.value
        else None
    )
    columns = tuple(COLUMNS.value) if COLUMNS.value is not None else None
    printing.score(
        workdir, read, printing.Form(WORDS.value, columns, BITS.value, FORMAT.value), nbest
    )
