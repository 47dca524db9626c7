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
from typing import Annotated, NamedTuple

from adaptive_jax.config import commands
from adaptive_jax.config.flags import define_option, define_options, option_value, options
from adaptive_jax.config.options import Option, fields_of, meaning
from adaptive_jax.parallel import hosts
from adaptive_jax.scores.evaluate import Request, evaluate_contexts
from adaptive_jax.scores.methods import METHODS

STOPPED = "stopped: printed results are kept; the same command evaluates again"
MISSED = 3  # exit status if the target is missed


class Evaluate(NamedTuple):
    """Flags of the command besides those of `Request` and of methods.

    Attributes:
        context: Tokens of each window that are read and not scored; several values are compared.
        target_perplexity: Exit with status 3 if the best perplexity of all contexts is above this.
    """

    context: Annotated[tuple[int, ...], Option(within="[0, inf)")] = (0,)
    target_perplexity: Annotated[float | None, Option(within="(0, inf)")] = None


def define_flags() -> None:
    """Defines a flag for each option of `Request`, and for each option of a method."""
    define_options(Request, without=("context",))
    for name, kinds in options_of_methods().items():
        helps = []
        for method, kind in kinds.items():
            field = fields_of(kind)[name]
            default = field.default[0] if field.kind is tuple else field.default
            ends = "" if default in (None, "") else f", default {default}"
            text = meaning(kind, name).rstrip(".")
            helps.append(f"Of --method={method}: {text}{ends}.")
        define_option(name, field._replace(default=None), " ".join(helps))
    define_options(Evaluate, commands.Workdir, commands.Allow, commands.Hosts)


def options_of_methods() -> dict[str, dict[str, type]]:
    """Returns, for each option, the methods that have it and their classes of options."""
    kinds = {}
    for name, method in METHODS.items():
        for option in fields_of(method.options):
            kinds.setdefault(option, {})[name] = method.options
    return kinds


def main():
    """Evaluates a run with the settings of the flags."""
    contexts, target = options(Evaluate)
    method_options = {}
    for name, kinds in options_of_methods().items():
        kind, *_ = kinds.values()
        if (value := option_value(name, fields_of(kind)[name])) is not None:
            method_options[name] = value
    request = options(Request, without=("context",))
    request = request._replace(context=contexts[0], options=method_options)
    workdir = commands.workdir()
    hosts.initialize(*options(commands.Hosts))
    with hosts.fail_together():
        results = evaluate_contexts(workdir, request, contexts)
    best = min(result["perplexity"] for result in results)
    if target is not None and best > target:
        if hosts.first():
            print(f"perplexity {best:.4f} is above --target_perplexity={target:g}", file=sys.stderr)
        sys.exit(MISSED)
