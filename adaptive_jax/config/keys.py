"""The keys of a config: the class that uses a key defines its default, type and meaning.

    config = resolve({"steps": 100, "body": {"name": "lstm", "widths": (512, 256)}})
    config["body"]["dropout"]           # the default of the class LSTM

In a group with a key `name`, which chooses a class or a function, the keys are its arguments. The
name may be "package.module:Class" of another package.
"""

import ast
import dataclasses
import importlib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

from adaptive_jax.config import rows
from adaptive_jax.config.classes import ExternalClassError, find, tuples
from adaptive_jax.config.options import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    Option,
    PositiveInt,
    check_value,
    fields_of,
    is_sequence,
    item_of,
)
from adaptive_jax.errors import InputError, check_known

ALL_GROUPS = "", *rows.GROUPS  # the outermost first
LARGEST = 2**31 - 2  # for all numbers but the seed: JAX counts in 32 bits, and words to one more
SEEDS = 2**32
NAMES = {  # the default classes of groups with a key `name`, outer groups before inner ones
    "input": "adaptive",
    "input.words": "adaptive",
    "body": "transformer",
    "output": "adaptive",
    "output.table": "own",
    "optimizer": "nag",
    "schedule": "cosine_cycles",
}
# Values of flags that are not literals of Python
CONSTANTS = {"none": None, "inf": math.inf, "-inf": -math.inf, "true": True, "false": False}
# For each type of the items of a tuple: types that are accepted, and their name in messages
ITEMS = {
    int: ({int}, "whole numbers"),
    float: ({int, float}, "finite numbers"),
    str: ({str}, "texts"),
}
# The classes whose arguments are keys, imported only after a command has parsed its flags
DEFINITIONS = {
    "": "adaptive_jax.config.keys:General",
    "metrics": "adaptive_jax.config.keys:Metrics",
    "input": "adaptive_jax.model.language_model:INPUTS",
    "input.words": "adaptive_jax.model.language_model:WORDS",
    "body": "adaptive_jax.model.language_model:BODIES",
    "output": "adaptive_jax.model.language_model:OUTPUTS",
    "output.table": "adaptive_jax.model.language_model:TABLES",
    "output.table.cnn": "adaptive_jax.inputs.char_cnn:CharacterCNN",
    "output.clusters": "adaptive_jax.data.vocabulary.clusters:with_clusters",
    "optimizer": "adaptive_jax.optimizers.optim:OPTIMIZERS",
    "optimizer.name": "adaptive_jax.optimizers.optim:optimizer_named",  # of optax, too
    "optimizer.arguments": "adaptive_jax.optimizers.optim:arguments",
    "optimizer.is_of_optax": "adaptive_jax.optimizers.optim:is_of_optax",
    "optimizer.tables": "adaptive_jax.optimizers.optim:OfTables",  # keys of all optimizers
    "schedule": "adaptive_jax.optimizers.schedules:SCHEDULES",
    "data": "adaptive_jax.data.corpora.load:Settings",
    "batches": "adaptive_jax.data.batches.pipeline:Layout",
}
SET_BY_PROGRAM = {  # arguments set by the program, not by a config
    "input": {"vocabulary_size", "features", "word_axes"},
    "input.words": {"vocabulary_size", "features", "word_axes"},
    "output": {"table"},
    "output.table": {"vocabulary_size", "features", "source", "word_axes", "cnn"},
    "output.table.cnn": {"vocabulary_size", "features"},
    "schedule": {"learning_rate"},
}
OPTIONAL_GROUPS = {"input.words", "output.table.cnn"}  # groups that only some classes have
_allowed: set[str] = set()  # modules of other packages that a config may name, see `allow`


