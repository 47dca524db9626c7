"""Evaluates a trained model: loss in nats and perplexity per word over a split.

    python evaluate.py --workdir=runs/quickstart --split=test
    python evaluate.py --workdir=runs/quickstart --split=validation --context=0,16,32,48
    python evaluate.py --workdir=runs/adp_t --window=3072 --context=2560 --break_mode=complete
    python evaluate.py --workdir=runs/groc --data_path=DIR --vocabulary=union
    python evaluate.py --workdir=runs/groc --method=cache --model_weight=0.9,0.95 --theta=0,0.25,0.5

Writes workdir/eval/*.json. Several hosts run it as they run train.py. Exits with status 3 if the
perplexity is above --target_perplexity. docs/evaluation.md says more.
"""

import sys

from absl import flags

from adaptive_jax.config import commands
from adaptive_jax.errors import InputError

SPLIT = flags.DEFINE_enum("split", "test", ["train", "validation", "test"], "Split to score.")
WINDOW = flags.DEFINE_integer(
    "window", 0, "Tokens the model reads at once; 0: the sequence length it was trained with."
)
CONTEXT = flags.DEFINE_list(
    "context", ["0"], "Tokens of each window that are given and not scored; several are compared."
)
CHECKPOINT = flags.DEFINE_string("checkpoint", "best", "best (by validation), latest, or a step.")
DATA_PATH = flags.DEFINE_string(
    "data_path", None, "Local copy of the corpus; default: the one the run was trained on."
)
BREAK_MODE = flags.DEFINE_string(
    "break_mode", None, "none, complete, complete_doc or eos; default: that of the run."
)
ROWS = flags.DEFINE_integer(
    "rows",
    0,
    "Rows of a batch. Of layout streams 0 means 1, which scores exactly; N rows are faster.",
)
METHOD = flags.DEFINE_string("method", "plain", "plain, cache, dynamic or knn.")
VOCABULARY = flags.DEFINE_string(
    "vocabulary",
    "train",
    "Words to score over: train, union (and those of the split), or a file's.",
)
UNIFORM = flags.DEFINE_float(
    "uniform",
    None,
    "Share of the uniform distribution; default 0.01 if new words have no probability.",
)
DOWN_WEIGHT = flags.DEFINE_float(
    "down_weight", 1.0, "Factor of what a composed model gives to new words."
)
TARGET = flags.DEFINE_float(
    "target_perplexity",
    None,
    "Exit with status 3 if the perplexity, the best of several, is above it.",
)
SHARE = flags.DEFINE_float(
    "share",
    None,
    "Share of the words that keep their entries in a lexicon; default: that of the run.",
)
STOPPED = "stopped: nothing was written; the same command evaluates anew"
MISSED = 3  # the exit status of a target that is not reached
OPTIONS = (
    flags.DEFINE_string(
        "cache", None, "Of --method=cache: local (default), unbounded, unigram or unigram_softmax."
    ),
    flags.DEFINE_list(
        "model_weight",
        None,
        "The weight of the model, or several. Default 0.966 of --method=cache, 0.75 of knn.",
    ),
    flags.DEFINE_list(
        "theta", None, "Of --cache=local: theta, which flattens it, or several to try. Default 0.5."
    ),
    flags.DEFINE_integer(
        "cache_size",
        None,
        "Of --method=cache: entries; default 10,000, of --cache=unbounded 1,000,000.",
    ),
    flags.DEFINE_integer(
        "neighbours",
        None,
        "Of --cache=unbounded and --method=knn: entries that count. Default 1,024.",
    ),
    flags.DEFINE_list(
        "temperature",
        None,
        "Of --method=knn: what divides squared distances, or several to try. Default 1.",
    ),
    flags.DEFINE_string(
        "datastore",
        None,
        "Of --method=knn: directory of a train.txt to search; default: the run's train split.",
    ),
    flags.DEFINE_string("rule", None, "Of --method=dynamic: rms (default) or sgd."),
    flags.DEFINE_float(
        "rate", None, "Of --method=dynamic: learning rate. Default 0.00005 of rms, 0.1 of sgd."
    ),
    flags.DEFINE_float(
        "decay", None, "Of --method=dynamic: decay towards the trained parameters. Default 0.002."
    ),
    flags.DEFINE_float("epsilon", None, "Of --rule=rms. Default 0.00001."),
    flags.DEFINE_integer(
        "statistics",
        None,
        "Of --rule=rms: segments of the train split to take statistics from. Default 2,000.",
    ),
)
commands.define_workdir("Directory of a run that train.py made.")
flags.adopt_module_key_flags(commands)  # --help shows them


def given_options() -> dict:
    """The flags of a method that are given; those of several values as tuples of numbers."""
    given = {flag.name: flag.value for flag in OPTIONS if flag.value is not None}
    return {
        key: numbers(key, value) if isinstance(value, list) else value
        for key, value in given.items()
    }


def numbers(
    key: str, texts: list[str], kind: type = float, such: tuple[str, str] = ("0.5", "0.25,0.5")
) -> tuple:
    """The numbers of a kind in texts. Raises InputError for what is none, and names numbers
    `such` as it takes.
    """
    try:
        if texts:
            return tuple(map(kind, texts))
    except ValueError:
        pass
    what = "whole numbers" if kind is int else "numbers"
    raise InputError(
        f"--{key}={','.join(texts)} is no list of {what}: give such as --{key}={such[0]} or"
        f" --{key}={such[1]}"
    )


def main():
    """Evaluates as the flags say."""
    contexts = numbers("context", CONTEXT.value, int, ("480", "0,256,480"))
    if TARGET.value is not None and not TARGET.value > 0:
        raise InputError(
            f"--target_perplexity={TARGET.value:g} is no perplexity: give one above 0, such as 80"
        )
    from adaptive_jax.evaluation.evaluate import Request, evaluate_contexts

    # After the flags: --help and their errors should not wait for jax.
    from adaptive_jax.parallel import hosts

    what = SPLIT.value, WINDOW.value, contexts[0], CHECKPOINT.value
    how = (
        METHOD.value,
        ROWS.value,
        given_options(),
        VOCABULARY.value,
        UNIFORM.value,
        DOWN_WEIGHT.value,
        SHARE.value,
    )
    request = Request(*what, DATA_PATH.value, BREAK_MODE.value, *how)
    workdir, others = commands.workdir()
    hosts.initialize(*others)
    with hosts.fail_together():
        results = evaluate_contexts(workdir, request, contexts)
    best = min(result["perplexity"] for result in results)
    if TARGET.value is not None and best > TARGET.value:
        if hosts.first():
            print(
                f"perplexity {best:.4f} is above --target_perplexity={TARGET.value:g}",
                file=sys.stderr,
            )
        sys.exit(MISSED)
