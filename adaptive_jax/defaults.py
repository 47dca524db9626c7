"""Every key of a config with its default, and configs that differ from the defaults by dotted keys."""

import copy
from collections.abc import Mapping

from ml_collections import ConfigDict

from adaptive_jax.errors import check_known

FILTERS = ((1, 128), (2, 256), (3, 384), (4, 512), (5, 512), (6, 512), (7, 512))  # (characters spanned, features)
TRANSFORMER = {
    "layers": 6,
    "features": 256,
    "heads": 8,
    "feed_forward": 1024,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "activation_dropout": 0.0,
    "final_norm": True,
    "attention": "auto",  # how attention is computed; the numbers stay the same
    "remat": "none",  # what the backward pass recomputes to save memory: none, elementwise or all
}
TABLES = {
    "own": {"cutoffs": (), "factor": 4, "width": 0},
    "tied": {"share_projections": True, "share_head_projection": False, "cutoffs": ()},
}
OUTPUT = {
    "table": {"name": "own"} | TABLES["own"],
    "tail_dropout": 0.0,
    "input_dropout": 0.0,
    "label_smoothing": 0.0,
    "z_loss": 0.0,
}
# Groups whose key "name" picks a class; the other keys are the fields of that class.
NAMED = {
    "input": {
        "lookup": {"width": 0},  # 0: the width of the body
        "adaptive": {"cutoffs": (), "factor": 4, "width": 0},
        "char_cnn": {"width": 128, "filters": FILTERS, "highway_layers": 1, "length": 50},
    },
    "body": {"transformer": TRANSFORMER, "transformer_post_norm": TRANSFORMER},
    "output": {"softmax": OUTPUT, "adaptive": OUTPUT},
    "output.table": TABLES,
    "optimizer": {"nag": {"learning_rate": 1.0, "momentum": 0.99, "clip_norm": 0.1}},
    "schedule": {
        "cosine_cycles": {
            "min_learning_rate": 1e-5,
            "warmup_from": 1e-7,
            "warmup_steps": 500,
            "cycle_steps": 1_000,  # of the first cycle; each of the others takes twice as many steps as the one before
            "cycles": 3,
            "shrink": 0.75,  # of the highest learning rate, from cycle to cycle
        }
    },
}
DEFAULTS = {
    "steps": 7_500,  # updates
    "seed": 0,
    "dtype": "float32",  # of activations and matrix products: float32 or bfloat16
    "tokens_per_update": 8_192,
    "tokens_per_device": 8_192,  # at most, at a time; an update accumulates gradients over as many microbatches as it needs
    "fsdp": 0,  # devices that share one copy of the parameters; 0: as few as hold the model
    "log_every": 50,  # updates, as the next two
    "evaluate_every": 500,
    "checkpoint_every": 500,
    "keep": 1,  # latest checkpoints; the best one is kept beside them
    "keep_every_hours": 0.0,  # of training: one checkpoint after so many is kept for good; 0: none
    "early_stopping": 0,  # evaluations in a row without a lower validation loss that end training; 0: never
    "divergence": {
        "policy": "stop",  # after an update that is not finite: stop, skip (leave it out) or rewind (to the last checkpoint)
        "loss": 100.0,  # nats a token, from which a loss counts as not finite
        "spike": 2.0,  # nats a token above the recent mean, from which a loss is reported
        "rewinds": 3,  # at most, then the run stops
    },
    "metrics": {
        "tensorboard": True,
        "wandb": False,  # Weights & Biases; needs the package wandb
        "norms": False,  # of gradients and changes, by group of parameters
    },
    "data": {
        "corpus": "",
        "path": "",  # a directory with a local copy; empty: download the corpus
        "cache": "~/.cache/adaptive_jax",
        "threshold": 1,  # occurrences that a word of the vocabulary needs
        "limit": 0,  # words in the vocabulary; 0: no limit
        "codes": 0,  # byte-pair merges; 0: words
        "tokeniser": "none",  # none: split at white space; or moses
        "lower": False,
        "vocabulary_size": 0,  # as prepared, for plans made without the corpus; 0: unknown
    },
    "batches": {
        "sequence_length": 256,
        "break_mode": "none",  # what an example is: a window of the text (none), or sentences (complete, complete_doc, eos)
        "layout": "packed",  # how examples become rows: packed or similar
    },
    "input": {"name": "adaptive"} | NAMED["input"]["adaptive"],
    "body": {"name": "transformer"} | NAMED["body"]["transformer"],
    "output": {"name": "adaptive"} | NAMED["output"]["adaptive"],
    "optimizer": {"name": "nag"} | NAMED["optimizer"]["nag"],
    "schedule": {"name": "cosine_cycles"} | NAMED["schedule"]["cosine_cycles"],
}


def config(*changes: Mapping[str, object]) -> ConfigDict:
    """The defaults with changes by dotted key, later ones last. Setting a group's `name` gives the group its defaults.

    Raises:
        InputError: a key or a name that does not exist.
    """
    settings = copy.deepcopy(DEFAULTS)
    for flat in changes:
        for key in sorted(
            flat, key=lambda key: (not key.endswith(".name"), key.count("."))
        ):  # names first, outer ones before inner
            _set(settings, key, flat[key])
    return ConfigDict(settings)


def _set(settings, key, value):
    group, _, last = key.rpartition(".")
    if last == "name" and group in NAMED:
        check_known(f"config.{key}={value!r}", value, NAMED[group])
        key, value = group, {"name": value} | copy.deepcopy(NAMED[group][value])
    *outer, last = key.split(".")
    for name in outer:
        check_known(f"config.{key}", name, settings)
        settings = settings[name]
    check_known(f"config.{key}", last, settings)
    settings[last] = value
