"""What the configs of converted models have in common."""

import ast
import math
from collections.abc import Mapping

from adaptive_jax.config import keys, rows
from adaptive_jax.errors import InputError
from adaptive_jax.workdir.settings import flat

# fairseq's defaults of the options that do not belong to the model.
RUN = {
    "tokens_per_sample": 1024,
    "sample_break_mode": "none",
    "max_tokens": None,
    "update_freq": [1],
    "distributed_world_size": 1,
    "seed": 1,
}

# How the paper trains (Baevski & Auli 2019, section 4.5), under fairseq's names: recorded if the
# checkpoint used another optimizer or schedule.
TRAINING = {
    "max_update": 286_000,
    "lr": [1.0],
    "min_lr": 1e-5,
    "warmup_init_lr": 1e-7,
    "warmup_updates": 16_000,
    "lr_period_updates": 18_000,
    "t_mult": 2,
    "lr_shrink": 0.75,
    "momentum": 0.99,
    "clip_norm": 0.1,
    "weight_decay": 0.0,
    "lr_scheduler": "cosine",
}


def completed(config: Mapping) -> dict:
    """The config with the default of every key that it lacks.

    The corpus is `text_files` without a path, because a checkpoint does not contain its training
    text.
    """
    return keys.resolve(rows.config({"data.corpus": "text_files"} | flat(config)))


def fairseq_run(options: dict, vocabulary_size: int) -> dict:
    """The keys outside of the model, of a run with these options of fairseq."""
    length = options["tokens_per_sample"]
    rows = max(1, (options["max_tokens"] or length) // length)
    return _training_of(options) | {
        "seed": options["seed"],
        "tokens_per_update": (
            rows * length * options["update_freq"][-1] * options["distributed_world_size"]
        ),
        "tokens_per_device": rows * length,
        "data": {"vocabulary_size": vocabulary_size},
        "batches": {
            "sequence_length": length,
            "break_mode": options["sample_break_mode"],
            "layout": "packed",
        },
    }


def list_of(options, name):
    """The list that an option spells out: "200,500" or "[(1, 64), (2, 128)]".

    Raises:
        InputError: it spells out none.
    """
    value = options[name]
    try:
        spelt_out = isinstance(value, str) and (
            value if value.startswith(("[", "(")) else f"[{value}]"
        )
        return tuple(ast.literal_eval(spelt_out) if spelt_out else value)
    except (ValueError, TypeError, SyntaxError):
        raise InputError(
            f"the checkpoint's {name}={value!r} is not a list of numbers: give another checkpoint"
        ) from None


def _training_of(options):
    """Steps, optimizer and schedule: the checkpoint's if they are known here, else the paper's."""
    known = options.get("optimizer") == "nag" and options.get("lr_scheduler") in SCHEDULES
    given = {name: value for name, value in options.items() if value is not None}
    found = TRAINING | {"t_mult": 1, "lr_shrink": 1.0} | given if known else TRAINING
    # `max_update` is absent where training went on for a number of epochs.
    steps = found["max_update"] or TRAINING["max_update"]
    highest, schedule = SCHEDULES[found["lr_scheduler"]](found, steps)
    return {
        "steps": max(1, steps),
        "log_every": 100,
        "evaluate_every": 2_000,
        "checkpoint_every": 2_000,
        "keep": 2,
        "optimizer": {
            "name": "nag",
            "learning_rate": highest,
            "momentum": found["momentum"],
            "clip_norm": found["clip_norm"] or None,
            "decoupled_decay": found["weight_decay"],
        },
        "schedule": schedule,
    }


def _cosine(found, steps):
    highest, lowest = found["lr"][0], found["min_lr"]
    if "max_lr" in found:  # until 2020, `lr` was the lowest rate
        highest, lowest = found["max_lr"], found["lr"][0]
    warmup, period = found["warmup_updates"], found["lr_period_updates"]
    cycle = max(1, int(period) if period > 0 else steps - warmup)
    cycles = math.ceil(math.log2(max(1, steps - warmup) / cycle + 1)) if found["t_mult"] == 2 else 1
    return highest, {
        "name": "cosine_cycles",
        "min_learning_rate": lowest,
        "warmup_from": found["warmup_init_lr"],
        "warmup_steps": warmup,
        "cycle_steps": cycle,
        "cycles": max(1, cycles),
        "shrink": found["lr_shrink"],
    }


def _plateau(found, steps):
    """The rate is divided after an epoch that is no better, more than `lr_patience` of them in
    a row.
    """
    return found["lr"][0], {
        "name": "plateau",
        "warmup_from": 0.0,
        "warmup_steps": found.get("warmup_updates", 0),
        "factor": 1 / found["lr_shrink"],
        "patience": 1 + found.get("lr_patience", 0),
        "threshold": found.get("lr_threshold", 1e-4),
        "divisions": 0,
    }


def _fixed(found, steps):
    return found["lr"][0], {
        "name": "constant",
        "warmup_from": 0.0,
        "warmup_steps": found["warmup_updates"],
    }


SCHEDULES = {"cosine": _cosine, "reduce_lr_on_plateau": _plateau, "fixed": _fixed}
