"""The flags `--config=FILE:row` and `--config.KEY=VALUE` of a command.

`ml_collections.config_flags` reads the file and the values; `config` completes and checks them. A
flag's value is a literal of Python, such as 5, 1e-3, True or (10,20), and otherwise text.
"""

import inspect
import re
import runpy
import sys
import sysconfig
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from absl import flags

from adaptive_jax.config import keys, rows
from adaptive_jax.errors import InputError, check_known, of_extra_train, one_line

with of_extra_train():
    from ml_collections import ConfigDict, config_flags

CURE = "give --config=configs/NAME.py or configs/NAME.py:row"
PACKAGE = Path(__file__).parents[1]
LIBRARIES = "site-packages", "<", sysconfig.get_path("stdlib"), f"{PACKAGE}/"
_stated: dict = {}  # by `FILE:row` as the flag has it, what that file states


def define(what: str = "Config file, with :row where it has rows") -> None:
    """Defines the flag --config, and --config.KEY=VALUE for every key; `config` has their
    result.
    """
    config_flags.DEFINE_config_file(
        "config",
        None,
        f"{what}. --config.KEY=VALUE changes a key, --config.GROUP.KEY=VALUE one of a group:"
        f" {', '.join(rows.GROUPS)}. docs/configuration.md has all keys, and so has train"
        " --explain.",
        flag_values=flags.FLAGS,
        lock_config=False,
        accept_new_attributes=True,
    )
    flags.declare_key_flag("config", flag_values=flags.FLAGS)


def parse(argv: Sequence[str]) -> list[str]:
    """Parses a command line of flags; the arguments that are none.

    Raises:
        InputError: the config file is missing or raises an error, which is told with the number of
            its line; or a flag --config.KEY is of no group.
        flags.Error: another flag is wrong.
    """
    changes = [re.fullmatch(r"--?(?:no)?config\.([^=]*)(=.*)?", arg, re.DOTALL) for arg in argv]
    for found in filter(None, changes):
        _check_group(found[1])
    place = _place(argv)
    if place is not None:
        _stated[place] = _read(place)
    elif any(changes):
        key = next(found[1] for found in changes if found)
        raise InputError(f"--config.{key} changes a config, and --config is missing: {CURE}")
    try:
        # The last --config counts; ml_collections would define the other flags anew for each.
        given = [arg for arg in argv if arg.startswith(("--config=", "-config="))]
        others = [arg for arg in argv[1:] if arg not in given]
        return flags.FLAGS([argv[0], *given[-1:], *others])
    except ValueError as error:  # of a flag --noconfig.KEY with a value
        raise InputError(one_line(error)) from error
    except (KeyError, AttributeError, TypeError) as error:
        raise InputError(
            f"--config={place} has not all groups ({one_line(error)}): let get_config return"
            " adaptive_jax.config.rows.config(...)"
        ) from error


def config() -> tuple[dict, list[str]]:
    """The config that --config and the flags --config.KEY describe, see `keys.resolve`, and lines
    that say which classes the flags switched.

    Raises:
        InputError: no --config; or an unknown key, name or value, of the file or of a flag.
    """
    place = flags.FLAGS["config"].value and config_flags.get_config_filename(flags.FLAGS["config"])
    if not place:
        raise InputError(f"--config is missing: {CURE}")
    stated = _stated[place]
    _resolved(place, stated)
    changed, said = keys.switch(stated, config_flags.get_override_values(flags.FLAGS["config"]))
    return keys.resolve(changed), said


def read(place: str) -> dict:
    """The whole config of `FILE` or `FILE:row`. Raises InputError as `parse` and `config` do."""
    return _resolved(place, _read(place))


def published() -> tuple[dict | None, list[str]]:
    """What a paper prints of the row that --config names, see `published_of`, and the keys that
    flags changed.
    """
    flag = flags.FLAGS["config"]
    changed = config_flags.get_override_values(flag)
    return published_of(config_flags.get_config_filename(flag)), list(changed)


def published_of(place: str) -> dict | None:
    """What a paper prints of `FILE:row`: `validation`, `test` (perplexities, or None), `table` and
    `row`; None where the file has no dict `ROWS`, or the row no such numbers.
    """
    path, _, row = place.partition(":")
    module = runpy.run_path(path)
    default = next(iter(inspect.signature(module["get_config"]).parameters.values()), None)
    row = row or getattr(default, "default", None)
    paper = getattr(module.get("ROWS", {}).get(row), "paper", None)
    if paper is None or (paper.valid is None and paper.test is None):
        return None
    numbers = {"validation": paper.valid, "test": paper.test, "table": paper.table}
    return {**numbers, "row": f"{Path(path).name}:{row}"}


def _check_group(key):
    """Refuses a flag --config.KEY that ml_collections could not read."""
    *outer, _ = key.split(".")
    groups = [*rows.GROUPS, "choose"]
    if key in groups:
        raise InputError(f"--config.{key} is a group: give --config.{key}.KEY=VALUE")
    if outer:
        check_known(f"config.{'.'.join(outer)} of --config.{key}", ".".join(outer), groups)
    if not all(part.isidentifier() for part in key.split(".")):
        raise InputError(f"--config.{key} is no key: give --config.KEY=VALUE")


def _place(argv):
    """The value of --config; None without one."""
    place = None
    for number, argument in enumerate(argv):
        if argument == "--":
            break
        if argument in ("--config", "-config") and number + 1 < len(argv):
            place = argv[number + 1]
        elif argument.startswith(("--config=", "-config=")):
            place = argument.partition("=")[2]
    return place


def _read(place):
    """What a file states, as plain values."""
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
        get_config = runpy.run_path(path).get("get_config")
        stated = get_config(*([row] if colon else [])) if callable(get_config) else get_config
    except (Exception, SystemExit) as error:
        raise InputError(_told(path, error)) from error
    if get_config is None or not isinstance(stated, Mapping | ConfigDict):
        raise InputError(
            f"{path} must have a function get_config that returns rows.config(...), see"
            f" configs/quickstart.py; got {stated!r:.60}"
        )
    return stated.to_dict() if isinstance(stated, ConfigDict) else dict(stated)


def _resolved(place, stated):
    try:
        return keys.resolve(stated)
    except InputError as error:
        raise InputError(f"{place}: {error}") from None


def _told(path, error):
    """One line for an error in a file, with the number of the line."""
    if isinstance(error, SyntaxError) and error.lineno:
        return f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not any(part in frame.filename for part in LIBRARIES)]
    if isinstance(error, InputError) and path in str(error):
        return str(error)
    where = f"{own[-1].filename}, line {own[-1].lineno}" if own else path
    return f"{where}: {type(error).__name__}: {one_line(error)}"
