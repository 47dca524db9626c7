"""Options: fields of a NamedTuple that carry their help and their range, and so become flags.

class Toy(NamedTuple):
    power: Annotated[float, Option("power of the probabilities", "(0, inf)")] = 1.0
"""

from collections.abc import Collection
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from absl import flags

from adaptive_jax.errors import InputError, check_known

flags.disclaim_key_flags()  # flags belong to the command that has them defined here

DEFINE = {int: flags.DEFINE_integer, float: flags.DEFINE_float, str: flags.DEFINE_string}
NUMBERS = {
    int: "whole numbers, such as 10 or 10,100",
    float: "numbers, such as 0.5 or 0.25,0.5",
}


class Option(NamedTuple):
    """Help and range of a field.

    Attributes:
        help: a phrase for --help.
        within: the interval of its values, such as "[0, 1)". A field that is a tuple has several
            values, and needs one.
        among: the values that exist.
        only: (field, value): the option has a meaning only where that field has that value.
    """

    help: str
    within: str = ""
    among: Collection[str] = ()
    only: tuple[str, str] | None = None


def options_of(kind: type) -> dict[str, tuple[Any, Option]]:
    """The type and the `Option` of each field that has one, by name."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        name: (hint.__origin__, hint.__metadata__[0])
        for name, hint in hints.items()
        if get_origin(hint) is Annotated
    }


def define_option_flags(kind: type, without: Collection[str] = ()) -> None:
    """Defines a flag for each option of a NamedTuple, with the field's default."""
    for name, (hint, option) in options_of(kind).items():
        if name not in without:
            define_flag(name, hint, kind._field_defaults[name], option.help, option.among)


def define_flag(
    name: str, hint: Any, default: object, text: str, among: Collection[str] = ()
) -> None:
    """Defines a flag of a type: int, float or str, one of them or None, or a tuple of them."""
    if among:
        flags.DEFINE_enum(name, default, list(among), text)
    elif get_origin(hint) is tuple:
        flags.DEFINE_list(name, default and list(map(str, default)), text)
    else:
        kind = hint if isinstance(hint, type) else get_args(hint)[0]
        DEFINE[kind](name, default, text)


def flag_values(kind: type, without: Collection[str] = ()) -> dict[str, object]:
    """The values of the flags that `define_option_flags` defined, by name."""
    options = options_of(kind).items()
    return {name: flag_value(name, hint) for name, (hint, _) in options if name not in without}


def flag_value(name: str, hint: Any) -> Any:
    """The value of a flag of a type, see `define_flag`.

    Raises:
        InputError: a list of numbers that has another text among them, or none.
    """
    flag = flags.FLAGS[name]
    if get_origin(hint) is not tuple or flag.value is None:
        return flag.value
    kind = get_args(hint)[0]
    if kind is str or not (flag.value or flag.default):
        return tuple(flag.value)
    try:
        if flag.value:
            return tuple(map(kind, flag.value))
    except ValueError:
        pass
    raise InputError(f"--{name} must be {NUMBERS[kind]}, got {','.join(flag.value)}")


def check_options(options: NamedTuple, named: Collection[str] = ()) -> None:
    """Checks the values of a NamedTuple of options; None stands for a default and is not checked.

    named: the fields that were given, whatever their values.

    Raises:
        InputError: a value out of range, or an option that has no meaning beside the others.
    """
    for name, (_, option) in options_of(type(options)).items():
        value = getattr(options, name)
        if isinstance(options._field_defaults[name], tuple) and not isinstance(value, tuple):
            raise InputError(f"{name}={value!r} must be a tuple, such as ({value!r},)")
        if option.among:
            check_known(f"{name}={value!r}", value, option.among)
        if option.within and value is not None:
            values = value if isinstance(value, tuple) else (value,)
            if not values or not all(_inside(each, option.within) for each in values):
                got = ", ".join(map(str, values)) or "none"
                raise InputError(f"--{name} must be in {option.within}, got {got}")
        if option.only and name in named:
            key, needed = option.only
            if (other := getattr(options, key)) != needed:
                raise InputError(
                    f"--{name} has no meaning with --{key}={other}: leave it out, or use"
                    f" --{key}={needed}"
                )


def _inside(value, interval):
    low, high = map(float, interval[1:-1].split(","))
    above = value >= low if interval[0] == "[" else value > low
    return above and (value <= high if interval[-1] == "]" else value < high)