@dataclasses.dataclass(frozen=True)
class General:
    """The keys that belong to no group.

    Attributes:
        steps: number of updates.
        seed: seed of the initial parameters, the order of the examples and dropout.
        dtype: dtype of activations and matrix products: float32 or bfloat16; parameters are
            float32.
        tokens_per_update: tokens of an update, over all devices; a multiple of
            batches.sequence_length.
        tokens_per_device: the most tokens that a device holds at a time; an update accumulates
            gradients over as many microbatches as it needs. 0: as many as its memory holds, as
            counted by the compiler, or 4,096 where memory is unknown, as on CPUs.
        compose_share: share of updates, the first among them, that compose word vectors anew; the
            others use the vectors of the last such update and train the rest of the model.
        own_text: whether to choose data.threshold or data.codes, data.vocabulary_size and cutoffs
            from the text, where they have their defaults; the text may then be a single file. See
            configs/own_text.py.
        init_from: workdir of a run whose parameters this one starts from; empty: fresh parameters.
        init_checkpoint: with init_from: best (by validation), latest, or a number of updates.
        init_words: with init_from: the vocabulary: new, only words of the new corpus; both, those
            of that run too.
        divergence: reaction to an update whose loss or gradient is not finite, or whose loss is 100
            nats a token or more: stop, or skip (leave the update out).
        fsdp: devices that share one copy of the parameters; 0: as few as can hold the model.
        shard_words: whether each of the fsdp devices computes the words that it holds, for the
            tokens of all of them, so that tokens are gathered instead of tables. For large
            vocabularies.
        log_every: updates between two lines of metrics; 0: only at the end.
        evaluate_every: updates between two evaluations on the validation split; 0: only with
            checkpoints.
        evaluate_break_mode: the batches.break_mode of validation and of evaluate.py; empty: that of
            training.
        checkpoint_every: updates between two checkpoints; 0: only at the end. The best evaluation
            so far is saved too.
        keep: number of latest checkpoints to keep, beside the best one.
        hours: hours of training, summed over all starts of the run, after which it evaluates, saves
            and ends; 0: no limit.
        early_stopping: number of evaluations in a row without a lower validation loss that end
            training; 0: never.
    """

    steps: PositiveInt = 7_500
    seed: Annotated[int, Option(within=f"[0, {SEEDS})")] = 0
    dtype: Annotated[str, Option(among=("float32", "bfloat16"))] = "float32"
    tokens_per_update: PositiveInt = 8_192
    tokens_per_device: NonNegativeInt = 8_192
    compose_share: Annotated[float, Option(within="(0, 1]")] = 1.0
    own_text: bool = False
    init_from: str = ""
    init_checkpoint: str = "best"
    init_words: Annotated[str, Option(among=("new", "both"))] = "new"
    divergence: Annotated[str, Option(among=("stop", "skip"))] = "stop"
    fsdp: NonNegativeInt = 0
    shard_words: bool = False
    log_every: NonNegativeInt = 50
    evaluate_every: NonNegativeInt = 500
    evaluate_break_mode: str = ""
    checkpoint_every: NonNegativeInt = 500
    keep: PositiveInt = 1
    hours: NonNegativeFloat = 0.0
    early_stopping: NonNegativeInt = 0


@dataclasses.dataclass(frozen=True)
class Metrics:
    """Logs besides metrics.jsonl.

    Attributes:
        tensorboard: whether to write files for TensorBoard.
        wandb: whether to log to Weights & Biases; needs the package wandb.
    """

    tensorboard: bool = True
    wandb: bool = False


def definition(place: str) -> Any:
    """Imports an entry of `DEFINITIONS`: a class whose arguments are keys, or classes by name."""
    module, _, name = DEFINITIONS[place].partition(":")
    return getattr(importlib.import_module(module), name)


def maker(group: str, name: str | None = None) -> Callable:
    """The class or function whose arguments are the keys of a group; "" is the outermost.

    Raises:
        InputError: a name that does not exist.
    """
    if group not in NAMES:
        return definition(group)
    name = name or NAMES[group]
    if group == "optimizer":
        function = definition("optimizer.name")(name)
    else:
        function = find(group, definition(group), name)
    if ":" in name:
        _allowed.add(name.partition(":")[0])
    return function


def keys_of(group: str, name: str | None = None) -> dict[str, Field]:
    """The keys of a group without `name` and inner groups, see `maker`."""
    fields = fields_of(maker(group, name))
    if group == "optimizer":
        fields = definition("optimizer.arguments")(name or NAMES[group])
    if group == "output":
        fields = {"clusters": Field("", str, False)} | fields  # whose file adaptive_jax.data reads
    inner = {path.rpartition(".")[2] for path in inner_groups(group, name)}
    reserved = SET_BY_PROGRAM.get(group, set()) | inner | {"parent", "name"}
    return {key: field for key, field in fields.items() if key not in reserved}


