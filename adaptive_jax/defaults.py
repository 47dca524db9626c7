"""Every key of a config with its default; configs that differ from the defaults by dotted keys;
the check of keys and types.
"""

import copy
import inspect
import numbers
from collections.abc import Mapping

from ml_collections import ConfigDict

from adaptive_jax.errors import InputError, check_known
from adaptive_jax.layer_defaults import LAYERS
from adaptive_jax.training.optim import OPTIMIZERS, SCHEDULES, optimizer_named


def _arguments(function):
    """The arguments of a function that have a default, with it."""
    parameters = inspect.signature(function).parameters
    return {key: p.default for key, p in parameters.items() if p.default is not p.empty}


# Groups whose key "name" picks a class or function; the other keys are its arguments, and its
# docstring says what they mean.
NAMED = LAYERS | {
    "optimizer": {name: _arguments(function) for name, function in OPTIMIZERS.items()},
    "schedule": {name: _arguments(function) for name, function in SCHEDULES.items()},
}
# Keys that belong to no class: the default and the meaning.
GENERAL = {
    "steps": (7_500, "updates in all"),
    "seed": (0, "of the initial parameters, the order of the examples and dropout"),
    "dtype": (
        "float32",
        "of activations and matrix products: float32 or bfloat16; parameters are float32",
    ),
    "tokens_per_update": (
        8_192,
        "tokens of an update, over all devices; a multiple of batches.sequence_length",
    ),
    "tokens_per_device": (
        8_192,
        (
            "tokens that a device holds at a time, at most; an update accumulates gradients over as"
            " many microbatches as it needs; 0: as many as its memory holds, by an estimate, and"
            " 4,096 where memory is not known, as on CPUs"
        ),
    ),
    "compose_share": (
        1.0,
        (
            "share of updates that compose word vectors anew, the first one among them; the others"
            " use those of the last such update and train the rest of the model"
        ),
    ),
    "init_from": (
        "",
        "workdir of a run whose parameters this one starts from; empty: fresh parameters",
    ),
    "init_checkpoint": (
        "best",
        "with init_from: best by validation, latest, or the number of updates",
    ),
    "init_words": (
        "new",
        (
            "with init_from: the vocabulary: new, words of the new corpus alone; both, those of"
            " that run, too"
        ),
    ),
    "gradient_sums": (
        "float32",
        (
            "dtype in which gradients are summed over devices: float32, or bfloat16, which moves"
            " half the bytes and rounds to 8 bits"
        ),
    ),
    "fsdp": (0, "devices that share one copy of the parameters; 0: as few as hold the model"),
    "log_every": (50, "updates between two lines of metrics; 0: only at the end"),
    "evaluate_every": (
        500,
        "updates between two evaluations on the validation split; 0: only with checkpoints",
    ),
    "checkpoint_every": (500, "updates between two checkpoints; 0: only at the end"),
    "keep": (1, "latest checkpoints that are kept; the best one is kept beside them"),
    "keep_every_hours": (
        0.0,
        "hours of training after which one more checkpoint is kept for good; 0: none",
    ),
    "hours": (
        0.0,
        (
            "hours of training, over all starts of the run, after which it evaluates, saves and"
            " ends; 0: no limit"
        ),
    ),
    "early_stopping": (
        0,
        "evaluations in a row without a lower validation loss that end training; 0: never",
    ),
    "divergence.policy": (
        "stop",
        (
            "after an update that is not finite: stop, skip (leave it out) or rewind (to the last"
            " checkpoint, for other batches)"
        ),
    ),
    "divergence.loss": (100.0, "nats a token, from which a loss counts as not finite"),
    "divergence.spike": (2.0, "nats a token above the recent mean, from which a loss is reported"),
    "divergence.rewinds": (3, "times that a run rewinds, at most; then it stops"),
    "metrics.tensorboard": (True, "whether to write files for TensorBoard"),
    "metrics.wandb": (False, "whether to log to Weights & Biases; needs the package wandb"),
    "metrics.norms": (
        False,
        "whether to log norms of gradients and changes, by group of parameters",
    ),
}


def _nested(flat):
    nested = {}
    for key, value in flat.items():
        *outer, last = key.split(".")
        group = nested
        for name in outer:
            group = group.setdefault(name, {})
        group[last] = value
    return nested


DEFAULTS = _nested({key: default for key, (default, _) in GENERAL.items()}) | {
    "data": {  # adaptive_jax.data.corpora.load.Settings says what they mean
        "corpus": "",
        "path": "",
        "cache": "~/.cache/adaptive_jax",
        "threshold": 1,
        "limit": 0,
        "codes": 0,
        "tokeniser": "none",
        "lower": False,
        "vocabulary_size": 0,
    },
    "batches": {  # adaptive_jax.data.batches.training.Layout
        "sequence_length": 256,
        "break_mode": "none",
        "layout": "packed",
    },
    "input": {"name": "adaptive"} | NAMED["input"]["adaptive"],
    "body": {"name": "transformer"} | NAMED["body"]["transformer"],
    "output": {"name": "adaptive"} | NAMED["output"]["adaptive"],
    "optimizer": {"name": "nag"} | NAMED["optimizer"]["nag"],
    "schedule": {"name": "cosine_cycles"} | NAMED["schedule"]["cosine_cycles"],
}
OPTIONAL = {"config.optimizer.clip_norm"}  # may be None
# What a config with the group CHOOSE, which only configs/own_text.py has, may leave None:
# adaptive_jax/planning/choose.py fills it in.
CHOOSE = {"hours": 1.0}
CHOSEN = (
    *(
        "steps",
        "dtype",
        "tokens_per_update",
        "tokens_per_device",
        "log_every",
        "evaluate_every",
        "checkpoint_every",
    ),
    *(
        "data.threshold",
        "data.limit",
        "data.codes",
        "data.vocabulary_size",
        "batches.sequence_length",
        "input.cutoffs",
    ),
    *(
        "body.layers",
        "body.features",
        "body.heads",
        "body.feed_forward",
        "body.dropout",
        "body.attention_dropout",
    ),
    *("optimizer.learning_rate", "schedule.warmup_steps", "schedule.cycle_steps"),
)


