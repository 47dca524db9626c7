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
from adaptive_jax.evaluation.evaluate import Request, evaluate_contexts
from adaptive_jax.evaluation.methods import METHODS
from adaptive_jax.evaluation.options import (
    define_flag,
    define_option_flags,
    flag_value,
    flag_values,
    options_of,
)
from adaptive_jax.parallel import hosts

STOPPED = "stopped: results that were printed are kept; the same command evaluates anew"
MISSED = 3  # the exit status of a target that is not reached
CONTEXTS = "Tokens of each window that are given and not scored; several are compared."
TARGET = "Exit with status 3 if the perplexity, the best of several, is above it."


def define_flags() -> None:
    """Defines a flag for each option of `Request`, and for each option of a method."""
    define_option_flags(Request, without=("context",))
    define_flag("context", tuple[int, ...], (0,), CONTEXTS)
    for name, kinds in options_of_methods().items():
        helps = []
        for method, kind in kinds.items():
            default = kind._field_defaults[name]
            default = default[0] if isinstance(default, tuple) else default
            ends = "" if default in (None, "") else f", default {default}"
            helps.append(f"Of --method={method}: {options_of(kind)[name][1].help}{ends}.")
        hint, option = options_of(kind)[name]
        define_flag(name, hint, None, " ".join(helps), option.among)
    define_flag("target_perplexity", float, None, TARGET)
    commands.define_workdir("Directory of a run that train.py made.")
    flags.adopt_module_key_flags(commands)  # --help shows them


def options_of_methods() -> dict[str, dict[str, type]]:
    """Returns, for each option, the methods that have it and their classes of options."""
    options = {}
    for method, each in METHODS.items():
        for name in options_of(each.options):
            options.setdefault(name, {})[method] = each.options
    return options


def main():
    """Evaluates as the flags say."""
    contexts = flag_value("context", tuple[int, ...])
    target = flags.FLAGS.target_perplexity
    if target is not None and not target > 0:
        raise InputError(f"--target_perplexity must be above 0, such as 80, got {target:g}")
    options = {}
    for method in METHODS.values():
        options |= flag_values(method.options)
    options = {name: value for name, value in options.items() if value is not None}
    fields = flag_values(Request, without=("context",))
    request = Request(**fields, context=contexts[0], options=options)
    workdir, others = commands.workdir()
    hosts.initialize(*others)
    with hosts.fail_together():
        results = evaluate_contexts(workdir, request, contexts)
    best = min(result["perplexity"] for result in results)
    if target is not None and best > target:
        if hosts.first():
            print(f"perplexity {best:.4f} is above --target_perplexity={target:g}", file=sys.stderr)
        sys.exit(MISSED)
