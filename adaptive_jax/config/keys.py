"""The keys of a config: each has its default, its type and its meaning in the class that uses it.

    config = resolve({"steps": 100, "body": {"name": "lstm", "widths": (512, 256)}})
    config["body"]["dropout"]           # the default of the class LSTM

A group whose key `name` chooses a class, or a function, takes its arguments as keys. The name may
be "package.module:Class" of somebody else's package.
"""

import dataclasses
import importlib
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from adaptive_jax.config import rows
from adaptive_jax.config.classes import ExternalClassError, find, parameters_of
from adaptive_jax.errors import InputError, check_at_least, check_known

ALL_GROUPS = "", *rows.GROUPS  # the outermost first
LARGEST = 2**31 - 2  # of any number but the seed: JAX counts in 32 bits, and words one further
SEEDS = 2**32
NAMES = {  # the default classes of groups with a key `name`, outer groups before inner ones
    "input": "adaptive",
    "body": "transformer",
    "output": "adaptive",
    "output.table": "own",
    "optimizer": "nag",
    "schedule": "cosine_cycles",
}
HOMES = {  # the classes that have the keys: not imported before a command has parsed its flags
    "input": "adaptive_jax.model.language_model:INPUTS",
    "body": "adaptive_jax.model.language_model:BODIES",
    "output": "adaptive_jax.model.language_model:OUTPUTS",
    "output.table": "adaptive_jax.model.language_model:TABLES",
    "output.table.cnn": "adaptive_jax.inputs.char_cnn:CharacterCNN",
    "output.clusters": "adaptive_jax.data.vocabulary.clusters:cut",
    "optimizer": "adaptive_jax.optimizers.optim:OPTIMIZERS",
    "optimizer.name": "adaptive_jax.optimizers.optim:optimizer_named",  # those of optax, too
    "optimizer.arguments": "adaptive_jax.optimizers.optim:arguments",
    "optimizer.is_of_optax": "adaptive_jax.optimizers.optim:is_of_optax",
    "schedule": "adaptive_jax.optimizers.schedules:SCHEDULES",
    "data": "adaptive_jax.data.corpora.load:Settings",
    "batches": "adaptive_jax.data.batches.pipeline:Layout",
}
GIVEN = {  # arguments that the program gives, never a config
    "input": {"vocabulary_size", "features", "word_axes"},
    "output": {"table"},
    "output.table": {"vocabulary_size", "features", "source", "word_axes", "cnn"},
    "output.table.cnn": {"vocabulary_size", "features"},
    "schedule": {"learning_rate"},
}
_allowed: set[str] = set()  # modules of other packages that this process may import


@dataclasses.dataclass(frozen=True)
class General:
    """The keys that belong to no group.

    Attributes:
        steps: updates in all.
        seed: of the initial parameters, the order of the examples and dropout.
        dtype: of activations and matrix products: float32 or bfloat16; parameters are float32.
        tokens_per_update: tokens of an update, over all devices; a multiple of
            batches.sequence_length.
        tokens_per_device: tokens that a device holds at a time, at most; an update accumulates
            gradients over as many microbatches as it needs. 0: as many as its memory holds, by the
            count of the compiler, and 4,096 where memory is not known, as on CPUs.
        compose_share: share of updates that compose word vectors anew, the first one among them;
            the others use those of the last such update and train the rest of the model.
        own_text: whether the text decides, where they are left at their defaults, data.threshold or
            data.codes, data.vocabulary_size and input.cutoffs; it may then be a single file. See
            configs/own_text.py.
        init_from: workdir of a run whose parameters this one starts from; empty: fresh parameters.
        init_checkpoint: with init_from: best by validation, latest, or the number of updates.
        init_words: with init_from: the vocabulary: new, words of the new corpus alone; both, those
            of that run, too.
        divergence: what follows an update whose loss or gradient is not finite, or whose loss is
            100 nats a token or more: stop, or skip (leave the update out).
        fsdp: devices that share one copy of the parameters; 0: as few as hold the model.
        shard_words: whether each of the fsdp devices computes the words that it holds, for the
            tokens of all of them: tokens are gathered in place of tables. For large vocabularies.
        log_every: updates between two lines of metrics; 0: only at the end.
        evaluate_every: updates between two evaluations on the validation split; 0: only with
            checkpoints.
        evaluate_break_mode: the batches.break_mode of validation and of evaluate.py; empty: that of
            training.
        checkpoint_every: updates between two checkpoints; 0: only at the end. An evaluation that is
            the best so far is saved, too.
        keep: latest checkpoints that are kept; the best one is kept beside them.
        hours: hours of training, over all starts of the run, after which it evaluates, saves and
            ends; 0: no limit.
        early_stopping: evaluations in a row without a lower validation loss that end training; 0:
            never.
    """

    steps: int = 7_500
    seed: int = 0
    dtype: str = "float32"
    tokens_per_update: int = 8_192
    tokens_per_device: int = 8_192
    compose_share: float = 1.0
    own_text: bool = False
    init_from: str = ""
    init_checkpoint: str = "best"
    init_words: str = "new"
    divergence: str = "stop"
    fsdp: int = 0
    shard_words: bool = False
    log_every: int = 50
    evaluate_every: int = 500
    evaluate_break_mode: str = ""
    checkpoint_every: int = 500
    keep: int = 1
    hours: float = 0.0
    early_stopping: int = 0