def config(*changes: Mapping[str, object]) -> ConfigDict:
    """The defaults with changes by dotted key, later ones last. Setting a group's `name` gives the
    group its defaults.

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
        key, value = group, {"name": value} | keys_of(group, value)
    *outer, last = key.split(".")
    for name in outer:
        check_known(f"config.{key}", name, settings)
        settings = settings[name]
    check_known(f"config.{key}", last, settings)
    settings[last] = value


def defaults_of(config: Mapping) -> dict:
    """All keys that a config with these names has, with their defaults.

    Raises:
        InputError: a group is missing, has no name, or a name that does not exist.
    """
    settings = copy.deepcopy(DEFAULTS)
    for group in NAMED:
        given = _group(config, group)
        if "name" not in given:
            raise InputError(f"config.{group}.name is missing: choose {', '.join(NAMED[group])}")
        _set(settings, f"{group}.name", given["name"])
    return settings | ({"choose": dict(CHOOSE)} if "choose" in config else {})


def check_keys(config: Mapping) -> dict:
    """The config as plain values, lists as tuples; the check that every key is known, none is
    missing and all types are right.

    Raises:
        InputError: names the first key that is not so, and the closest known one.
    """
    optional = OPTIONAL | {f"config.{key}" for key in CHOSEN if "choose" in config}
    return _checked("config", config, defaults_of(config), optional)


def switch(config: dict, group: str, name: str) -> str | None:
    """Chooses another class for a group of `config`, such as "output.table"; None, or a line that
    says what became of the keys.

    Keys that both classes have keep values that are not the old class's defaults; the others take
    the new one's defaults. The full softmax, which has no bands, loses the cutoffs of its table.

    Raises:
        InputError: a name that does not exist.
    """
    after, old = keys_of(group, name), _group(config, group)
    if old["name"] == name:
        return None
    before = keys_of(group, old["name"])
    kept = {key: old[key] for key in after if key in old and old[key] != before[key]}
    unused = [key for key in before if key not in after]
    _set(config, f"{group}.name", name)
    _group(config, group).update(kept)
    if (group, name) == ("output", "softmax") and config["output"]["table"].get("cutoffs"):
        config["output"]["table"]["cutoffs"] = ()
        unused.append("table.cutoffs")
    new = {key: value for key, value in after.items() if key not in before}
    takes = [
        f"{key}={value}"
        for key, value in new.items()
        if value or not isinstance(value, bool | float)
    ]
    parts = [
        f"keeps {', '.join(f'{key}={value}' for key, value in kept.items() if key != 'table')}",
        f"takes {', '.join(takes)}",
        f"has no {', '.join(unused)}",
    ]
    said = [part for part in parts if part.split(" ")[-1]]
    return f"config.{group}.name={name}" + (f": {'; '.join(said)}" if said else "")


def keys_of(group: str, name: str) -> dict:
    """The keys beside `name` of a group of `NAMED`, with their defaults.

    Raises:
        InputError: a name that does not exist.
    """
    if group == "optimizer":
        return _arguments(optimizer_named(name))
    check_known(f"config.{group}.name={name!r}", name, NAMED[group])
    return copy.deepcopy(NAMED[group][name])


def _group(config, path):
    for depth, name in enumerate(path.split(".")):
        if not isinstance(config, Mapping) or name not in config:
            raise InputError(
                f"config.{'.'.join(path.split('.')[: depth + 1])} is missing: --explain shows all"
                " keys"
            )
        config = config[name]
    if not isinstance(config, Mapping):
        raise InputError(f"config.{path}={config!r} must be a group of keys, among them name")
    return config


def _checked(path, value, default, optional):
    """`value`, with tuples for lists, if its keys and types are those of `default`; those in
    `optional` may be None.
    """
    if isinstance(default, dict):
        if not isinstance(value, Mapping):
            raise InputError(f"{path}={value!r} must be a group of keys: {', '.join(default)}")
        for key in value:
            check_known(f"{path}.{key}", key, default)
        if missing := [key for key in default if key not in value]:
            raise InputError(
                f"{path}.{missing[0]} is missing: its default is {default[missing[0]]!r}"
            )
        return {
            key: _checked(f"{path}.{key}", value[key], default[key], optional) for key in default
        }
    if value is None and (path in optional or default is None):
        return None
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if isinstance(default, tuple):
        nested = any(isinstance(item, tuple) for item in default)
        right, what = (
            _is_tuple(value, nested),
            "a tuple " + ("of pairs " if nested else "") + "of whole numbers",
        )
    elif isinstance(default, bool):
        right, what = isinstance(value, bool), "True or False"
    elif isinstance(default, int):
        right, what = number and isinstance(value, numbers.Integral), "a whole number"
    elif isinstance(default, float) or default is None:
        right, what = number and value == value, "a number"
    else:
        right, what = isinstance(value, str), "text"
    if not right:
        raise InputError(f"{path}={value!r} must be {what}, such as {default!r}")
    return (
        tuple(tuple(item) if nested else item for item in value)
        if isinstance(default, tuple)
        else (float if default is None else type(default))(value)
    )


def _is_tuple(value, nested):
    if not isinstance(value, list | tuple):
        return False
    if nested:
        return all(_is_tuple(item, False) for item in value)
    return all(isinstance(item, numbers.Integral) and not isinstance(item, bool) for item in value)
