"""Objects from groups of a config: the key `name` chooses a class or a function, and the other keys
are its arguments.
"""

import importlib
import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any

from adaptive_jax.errors import InputError, check_known, one_line


class ExternalClassError(InputError):
    """A config names code of another package, which cannot or may not be imported."""


def find(group: str, classes: Mapping[str, Callable], name: str) -> Callable:
    """The class or function that `name` chooses: a key of `classes`, or "package.module:Class" of
    another package, which is imported.

    group: the group's name in the config, for messages.

    Raises:
        InputError: no such name, or the name of something else.
        ExternalClassError: no such module or class.
    """
    setting = f"config.{group}.name={name!r}"
    module, colon, inner = str(name).partition(":")
    if not colon:
        check_known(setting, name, classes)
        return classes[name]
    try:
        kind = operator.attrgetter(inner)(importlib.import_module(module))
    except Exception as error:
        cure = "put the directory of its package on PYTHONPATH"
        cure = f": {cure}" if isinstance(error, ModuleNotFoundError) else ""
        raise ExternalClassError(
            f"{setting} cannot be imported ({type(error).__name__}: {one_line(error)}){cure}"
        ) from None
    if not callable(kind):
        raise InputError(f"{setting} is {kind!r}: name a class, or a function that makes an object")
    return kind


def make(group: str, classes: Mapping[str, Callable], settings: Mapping, **arguments):
    """Makes an object of the class that `settings["name"]` chooses, see `find`, from the other
    settings of the group and those of `arguments` that the class takes.

    Lists become tuples, because JSON has only lists and flax modules must be hashable.

    Raises:
        InputError: a name that does not exist, or an InputError of the class, prefixed by the
            group's name.
    """
    settings = {key: tuples(value) for key, value in settings.items()}
    maker = find(group, classes, settings.pop("name"))
    parameters = inspect.signature(maker).parameters
    settings |= {key: value for key, value in arguments.items() if key in parameters}
    try:
        return maker(**settings)
    except InputError as error:  # a layer names its field, and not the group
        if "config." in str(error):
            raise
        raise InputError(f"config.{group}: {error}") from error


def tuples(value: Any) -> Any:
    """A value with tuples in place of lists, nested ones too."""
    return tuple(map(tuples, value)) if isinstance(value, list | tuple) else value
