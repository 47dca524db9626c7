"""The flags `--config=FILE:row` and `--config.KEY=VALUE` of a command.

`ml_collections.config_flags` reads the file and the values; `config` completes and checks them. A
flag's value is a literal of Python, such as 5, 1e-3, True or (10,20), and otherwise text; a number
for a key that is text in the row is what was typed.
"""

import inspect
import os
import re
import runpy
import sys
import sysconfig
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from adaptive_jax.config import keys, rows
from adaptive_jax.errors import InputError, check_known, of_extra, one_line

with of_extra("train"):
    from absl import flags
    from ml_collections import ConfigDict, config_flags

CURE = "pass --config=configs/NAME.py or configs/NAME.py:row"
PACKAGE = Path(__file__).parents[1]
LIBRARIES = "site-packages", "<", sysconfig.get_path("stdlib"), f"{PACKAGE}/"
_files: dict[str, "_File"] = {}  # by the value of --config
_typed: dict[str, str] = {}  # by key, the text of the last flag --config.KEY=VALUE
_argv: list[str] = []  # the command line in the order that ml_collections asks for, see `parse`


class _File(NamedTuple):
    """A config file's row: stated values, and the result of `published`."""

    stated: dict
    published: dict | None


def define(what: str = "Config file, with :row where it has rows") -> None:
    """Defines the flag --config, and --config.KEY=VALUE for every key; see `config`."""
    config_flags.DEFINE_config_file(
        "config",
        None,
        f"{what}. --config.KEY=VALUE changes a key, --config.GROUP.KEY=VALUE one of a group:"
        f" {', '.join(rows.GROUPS)}. docs/configuration.md has all keys, and so has train"
        " --explain.",
        flag_values=flags.FLAGS,
        sys_argv=_argv,
        lock_config=False,
        accept_new_attributes=True,
    )
    flags.declare_key_flag("config", flag_values=flags.FLAGS)


def parse(argv: Sequence[str]) -> list[str]:
    """Parses a command line, and returns the arguments that are not flags.

    Raises:
        InputError: the config file is missing or raises an error (the message has the number of the
            line); or the group of a flag --config.KEY does not exist.
        flags.Error: another flag is wrong.
    """
    pattern = re.compile(r"--?(?:no)?config\.([^=]*)(?:=(.*))?", re.DOTALL)
    pairs = [match.groups() for argument in argv if (match := pattern.fullmatch(argument))]
    changed = [key for key, _ in pairs]
    _typed.clear()
    _typed.update((key, text) for key, text in pairs if text is not None)
    for key in changed:
        _check_group(key)
    place, others = _without_config(argv[1:])
    if place is not None:
        place = os.path.expanduser(place)  # as shells do not after "--config="
        _files[place] = _read(place)
    elif changed:
        raise InputError(f"--config.{changed[0]} changes a config, and --config is missing: {CURE}")
    # Once and first: ml_collections defines the flags --config.KEY when it reads --config.
    _argv[:] = [argv[0], *([] if place is None else [f"--config={place}"]), *others]
    try:
        return flags.FLAGS(_argv)
    except (KeyError, AttributeError, TypeError) as error:
        raise InputError(
            f"--config={place} lacks a group ({one_line(error)}): let get_config return"
            " adaptive_jax.config.rows.config(...)"
        ) from error


def config() -> tuple[dict, list[str]]:
    """The config that --config and the flags --config.KEY describe, see `keys.resolve`, and lines
    that say which classes the flags switched.

    Raises:
        InputError: no --config; or an unknown key, name or value, of the file or of a flag.
    """
    if flags.FLAGS["config"].value is None:
        raise InputError(f"--config is missing: {CURE}")
    place, _, changes = _parsed()
    changed, said = keys.switch(_files[place].stated, changes)
    return keys.resolve(changed), said