@dataclasses.dataclass(frozen=True)
class Metrics:
    """Logs besides metrics.jsonl.

    Attributes:
        tensorboard: whether to write files for TensorBoard.
        wandb: whether to log to Weights & Biases, too; needs the package wandb.
    """

    tensorboard: bool = True
    wandb: bool = False


class Key(NamedTuple):
    """A key of a config.

    default: its value where a config does not state it; `inspect.Parameter.empty` if it must.
    kind: the type of its values: bool, int, float, str, tuple; None: any.
    optional: whether it may be None.
    """

    default: object
    kind: type | None
    optional: bool


def home(place: str) -> Any:
    """Imports an entry of `HOMES`: the class whose arguments are keys, or the classes by name."""
    module, _, name = HOMES[place].partition(":")
    return getattr(importlib.import_module(module), name)


def maker(group: str, name: str | None = None) -> Callable:
    """The class or function whose arguments are the keys of a group, "" for the outermost.

    Raises:
        InputError: a name that does not exist.
    """
    if group not in NAMES:
        classes = {"": General, "metrics": Metrics}
        return classes.get(group) or home(group)
    name = name or NAMES[group]
    if group == "optimizer":
        function = home("optimizer.name")(name)
    else:
        function = find(group, home(group), name)
    if ":" in name:
        _allowed.add(name.partition(":")[0])
    return function


def keys_of(group: str, name: str | None = None) -> dict[str, Key]:
    """The keys of a group, `name` and inner groups left out, see `maker`."""
    made = maker(group, name)
    if group == "optimizer":
        parameters = home("optimizer.arguments")(name or NAMES[group])
    else:
        parameters = parameters_of(made)
    reserved = GIVEN.get(group, set()) | {"parent", "name"}
    keys = {key: _key(p) for key, p in parameters.items() if key not in reserved and _is_key(p)}
    if group == "output":
        keys = {"clusters": Key("", str, False)} | keys  # whose file adaptive_jax.data reads
    return keys


def inner_groups(group: str, name: str | None = None) -> list[str]:
    """The groups inside a group. `output.table.cnn` is one where the table's class has a field of
    that name.
    """
    inner = [each for each in rows.GROUPS if each.rpartition(".")[0] == group]
    if group == "output.table" and "cnn" not in inspect.signature(maker(group, name)).parameters:
        inner.remove("output.table.cnn")
    return inner


def _is_key(parameter):
    """True if a value that JSON knows can be given for a parameter."""
    plain = bool | int | float | str | tuple | list | None
    named = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return named and (parameter.default is parameter.empty or isinstance(parameter.default, plain))


def _key(parameter):
    default, hint = parameter.default, parameter.annotation
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    hints = typing.get_args(hint) if union else (hint,)
    optional = default is None or types.NoneType in hints
    if default is None or default is parameter.empty:
        known = {typing.get_origin(hint) or hint for hint in hints}
        sequence = known & {tuple, list, Sequence}
        kinds = [kind for kind in (str, bool, float, int) if kind in known]
        kind = tuple if sequence else (kinds or [None])[0]
    else:
        kind = tuple if isinstance(default, list) else type(default)
    return Key(default, kind, optional)


