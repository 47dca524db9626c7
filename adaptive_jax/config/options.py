"""Fields: arguments of a class or function that are keys of a config or flags of a command.

class Toy(NamedTuple):
    '''A toy.

    Attributes:
        power: of the probabilities.
    '''
    power: Annotated[float, Option(within="(0, inf)")] = 1.0

fields_of(Toy)["power"].default     # 1.0
check(Toy(power=0.0))               # InputError: --power must be in (0, inf), got 0.0
"""

import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from adaptive_jax.errors import InputError, check_known, is_within


class Option(NamedTuple):
    """Range of a field, as in `Annotated[int, Option(within="[1, inf)")]`. The field's help is its
    paragraph in the docstring of the class.

    Attributes:
        within: interval of the value, such as "[0, 1)"; of each value of a tuple, which must not be
            empty.
        among: the possible values.
        only: (field, value): the option has a meaning only if that field has that value.
    """

    within: str = ""
    among: Collection[str] = ()
    only: tuple[str, str] | None = None


PositiveInt = Annotated[int, Option(within="[1, inf)")]
NonNegativeInt = Annotated[int, Option(within="[0, inf)")]
PositiveFloat = Annotated[float, Option(within="(0, inf)")]
NonNegativeFloat = Annotated[float, Option(within="[0, inf)")]
Share = Annotated[float, Option(within="[0, 1)")]


class Field(NamedTuple):
    """An argument of a class or function.

    Attributes:
        default: its default; `inspect.Parameter.empty` if it has none.
        kind: the type of its values: bool, int, float, str or tuple; None: any, or several.
        optional: whether it may be None.
        items: the annotated type of the items of a tuple, as int of `tuple[int, ...]`; None if
            there is none, or if they differ.
        option: its range.
    """

    default: object
    kind: type | None
    optional: bool
    items: Any = None
    option: Option = Option()


def parameters_of(function: Callable) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function or class, with annotations evaluated if possible."""
    try:
        return inspect.signature(function, eval_str=True).parameters
    except NameError:  # an annotation in quotes whose name only type checkers import
        return inspect.signature(function).parameters


@functools.cache
def fields_of(function: Callable) -> Mapping[str, Field]:
    """The arguments of a class or function that have no default or one that JSON can store."""
    plain = bool | int | float | str | tuple | list | None
    return {
        name: field_of(parameter)
        for name, parameter in parameters_of(function).items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and (parameter.default is parameter.empty or isinstance(parameter.default, plain))
    }


def field_of(parameter: inspect.Parameter) -> Field:
    """A parameter's default, type and range."""
    default, hint, option = parameter.default, parameter.annotation, Option()
    if typing.get_origin(hint) is Annotated:
        option = next((m for m in hint.__metadata__ if isinstance(m, Option)), option)
        hint = hint.__origin__
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    hints = typing.get_args(hint) if union else (hint,)
    optional = default is None or types.NoneType in hints
    hinted = [tuple if is_sequence(hint) else hint for hint in hints]
    kinds = [kind for kind in (tuple, str, float, int, bool) if kind in hinted]
    if default is not None and default is not parameter.empty:
        kinds.insert(0, tuple if isinstance(default, list) else type(default))
    kind = next(iter(kinds), None)
    if len({kind if kind in (tuple, str) else float for kind in kinds}) > 1:
        kind = None
    elif kind is int and float in kinds and bool not in kinds:  # ArrayLike of JAX has all three
        kind = float
    items = next((item_of(hint) for hint in hints if is_sequence(hint)), None)
    return Field(default, kind, optional, items, option)


def is_sequence(hint: Any) -> bool:
    """True for the type of a tuple or a list, such as `tuple[int, ...]`."""
    return (typing.get_origin(hint) or hint) in (tuple, list, Sequence)


def item_of(hint: Any) -> Any:
    """The type of the items of a tuple's type; None if they have several, or any."""
    items = {item for item in typing.get_args(hint) if item is not Ellipsis}
    return items.pop() if len(items) == 1 else None


def meaning(kind: Callable, name: str) -> str:
    """The paragraph about an argument in a docstring, in one line."""
    paragraph = rf"^( *)(?:\w+, )*{name}(?:, \w+)*: (.*(?:\n\1 +.*)*)"
    match = re.search(paragraph, inspect.getdoc(kind) or "", re.MULTILINE)
    return " ".join(match[2].split()) if match else ""


def check(options: NamedTuple, set_fields: Collection[str] = (), prefix: str = "--") -> None:
    """Checks the fields of an object.

    set_fields: names of the fields that were set explicitly.
    prefix: of field names in messages.

    Raises:
        InputError: a value out of range, or an option that has no meaning with the others.
    """
    for name, (*_, option) in fields_of(type(options)).items():
        check_value(f"{prefix}{name}", getattr(options, name), option)
        if option.only and name in set_fields:
            key, value = option.only
            if (other := getattr(options, key)) != value:
                raise InputError(
                    f"{prefix}{name} has no meaning with {prefix}{key}={other}: leave it out, or"
                    f" use {prefix}{key}={value}"
                )


def check_value(name: str, value: object, option: Option) -> None:
    """Checks a value, or each value of a tuple, but not None, which stands for a default.

    Raises:
        InputError: `NAME must be in [1, inf), got 0`.
    """
    if value is None:
        return
    if option.among:
        check_known(f"{name}={value!r}", value, option.among)
    if option.within:
        values = value if isinstance(value, tuple) else (value,)
        if not values or not all(is_within(number, option.within) for number in values):
            got = ", ".join(map(repr, values)) or "none"
            raise InputError(f"{name} must be in {option.within}, got {got}")
