"""The flags of a command: one for each field of its option classes, `--config=FILE:row` and
`--config.KEY=VALUE`.

`parse` reads the last two from a command line and leaves the other flags to absl; `keys.resolve`
converts the text of a key to its type.
"""

import inspect
import os
import re
import runpy
import sys
import sysconfig
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from adaptive_jax.config import keys, rows
from adaptive_jax.config.options import Field, check, fields_of, meaning
from adaptive_jax.errors import InputError, check_known, of_extra, one_line

with of_extra("train"):
    from absl import flags
    from ml_collections import ConfigDict

flags.disclaim_key_flags()  # flags belong to the command that calls this module

DEFINE = {
    bool: flags.DEFINE_bool,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    str: flags.DEFINE_string,
}
NUMBERS = {
    int: "whole numbers, such as 10 or 10,100",
    float: "numbers, such as 0.5 or 0.25,0.5",
}
CURE = "pass --config=configs/NAME.py or configs/NAME.py:row"
PACKAGE = Path(__file__).parents[1]
LIBRARIES = "site-packages", "<", sysconfig.get_path("stdlib"), f"{PACKAGE}/"
OVERRIDE = re.compile(r"--?(?:(no)?config\.([^=]*)|config\.([^=]*)=(.*))", re.DOTALL)
_files: list["_File"] = []  # the file that the last command line named, if any
_overrides: dict[str, object] = {}  # its flags --config.KEY by key: text, or True or False


class _File(NamedTuple):
    """A row of a config file: the value of --config, the row's settings and published numbers."""

    place: str
    stated: dict
    published: dict | None


def define_options(*kinds: Callable, without: Collection[str] = ()) -> None:
    """Defines a flag for each field of the classes, with the field's default and meaning."""
    for kind in kinds:
        for name, field in fields_of(kind).items():
            if name not in without:
                define_option(name, field, meaning(kind, name))


def define_option(name: str, field: Field, text: str) -> None:
    """Defines a flag for a field: a number, text, a boolean, or a list of numbers or texts."""
    if field.option.among:
        flags.DEFINE_enum(name, field.default, list(field.option.among), text)
    elif field.kind is tuple:
        flags.DEFINE_list(name, field.default and list(map(str, field.default)), text)
    else:
        DEFINE[field.kind](name, field.default, text)


def options(kind: Callable, without: Collection[str] = ()) -> Any:
    """Makes an object of the class from the values of its flags, see `define_options`.

    Raises:
        InputError: a value out of range, or as `option_value`.
    """
    fields = fields_of(kind).items()
    values = {name: option_value(name, field) for name, field in fields if name not in without}
    check(options := kind(**values), [name for name in values if flags.FLAGS[name].present])
    return options


def option_value(name: str, field: Field) -> Any:
    """The value of a flag of `define_option`.

    Raises:
        InputError: a list of numbers that is empty, or has an item that is no number.
    """
    flag = flags.FLAGS[name]
    if field.kind is not tuple or flag.value is None:
        return flag.value
    if field.items is str or not (flag.value or flag.default):
        return tuple(flag.value)
    try:
        if flag.value:
            return tuple(map(field.items, flag.value))
    except ValueError:
        pass
    raise InputError(f"--{name} must be {NUMBERS[field.items]}, got {','.join(flag.value)}")


def define(help_text: str = "Config file, with :row where it has rows") -> None:
    """Defines the flag --config, and --config.KEY=VALUE for every key; see `config`."""
    flags.DEFINE_string(
        "config",
        None,
        f"{help_text}. --config.KEY=VALUE changes a key, --config.GROUP.KEY=VALUE one of a group:"
        f" {', '.join(rows.GROUPS)}. docs/configuration.md has all keys, and so has train"
        " --explain.",
        flag_values=flags.FLAGS,
    )


def parse(argv: Sequence[str]) -> list[str]:
    """Parses a command line, and returns the arguments that are not flags.

    Raises:
        InputError: the config file is missing or raises an error, with the line number in the
            message; or the group of a flag --config.KEY does not exist.
        flags.Error: another flag is wrong.
    """
    place, rest, arguments = None, [], iter(argv)
    _files.clear()
    _overrides.clear()
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if match := OVERRIDE.fullmatch(argument):
            off, switch, key, text = match.groups()
            key = switch if key is None else key
            _check_group(key)
            _overrides[key] = not off if text is None else text
        elif name in ("--config", "-config"):
            place = value if equals else next(arguments, None)
            if place is None:
                raise InputError(f"--config has no value: {CURE}")
        else:
            rest.append(argument)
        if argument == "--":
            break
    if place is not None:
        _files.append(_read(os.path.expanduser(place)))  # shells do not after "--config="
    return flags.FLAGS([*rest, *arguments])


