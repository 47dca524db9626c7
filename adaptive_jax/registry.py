"""Objects from config groups: a group's `name` picks a class or function, its other keys are
that one's arguments.
"""

import inspect
from collections.abc import Callable, Mapping

from adaptive_jax.errors import InputError, check_known

INTERNAL = (
    "parent",
    "name",
    "gather",
)  # fields that flax and parallel/sharding.py fill in, never a config


def make(group: str, registry: Mapping[str, Callable], settings: Mapping, **given):
    """Calls the entry of `registry` that `settings["name"]` names with the other settings and with
    `given`.

    group: the group's name in the config, for messages. Lists become tuples: JSON knows lists only,
    and flax modules must be hashable.

    Raises:
        InputError: a name or key that does not exist, or a key that is missing.
    """
    settings = {key: _tuples(value) for key, value in settings.items()}
    if "name" not in settings:
        raise InputError(f"config.{group}.name is missing: choose {', '.join(registry)}")
    name = settings.pop("name")
    check_known(f"config.{group}.name={name!r}", name, registry)
    parameters = inspect.signature(registry[name]).parameters
    fields = {
        key: p.default is p.empty for key, p in parameters.items() if key not in (*INTERNAL, *given)
    }
    for key in settings:
        check_known(f"config.{group}.{key}, for {name!r},", key, fields)
    for key, required in fields.items():
        if required and key not in settings:
            raise InputError(f"config.{group}.{key} is missing, and {name!r} has no default for it")
    return registry[name](**given, **settings)


def _tuples(value):
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