def inner_groups(group: str, name: str | None = None) -> list[str]:
    """The groups inside a group; one of `OPTIONAL_GROUPS` only if the class has a layer of that
    name.
    """
    inner = [path for path in rows.GROUPS if path.rpartition(".")[0] == group]
    if not OPTIONAL_GROUPS.intersection(inner):
        return inner
    fields = fields_of(maker(group, name))
    layers = {key for key, field in fields.items() if field.default is inspect.Parameter.empty}
    return [path for path in inner if path.rpartition(".")[2] in layers]


def word_group(config: Mapping) -> str:
    """The group of a config's word input: `input`, or `input.words` inside it."""
    return "input.words" if isinstance(at(config, "input.words.name"), str) else "input"


def with_words(config: Mapping, **settings) -> dict:
    """The config with changed settings of its word input, see `word_group`."""
    group = word_group(config)
    new = {**at(config, group), **settings}
    return {**config, "input": new if group == "input" else {**config["input"], "words": new}}


def at(config: Mapping, key: str) -> Any:
    """The group or value that a dotted key names in a config; `{}` if it is not stated."""
    for name in filter(None, key.split(".")):
        config = config[name] if isinstance(config, Mapping) and name in config else {}
    return config


def resolve(config: Mapping) -> dict:
    """The complete config as plain values: what `config` states, with tuples for lists, and the
    defaults of all other keys.

    Raises:
        InputError: an unknown key or name, with the closest known one; a value of another type; or
            a missing key without a default.
    """
    config = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(config, Mapping):
        raise InputError(f"a config must be a mapping of keys to values, got {_short(config)}")
    check_groups(config)
    return _resolved("", config)


def check_groups(config: Mapping) -> None:
    """Raises InputError for a group of a config that is a value."""
    for group in rows.GROUPS:
        if not isinstance(settings := at(config, group), Mapping):
            raise InputError(f"config.{group}={_short(settings)} must be a group of keys")


def _resolved(group, settings):
    """A group of a config with all of its keys, and the groups inside it."""
    path = f"config.{group}." if group else "config."
    name = settings.get("name", NAMES[group]) if group in NAMES else None
    if group in NAMES and not isinstance(name, str):
        raise InputError(f"{path}name={name!r} must be text, such as {NAMES[group]!r}")
    fields = keys_of(group, name)
    inner = {child.rpartition(".")[2]: child for child in inner_groups(group, name)}
    allowed = [*(["name"] if name else []), *fields, *inner]
    for key in settings.keys() - allowed:
        if settings[key] != {}:  # `rows.config` makes all groups, and empty ones state nothing
            check_known(f"{path}{key}", key, allowed)
    values = {key: _value(path + key, settings.get(key, f.default), f) for key, f in fields.items()}
    groups = {key: _resolved(child, settings.get(key, {})) for key, child in inner.items()}
    return ({"name": name} if name else {}) | values | groups


def _value(path, value, field):
    """Converts a value to the type of its key, and checks its range."""
    kind, default = field.kind, tuples(field.default)
    if value is inspect.Parameter.empty:
        raise InputError(f"{path} is missing, and it has no default")
    value = tuples(_literal(value) if isinstance(value, str) and kind is not str else value)
    if value is None and field.optional:
        return None
    if type(value) is kind and value == default:  # even where it has no one type or is infinite
        return default
    numbers = value if isinstance(value, tuple) else (value,)
    large = any(isinstance(n, int | float) and LARGEST < n < math.inf for n in numbers)
    if large and path != "config.seed":
        raise InputError(f"{path} must be at most {LARGEST:,}, got {_short(value)}")
    if kind is None:
        return value
    if kind is tuple:
        return _tuple(path, value, field)
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    finite = field.optional or not isinstance(value, float) or math.isfinite(value)
    number = is_integer or (isinstance(value, float) and not math.isnan(value) and finite)
    fits, expected = {
        bool: (isinstance(value, bool) or (is_integer and value in (0, 1)), "True or False"),
        int: (is_integer, "a whole number"),
        float: (number, "a number" if finite else "a finite number"),
        str: (isinstance(value, str), "text"),
    }[kind]
    if not fits:
        raise InputError(f"{path}={_short(value)} must be {expected}{_example(field)}")
    check_value(path, kind(value), field.option)
    return kind(value)


