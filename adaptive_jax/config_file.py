"""From `--config=FILE:ROW --config.KEY=VALUE` to a config: it runs the file, checks every key,
and sets the values of the flags.
"""

import ast
import contextlib
import inspect
import os
import re
import sys
import sysconfig
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict

from adaptive_jax.defaults import NAMED, check_keys, defaults_of, switch
from adaptive_jax.errors import InputError, check_known, one_line

CURE = "give --config=configs/NAME.py or configs/NAME.py:row"
HERE = Path(__file__).parent
LIBRARIES = "site-packages", "<", sysconfig.get_path("stdlib"), f"{HERE}/"
WORDS = {"true": True, "1": True, "false": False, "0": False}


class Given(NamedTuple):
    """A flag `--config.KEY=VALUE`; the value is None if the flag has none."""

    key: str
    value: str | None


def split(argv: Sequence[str]) -> tuple[list[str], list[Given]]:
    """Takes the flags `--config.KEY` out of a command line: the other arguments, and these flags in
    order.

    Both `--config.KEY=VALUE` and `--config.KEY VALUE` are read; a flag without a value is true, and
    `--noconfig.KEY` false.

    Raises:
        InputError: as absl has them after "--noconfig.KEY=VALUE".
    """
    rest, given, arguments = [], [], list(argv)
    while arguments:
        argument = arguments.pop(0)
        found = re.fullmatch(r"--?(no)?config\.([^=]+)(?:=(.*))?", argument, re.DOTALL)
        if argument == "--":
            return [*rest, argument, *arguments], given
        if not found:
            rest.append(argument)
            continue
        no, key, value = found.groups()
        if no:
            if value is not None:
                raise InputError(
                    f"{argument} has a value: write --config.{key}={value} or --noconfig.{key}"
                )
            value = "false"
        elif value is None and arguments and not arguments[0].startswith("--"):
            value = arguments.pop(0)
        given.append(Given(key, value))
    return rest, given


def read(place: str, given: Sequence[Given] = ()) -> tuple[dict, list[str]]:
    """The config of `FILE` or `FILE:ROW` with the values of the flags; and a line for each class
    that a flag switches.

    Raises:
        InputError: with the file, and the line where that is known: the file is missing or raises
            an error, has no such row, or gives no complete config; or a flag is wrong.
    """
    path, row = _place(place)
    config = _run(os.path.expanduser(path), row)
    return set_values(config, given)


def set_values(config: Mapping, given: Sequence[Given]) -> tuple[dict, list[str]]:
    """The config with the values of flags, names first; and a line for each class that a flag
    switches.

    Raises:
        InputError: an unknown key or name, a value of another type, or a tuple that is given twice.
    """
    config, said = check_keys(config), []
    names = {
        key.removesuffix(".name"): value
        for key, value in given
        if key.removesuffix(".name") in NAMED and key[-5:] == ".name"
    }
    for group in NAMED:  # outer groups before inner ones
        if group in names and (line := switch(config, group, names.pop(group))):
            said.append(line)
    seen = set()
    for key, text in given:
        group, default = config, defaults_of(config)
        *outer, last = key.split(".")
        for depth, name in enumerate(outer):
            check_known(f"config.{'.'.join(outer[: depth + 1])}", name, default)
            group, default = group[name], default[name]
            if not isinstance(default, dict):
                raise InputError(
                    f"--config.{key}: config.{'.'.join(outer[: depth + 1])} is no group, but"
                    f" {group!r}"
                )
        check_known(f"config.{key}", last, default)
        if isinstance(default[last], tuple) and key in seen:
            raise InputError(
                f"--config.{key} is given twice: give it once, such as --config.{key}=10,20"
            )
        seen.add(key)
        group[last] = _value(key, text, default[last])
    return check_keys(config), said


def published(place: str) -> dict | None:
    """What a paper prints of `FILE:ROW`: `validation`, `test` (perplexities, or None), `table` and
    `row`.

    As in configs/, a file has a dict `ROWS` whose rows have a `paper` with `valid`, `test` and
    `table`, and `get_config` has a default row. None where the file or the row has no such numbers.
    """
    path, row = _place(place)
    module = _module(os.path.expanduser(path))
    with contextlib.suppress(
        AttributeError, KeyError, IndexError, TypeError
    ):  # a file of the user's own need have none of it
        row = row or inspect.signature(module.get_config).parameters["row"].default
        paper = module.ROWS[row].paper
        if paper.valid is not None or paper.test is not None:
            return {
                "validation": paper.valid,
                "test": paper.test,
                "table": paper.table,
                "row": f"{Path(path).name}:{row}",
            }
    return None