def at(config: Mapping, key: str) -> Any:
    """The group of a config, or the value, that a dotted key names; `{}` if it is not stated."""
    for name in filter(None, key.split(".")):
        config = config[name] if isinstance(config, Mapping) and name in config else {}
    return config


def resolve(config: Mapping) -> dict:
    """The whole config as plain values: what `config` states, lists as tuples, and the defaults of
    all other keys.

    Raises:
        InputError: names the first unknown key or name and the closest known one, a value of
            another type, or a key that is missing and has no default.
    """
    config = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(config, Mapping):
        raise InputError(f"a config must be a mapping of keys to values, got {_short(config)}")
    return _resolved("", config)


def _resolved(group, stated):
    """A group of a config and those inside it, whole."""
    if not isinstance(stated, Mapping):
        raise InputError(f"config.{group}={stated!r} must be a group of keys")
    name = {"name": stated.get("name", NAMES[group])} if group in NAMES else {}
    if name and not isinstance(name["name"], str):
        raise InputError(
            f"config.{group}.name={name['name']!r} must be text, such as {NAMES[group]!r}"
        )
    path = f"config.{group}." if group else "config."
    keys = keys_of(group, name.get("name"))
    inner = {each.rpartition(".")[2]: each for each in inner_groups(group, name.get("name"))}
    for key in stated:
        # A group that is empty says nothing: `rows.config` has all.
        if stated[key] != {}:
            check_known(f"{path}{key}", key, [*name, *keys, *inner])
    values = {
        key: _value(f"{path}{key}", stated.get(key, field.default), field)
        for key, field in keys.items()
    }
    groups = {key: _resolved(each, stated.get(key, {})) for key, each in inner.items()}
    return name | values | groups


def _value(path, value, key):
    """`value` as the type of its key."""
    if value is inspect.Parameter.empty:
        raise InputError(f"{path} is missing, and it has no default")
    if isinstance(value, str) and "\0" in value:
        raise InputError(f"{path}={_short(value)} must be text without NUL characters")
    if isinstance(value, str) and value.lower() == "none" and key.kind is not str:
        value = None
    if value in ("inf", "-inf") and key.kind is float:
        value = float(value)
    if value is None and key.optional:
        return None
    if path != "config.seed" and key.kind is not str:
        _check_size(path, value)
    if key.kind is None:
        return value
    if key.kind is tuple:
        return _tuple(path, value, key.default)
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    finite = key.optional or not isinstance(value, float) or math.isfinite(value)
    number = is_integer or (isinstance(value, float) and not math.isnan(value) and finite)
    fits, what = {
        bool: (isinstance(value, bool) or (is_integer and value in (0, 1)), "True or False"),
        int: (is_integer, "a whole number"),
        float: (number, "a number" if finite else "a finite number"),
        # A flag's value that is digits is text, too, such as a directory called 2007.
        str: (isinstance(value, str) or is_integer, "text"),
    }[key.kind]
    if fits:
        return key.kind(value)
    if key.kind is str and isinstance(value, float | tuple | bool):
        what = f"text: write {path}=\"'{value}'\""  # a flag's text that Python reads otherwise
    raise InputError(f"{path}={_short(value)} must be {what}, such as {key.default!r}")


def _tuple(path, value, default):
    """A tuple of whole numbers, or of such tuples if its default is one."""
    nested = any(isinstance(item, tuple) for item in default or ())
    items = value if isinstance(value, list | tuple) else (value,)
    rows = items if nested else [items]
    right = all(isinstance(row, list | tuple) for row in rows) and all(
        isinstance(item, int) and not isinstance(item, bool) for row in rows for item in row
    )
    if not right:
        parts = "pairs" if nested and len(default[0]) == 2 else "tuples"
        what = f"a tuple {f'of {parts} ' if nested else ''}of whole numbers, such as {default!r}"
        raise InputError(f"{path}={_short(value)} must be {what}")
    return tuple(map(tuple, items)) if nested else tuple(items)


