"""Lists every key of a config with its value and default, and the docstring of the class that uses
it.
"""

import inspect
from collections.abc import Iterable, Mapping

from adaptive_jax.config.keys import ALL_GROUPS, NAMES, at, definition, keys_of, maker
from adaptive_jax.config.options import Field

TITLES = {
    "": "the run",
    "metrics": "what is logged",
    "data": "the corpus",
    "batches": "rows of an update",
    "input": "from token ids to vectors",
    "input.words": "the vectors of words beside n-grams",
    "body": "from vectors to hidden states",
    "output": "from hidden states to the loss",
    "output.table": "the words' vectors in the output",
    "output.table.cnn": "the CNN of a composed table",
    "optimizer": "from gradients to changes of the parameters",
    "schedule": "the learning rate",
}
HEAD = """# Configuration

Every key of a config with its default, and the documentation of its class. Written by
`python -m adaptive_jax train --explain > docs/configuration.md`.

A config file states what differs from these defaults; `--config.KEY=VALUE` changes a key on the
command line, and `python train.py --config=FILE --explain` prints this for a config. A group's
`name` chooses a class, or is `package.module:Class` of your own. A flag that changes the name keeps
what the file states if the new class has the key, and says what it drops.
"""


def config(settings: Mapping) -> str:
    """Every key of a resolved config by group, with its default if its value differs."""
    lines = []
    for group in ALL_GROUPS:
        if not (values := at(settings, group)):
            continue
        name = values.get("name") if group in NAMES else None
        prefix = f"  --config.{group}." if group else "  --config."
        lines += [f"{group or 'config'}: {TITLES[group]}"]
        lines += [f"{prefix}name={name!r}"] if name else []
        for key, (default, *_) in keys_of(group, name).items():
            text = "no default" if default is inspect.Parameter.empty else f"default {default!r}"
            other = "" if values[key] == default else f"  ({text})"
            lines.append(f"{prefix}{key}={values[key]!r}{other}")
        text = [*_of_others(group, name), *meanings(group, name)]
        lines += ["", *(f"    {line}".rstrip() for line in text), ""]
    return "\n".join(lines).rstrip()


def page() -> str:
    """Every key of every class, as Markdown."""
    lines = [HEAD]
    for group in ALL_GROUPS:
        lines.append(f"## {f'`{group}`: ' * bool(group)}{TITLES[group]}\n")
        if group == "input.words":
            lines.append("A class of `input` and its keys, such as `input.words.width`.\n")
            continue
        if paragraphs := _of_others(group):
            lines += ["```text", *paragraphs[:-1], "```\n"]
        for name in definition(group) if group in NAMES else [None]:
            if name:
                default = " (the default)" * (name == NAMES[group])
                lines.append(f"### `{group}.name={name}`{default}\n")
            lines += [*_table(group, keys_of(group, name)), ""]
            if group == "output.table.cnn":
                lines.append("They mean what those of `input.name=char_cnn` do.\n")
                continue
            lines += ["```text", *meanings(group, name), "```\n"]
    return "\n".join(lines).rstrip()


def _table(group: str, keys: Mapping[str, Field]) -> Iterable[str]:
    yield "| key | default | values |"
    yield "| --- | --- | --- |"
    for key, field in keys.items():
        values = field.option.within or ", ".join(map(repr, field.option.among))
        values = f"`{values}`" if values else ""
        yield f"| `{f'{group}.{key}'.lstrip('.')}` | `{field.default!r}` | {values} |"


def _of_others(group, name=None):
    """Documentation of keys that are not arguments of their class: `output.clusters`, from the
    docstring of the function that reads it, and the keys of all optimizers, or of all of optax.
    """
    if group == "optimizer":
        of_optax = name and definition("optimizer.is_of_optax")(name)
        text = ["clip_norm, l2_decay: as those of `adaptive_jax.optimizers.optim.sgd`.", ""]
        of_tables = inspect.getdoc(definition("optimizer.tables")).splitlines()
        return [*of_tables, "", *text * bool(of_optax)]
    if group != "output":
        return []
    paragraphs = inspect.getdoc(definition("output.clusters")).split("\n\n")
    [meaning] = [paragraph for paragraph in paragraphs if paragraph.startswith("clusters:")]
    return [*meaning.splitlines(), ""]


def meanings(group: str, name: str | None = None) -> list[str]:
    """The docstring of the class whose arguments are the keys of a group, line by line."""
    return (inspect.getdoc(maker(group, name)) or "It has no docstring.").splitlines()