def _place(place):
    """The file and the row, or None, of `FILE` or `FILE:ROW`."""
    return (place, None) if place.endswith(".py") or ":" not in place else place.rsplit(":", 1)


def _value(key, text, default):
    """The text as a value of the default's type; a text that is none stays text, which
    `check_keys` refuses.
    """
    if isinstance(default, dict):
        raise InputError(
            f"--config.{key} is a group: give --config.{key}.KEY=VALUE, KEY one of"
            f" {', '.join(default)}"
        )
    if text is None:
        if not isinstance(default, bool):
            raise InputError(f"--config.{key} has no value: write --config.{key}=VALUE")
        return True
    if isinstance(default, bool):
        return WORDS.get(text.lower(), text)
    if isinstance(default, str):
        return text
    if text.lower() == "none":
        return None
    try:
        if not isinstance(default, tuple):
            return (float if default is None else type(default))(text)
        value = ast.literal_eval(text)
        return value if isinstance(value, tuple | list) else (value,)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def _module(path):
    """The module that a file is."""
    source = _source(path)
    module = types.ModuleType("config_file")
    module.__file__ = path
    with _importing(Path(path).resolve().parent):
        try:
            exec(compile(source, path, "exec"), module.__dict__)
        except (Exception, SystemExit) as error:
            raise InputError(_told(path, error)) from error
    return module


def _run(path, row):
    """The checked config that a file's `get_config` returns."""
    module = _module(path)
    with _importing(Path(path).resolve().parent):
        get_config = getattr(module, "get_config", None)
        if not callable(get_config):
            raise InputError(
                f"{path} has no function get_config(): it must return the config, see"
                " configs/quickstart.py"
            )
        _check_row(path, row, get_config)
        try:
            config = get_config() if row is None else get_config(row)
            config = config.to_dict() if isinstance(config, ConfigDict) else config
        except (Exception, SystemExit) as error:
            raise InputError(_told(path, error)) from error
    code = getattr(get_config, "__code__", None)
    where = f"{path}, line {code.co_firstlineno}" if code else path
    if not isinstance(config, Mapping):
        raise InputError(
            f"{where}: get_config returns {_short(config)}, no config: return"
            " configs.base.config(...)"
        )
    try:
        return check_keys(config)
    except InputError as error:
        raise InputError(
            f"{where}: get_config returns no config that is complete and right: {error}"
        ) from None


def _source(path):
    if not path:
        raise InputError(f"--config is empty: {CURE}")
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise InputError(f"--config={path}: there is no such file; {CURE}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else one_line(error)
        raise InputError(f"--config={path} cannot be read: {reason}; {CURE}") from None


def _check_row(path, row, get_config):
    try:
        parameters = inspect.signature(get_config).parameters.values()
    except (TypeError, ValueError):
        return
    takes = [
        p
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)
    ]
    if row is not None and not takes:
        raise InputError(f"--config={path}:{row}: {path} has no rows; give --config={path}")
    if row is None and any(p.default is p.empty and p.kind != p.VAR_POSITIONAL for p in takes):
        raise InputError(
            f"--config={path} names no row, and get_config needs one; give --config={path}:ROW"
        )


@contextlib.contextmanager
def _importing(directory: Path) -> Iterator[None]:
    """While a file of `directory` runs, it can import its neighbours, and `configs` from beside
    this package.
    """
    before = list(sys.path)
    sys.path[:] = [str(directory), *before, str(HERE.parent)]
    try:
        yield
    finally:
        sys.path[:] = before


def _told(path, error):
    """One line for an error in a file, with the number of the line."""
    if isinstance(error, SyntaxError) and error.lineno:
        return f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not any(part in frame.filename for part in LIBRARIES)]
    if isinstance(error, InputError):
        shared = own and Path(own[-1].filename) == HERE.parent / "configs" / "base.py"
        return (
            str(error)
            if shared and path in str(error)
            else f"{path if shared or not own else _at(own[-1])}: {error}"
        )
    return f"{_at(own[-1]) if own else path}: {type(error).__name__}: {one_line(error)}"


def _at(frame):
    return f"{frame.filename}, line {frame.lineno}"


def _short(value):
    text = " ".join(repr(value).split())
    return text if len(text) < 60 else f"{text[:60]}…"