def _check_size(path, value):
    if isinstance(value, list | tuple):
        for each in value:
            _check_size(path, each)
    elif isinstance(value, int | float) and LARGEST < value < math.inf:
        raise InputError(f"{path}={_short(value)} is too large: use at most {LARGEST:,}")


def _short(value):
    text = " ".join(repr(value).split())
    return text if len(text) < 90 else f"{text[:90]}…"


def switch(stated: Mapping, flags: Mapping[str, object]) -> tuple[dict, list[str]]:
    """The config of a file with the values of flags, by dotted key; and a line for each class that
    a flag switches.

    What the file states for the other class stays if the new one has the key. The full softmax,
    which has no bands, loses the cutoffs of its table.

    Raises:
        InputError: a name that does not exist.
    """
    config, lines = _copy(stated), []
    for group, default in NAMES.items():
        name, settings = flags.get(f"{group}.name"), at(config, group)
        if not isinstance(name, str) or name == settings.get("name", default):
            continue
        inner = {each.rpartition(".")[2] for each in inner_groups(group, name)}
        allowed = {*keys_of(group, name), *inner, "name"}
        drops = [key for key in settings if key not in allowed and settings[key] != {}]
        flagged = {key for key in allowed if f"{group}.{key}" in flags}
        shared = allowed - flagged - inner - {"name"}
        keeps = [f"{key}={value}" for key, value in settings.items() if key in shared]
        for key in drops:
            del settings[key]
        if name == "softmax" and settings.get("table", {}).pop("cutoffs", ()):
            drops.append("table.cutoffs")
        parts = [("keeps", keeps), ("drops", drops)]
        notes = "; ".join(f"{verb} {', '.join(keys)}" for verb, keys in parts if keys)
        lines.append(f"config.{group}.name={name}" + (f": {notes}" if notes else ""))
    for key, value in flags.items():
        rows.put(config, key, value)
    return config, lines


def _copy(config):
    # Not deepcopy: two groups that are one dict would stay one, and a flag would change both.
    return {key: _copy(v) if isinstance(v, Mapping) else v for key, v in config.items()}


def allow(modules: Iterable[str]) -> None:
    """Lets the config of a workdir name classes of these modules: they are imported, so their code
    runs.
    """
    _allowed.update(modules)


def check_allowed(config: Mapping, file: object) -> None:
    """Checks that a config read from `file`, which anybody may have written, names classes only of
    modules that this process may import, see `allow`.

    Raises:
        ExternalClassError: it names another; the message says how to allow it.
    """
    for group in NAMES:
        name = str(at(config, f"{group}.name") or "")
        module, colon, _ = name.partition(":")
        if colon and module not in _allowed:
            raise ExternalClassError(
                f"{file} has {group}.name={name!r}, code that is not part of adaptive_jax: pass"
                f" --allow={module} to import and run it, if you trust it"
            )


def check_values(config: Mapping) -> None:
    """Checks the values that belong to no layer, optimizer, schedule, corpus or division of an
    update.

    Raises:
        InputError: names the key and its value.
    """
    zero = ("fsdp", "log_every", "evaluate_every", "checkpoint_every", "early_stopping")
    check_at_least(0, **{key: config[key] for key in zero})
    check_at_least(0, **{"data.vocabulary_size": config["data"]["vocabulary_size"]})
    if not 0 <= config["hours"] < math.inf:
        raise InputError(f"hours={config['hours']} must be 0 (no limit) or more, and finite")
    if not 0 <= config["seed"] < SEEDS:
        raise InputError(f"seed={config['seed']} must be from 0 to {SEEDS - 1:,}")
    for key, known in ("init_words", ("new", "both")), ("divergence", ("stop", "skip")):
        check_known(f"{key}={config[key]!r}", config[key], known)
    steps, warmup = config["steps"], config["schedule"].get("warmup_steps", 0)
    if warmup > steps > 0:
        raise InputError(
            f"schedule.warmup_steps={warmup:,} is longer than the run of steps={steps:,}: take"
            f" schedule.warmup_steps={steps // 10:,}, or more steps"
        )


def complete(*changes: Mapping[str, object]) -> dict:
    """The whole config with these settings by dotted key, later ones last: `rows.config`,
    resolved.
    """
    return resolve(rows.config(*changes))