def published() -> tuple[dict | None, list[str]]:
    """Published numbers of the row that --config names: `validation`, `test` (perplexities, or
    None), `table` and `row`; None where the file has no dict `ROWS`, or the row no such numbers.
    And the keys that flags changed.
    """
    (place, row, changes), now = _parsed(), config()[0]
    changed = [key for key in changes if keys.at(row, key) != keys.at(now, key)]
    return _files[place].published, changed


def _parsed():
    """The value of --config, the config of its row, and the values of the flags --config.KEY."""
    flag = flags.FLAGS["config"]
    place, changes = config_flags.get_config_filename(flag), config_flags.get_override_values(flag)
    row = _resolved(place, _files[place].stated)
    for key, value in changes.items():
        # A directory called 2007_01 is not the number 200701.
        number = isinstance(value, int | float | tuple) and not isinstance(value, bool)
        if number and isinstance(keys.at(row, key), str):
            changes[key] = _typed[key]
    return place, row, changes


def _check_group(key):
    """Raises InputError for a flag --config.KEY that ml_collections cannot read."""
    *outer, _ = key.split(".")
    if key in rows.GROUPS:
        raise InputError(f"--config.{key} is a group: pass --config.{key}.KEY=VALUE")
    if outer:
        check_known(f"config.{'.'.join(outer)} of --config.{key}", ".".join(outer), rows.GROUPS)
    if not all(part.isidentifier() for part in key.split(".")):
        raise InputError(f"--config.{key} is not a key: pass --config.KEY=VALUE")


def _without_config(arguments):
    """The last value of --config, None without one, and the other arguments."""
    place, others, rest = None, [], iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if name not in ("--config", "-config"):
            others.append(argument)
        elif (place := value if equals else next(rest, None)) is None:
            raise InputError(f"--config has no value: {CURE}")
        if argument == "--":
            break
    return place, [*others, *rest]


def _read(place):
    """Reads a config file for its row."""
    path, colon, row = place.partition(":")
    if not path:
        raise InputError(f"--config is empty: {CURE}")
    try:
        open(path, "rb").close()
    except FileNotFoundError:
        raise InputError(f"--config={place}: there is no such file as {path}; {CURE}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else one_line(error)
        raise InputError(f"--config={place} cannot be read: {reason}; {CURE}") from None
    for directory in str(Path(path).resolve().parent), str(PACKAGE.parent):
        if directory not in sys.path:  # a config may import its neighbours, and `configs`
            sys.path.append(directory)
    try:
        module = runpy.run_path(path)
        get_config = module.get("get_config")
        stated = get_config(*([row] if colon else [])) if callable(get_config) else None
    except (Exception, SystemExit) as error:
        raise InputError(_file_error(path, error)) from error
    if not isinstance(stated, Mapping | ConfigDict):
        raise InputError(
            f"{path} must have a function get_config that returns rows.config(...), see"
            f" configs/quickstart.py; got {stated!r:.60}"
        )
    stated = stated.to_dict() if isinstance(stated, ConfigDict) else dict(stated)
    default = next(iter(inspect.signature(get_config).parameters.values()), None)
    row = row or getattr(default, "default", None)
    return _File(stated, _published(module, f"{Path(path).name}:{row}", row))


def _published(module, name, row):
    table = module.get("ROWS")
    paper = getattr(table.get(row) if isinstance(table, Mapping) else None, "paper", None)
    if not isinstance(paper, rows.Paper) or paper.valid is paper.test is None:
        return None
    return {"validation": paper.valid, "test": paper.test, "table": paper.table, "row": name}


def _resolved(place, stated):
    try:
        return keys.resolve(stated)
    except InputError as error:
        raise InputError(f"{place}: {error}") from None


def _file_error(path, error):
    """One line for an error in a file, with the number of the line."""
    if isinstance(error, SyntaxError) and error.lineno:
        return f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not any(part in frame.filename for part in LIBRARIES)]
    if isinstance(error, InputError) and path in str(error):
        return str(error)
    where = f"{own[-1].filename}, line {own[-1].lineno}" if own else path
    return f"{where}: {type(error).__name__}: {one_line(error)}"