def _literal(text):
    """The value of a flag: a literal of Python, such as 5, 1e-3 or (10,20), or else text."""
    if text.lower() in CONSTANTS:
        return CONSTANTS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return text


def _tuple(path, value, field):
    """A tuple of items of one type: that of the annotation, or of the default's items; a tuple of
    such tuples if the annotation or the default is one.
    """
    default = field.default if isinstance(field.default, list | tuple) else ()
    nested = is_sequence(field.items) or any(isinstance(item, list | tuple) for item in default)
    items = value if isinstance(value, tuple) else (value,)
    rows, default_rows = (items, default) if nested else ([items], [default])
    item = item_of(field.items) if is_sequence(field.items) else field.items
    kinds = {item} if item in ITEMS else {type(item) for row in default_rows for item in row}
    kind = next((kind for kind in ITEMS if kinds and kinds <= ITEMS[kind][0]), None)
    if not all(isinstance(row, tuple) and _fits(row, kind) for row in rows):
        parts = "tuples of " if nested else ""
        expected = f"a tuple of {parts}{ITEMS[kind][1]}" if kind else "a tuple of tuples"
        raise InputError(f"{path}={_short(value)} must be {expected}{_example(field)}")
    rows = [tuple(map(kind, row) if kind else row) for row in rows]
    return tuple(rows) if nested else rows[0]


def _fits(row, kind):
    """True if the items of a tuple have a type of `ITEMS`; None accepts any."""
    return kind is None or all(
        type(item) in ITEMS[kind][0] and not (kind is float and not math.isfinite(item))
        for item in row
    )


def _example(field):
    """The end of a message about a value: the default, if there is one that helps."""
    return "" if field.default in ((), inspect.Parameter.empty) else f", such as {field.default!r}"


def _short(value):
    text = " ".join(repr(value).split())
    return text if len(text) < 90 else f"{text[:90]}…"


def switch(settings_of_file: Mapping, flags: Mapping[str, object]) -> tuple[dict, list[str]]:
    """The config of a file, changed by flags (values by dotted key); and a line for each class that
    a flag switches.

    A new class keeps what the file states for the keys that it has too. The full softmax, which has
    no bands, loses the cutoffs of its table.

    Raises:
        InputError: a name that does not exist, or a group that is a value.
    """
    check_groups(settings_of_file)
    config, lines = _copy(settings_of_file), []
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
    # Not deepcopy: two groups may be the same dict, and a flag must not change both.
    return {key: _copy(v) if isinstance(v, Mapping) else v for key, v in config.items()}


def allow(modules: Iterable[str]) -> None:
    """Lets the config of a workdir name classes of these modules, which are then imported, so that
    their code runs.
    """
    _allowed.update(modules)


def check_allowed(config: Mapping, file: object) -> None:
    """Checks that a config read from `file`, which anybody may have written, names only classes
    that this process may import, see `allow`.

    Raises:
        ExternalClassError: it names another class; the message says how to allow it.
    """
    for group, name in _external(config).items():
        if (module := name.partition(":")[0]) not in _allowed:
            raise ExternalClassError(
                f"{file} has {group}.name={name!r}, code that is not part of adaptive_jax: pass"
                f" --allow={module} to import and run it, if you trust it"
            )


def allow_flag(config: Mapping) -> str:
    """The flag, after a space, that a command needs to open a run of this config; "" for none."""
    modules = dict.fromkeys(name.partition(":")[0] for name in _external(config).values())
    return f" --allow={','.join(modules)}" if modules else ""


def _external(config):
    """The names of classes of other packages in a config, by group."""
    names = {group: str(at(config, f"{group}.name") or "") for group in NAMES}
    return {group: name for group, name in names.items() if ":" in name}


def complete(*changes: Mapping[str, object]) -> dict:
    """The complete config of settings by dotted key: `rows.config`, resolved."""
    return resolve(rows.config(*changes))