def has_config() -> bool:
    """True if the command line has --config or a flag --config.KEY."""
    return bool(_files or _overrides)


def config(default: Callable[[], dict] | None = None) -> tuple[dict, list[str]]:
    """The config of --config and the flags --config.KEY, see `keys.resolve`, and a line for each
    class that a flag switches.

    default: returns the config that flags change if there is no --config.

    Raises:
        InputError: no --config; or an unknown key, name or value, in the file or a flag.
    """
    if not _files and default:
        _files.append(_File("the config of the run", default(), None))
    if not _files:
        key = next(iter(_overrides), None)
        change = f"--config.{key} changes a config, and " if key else ""
        raise InputError(f"{change}--config is missing: {CURE}")
    try:
        changed, lines = keys.switch(_files[0].stated, _overrides)
        return keys.resolve(changed), lines
    except InputError:
        _resolved(_files[0])  # an error of the file itself names the file
        raise


def published(config: Mapping) -> tuple[dict | None, list[str]]:
    """Published numbers of the row that --config names: `validation`, `test` (perplexities, or
    None), `table` and `row`; and the keys that flags changed. None and no keys if the file has no
    dict `ROWS`, or the row has no published perplexity.

    config: the result of `config`.
    """
    if (paper := _files[0].published) is None:
        return None, []
    row = _resolved(_files[0])
    return paper, [key for key in _overrides if keys.at(row, key) != keys.at(config, key)]


def _check_group(key):
    """Raises InputError for a flag --config.KEY without a group or key."""
    *outer, _ = key.split(".")
    if key in rows.GROUPS:
        raise InputError(f"--config.{key} is a group: pass --config.{key}.KEY=VALUE")
    if outer:
        check_known(f"config.{'.'.join(outer)} of --config.{key}", ".".join(outer), rows.GROUPS)
    if not all(part.isidentifier() for part in key.split(".")):
        raise InputError(f"--config.{key} is not a key: pass --config.KEY=VALUE")


def _read(place):
    """Runs a config file, and reads its row."""
    path, colon, row = place.partition(":")
    if not path:
        raise InputError(f"--config is empty: {CURE}")
    try:
        open(path, "rb").close()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else one_line(error)
        raise InputError(f"--config={place} cannot be read: {reason}; {CURE}") from None
    for directory in str(Path(path).resolve().parent), str(PACKAGE.parent):
        if directory not in sys.path:  # a config may import its neighbours, and `configs`
            sys.path.append(directory)
    try:
        module = runpy.run_path(path)
        get_config = module.get("get_config")
        settings = get_config(*([row] if colon else [])) if callable(get_config) else None
    except (Exception, SystemExit) as error:
        raise InputError(_file_error(path, error)) from error
    if not isinstance(settings, Mapping | ConfigDict):
        raise InputError(
            f"{path} must have a function get_config that returns rows.config(...), see"
            f" configs/quickstart.py; got {settings!r:.60}"
        )
    settings = settings.to_dict() if isinstance(settings, ConfigDict) else dict(settings)
    default = next(iter(inspect.signature(get_config).parameters.values()), None)
    row = row or getattr(default, "default", None)
    return _File(place, settings, _published(module, f"{Path(path).name}:{row}", row))


def _published(module, name, row):
    table = module.get("ROWS")
    paper = getattr(table.get(row) if isinstance(table, Mapping) else None, "paper", None)
    if not isinstance(paper, rows.Paper) or paper.valid is paper.test is None:
        return None
    return {"validation": paper.valid, "test": paper.test, "table": paper.table, "row": name}


def _resolved(file):
    try:
        return keys.resolve(file.stated)
    except InputError as error:
        raise InputError(f"{file.place}: {error}") from None


def _file_error(path, error):
    """A one-line message for an error in a config file, with the line number."""
    if isinstance(error, SyntaxError) and error.lineno:
        return f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [
        frame for frame in frames if not any(part in frame.filename for part in LIBRARIES)
    ]
    if isinstance(error, InputError) and path in str(error):
        return str(error)
    place = f"{user_frames[-1].filename}, line {user_frames[-1].lineno}" if user_frames else path
    return f"{place}: {type(error).__name__}: {one_line(error)}"
