"""What every key of a config means, from the docstrings of the classes that the groups choose.

python -m adaptive_jax.explain > docs/configuration.md
"""

import importlib
import inspect
import re
import textwrap
from collections.abc import Mapping

from adaptive_jax import command
from adaptive_jax.data.batches.training import Layout
from adaptive_jax.data.corpora.load import CORPORA, Settings
from adaptive_jax.defaults import CHOOSE, DEFAULTS, GENERAL, NAMED, defaults_of
from adaptive_jax.model import language_model as model
from adaptive_jax.training import optim

CHOICES = {
    "input": model.INPUTS,
    "body": model.BODIES,
    "output": model.OUTPUTS,
    "output.table": model.TABLES,
    "optimizer": optim.OPTIMIZERS,
    "schedule": optim.SCHEDULES,
}
GROUPS = {"data": Settings, "batches": Layout}
TITLES = {
    "": "the run",
    "choose": "what a config that leaves settings open is given",
    "divergence": "a loss that is not finite",
    "metrics": "what is logged",
    "data": "the corpus",
    "batches": "rows of an update",
    "input": "from token ids to vectors",
    "body": "from vectors to hidden states",
    "output": "from hidden states to the loss",
    "output.table": "the words' vectors in the output",
    "optimizer": "from gradients to changes of the parameters",
    "schedule": "the learning rate",
}
HEAD = """# Configuration

Every key of a config with its default and its meaning. Written by `python -m adaptive_jax.explain > docs/configuration.md`.

A config file states what differs from these defaults; `--config.KEY=VALUE` changes a key on the command line, and
`python train.py --config=FILE --explain` prints this for a config. A group's `name` chooses a class. A flag that changes the name
keeps the values of keys that both classes have, and says what it drops.
"""


def config(settings: Mapping) -> str:
    """Every key of a config: its value, its default if that is another, and its meaning, by
    group.
    """
    defaults, lines = defaults_of(settings), []
    for group in [group for group in TITLES if group != "choose" or group in settings]:
        lines += ["", f"{group or 'config'}: {TITLES[group]}"]
        for key, default in _at(defaults, group).items():
            value = _at(settings, group)[key]
            if isinstance(default, dict):
                continue
            other = "" if value == default or key == "name" else f"  (default {default!r})"
            path = f"{group}.{key}".lstrip(".")
            lines.append(f"  --config.{path}={value!r}{other}")
            meaning = meaning_of(group, key, _at(settings, group).get("name"))
            lines += textwrap.wrap(meaning, 100, initial_indent=" " * 6, subsequent_indent=" " * 6)
    if "choose" in settings:
        lines += [
            "",
            "choose: keys above that are None are chosen for the text when training begins",
        ]
        lines += [
            f"  --config.choose.hours={settings['choose']['hours']!r}",
            "      hours that training may take; --hours sets it",
        ]
    return "\n".join(lines[1:])


def page() -> str:
    """Every key of every class, as Markdown."""
    lines = [HEAD]
    for group in TITLES:
        lines.append(f"## {f'`{group}`: ' * bool(group)}{TITLES[group]}\n")
        for name in NAMED.get(group, [None]):
            if name:
                about = inspect.getdoc(CHOICES[group][name]).split("\n\n")[0].replace("\n", " ")
                lines.append(
                    f"### `{group}.name={name}`{' (the default)' * (name == _at(DEFAULTS, group)['name'])}\n\n{about}\n"
                )
            keys = NAMED[group][name] if name else _at(DEFAULTS | {"choose": CHOOSE}, group)
            rows = [
                f"| `{f'{group}.{key}'.lstrip('.')}` | `{default!r}` |"
                f" {meaning_of(group, key, name).replace('|', '/')} |"
                for key, default in keys.items()
                if not isinstance(default, dict)
            ]
            lines.append(
                "\n".join(["| key | default | meaning |", "| --- | --- | --- |", *rows]) + "\n"
            )
    return "\n".join(lines).rstrip()


def meaning_of(group: str, key: str, name: str | None = None) -> str:
    """The meaning of a key, in the class that `name` chooses.

    Raises:
        KeyError: no docstring tells it.
    """
    path = f"{group}.{key}".lstrip(".")
    if path in GENERAL:
        return GENERAL[path][1]
    if group in NAMED and key == "name":
        others = ", or an optimizer of optax" if group == "optimizer" else ""
        return f"which class: {', '.join(NAMED[group])}{others}"
    if path == "output.clusters":
        return _documented(model.LanguageModel, key)
    if path == "choose.hours":
        return (
            "hours that training may take, where a config leaves settings None: they are chosen for"
            " the text and this time"
        )
    if path == "data.corpus":
        return f"one of {', '.join(CORPORA)}"
    if group == "optimizer":
        return _documented(optim.optimizer_named(name), key)
    return _documented(GROUPS[group] if group in GROUPS else CHOICES[group][name], key)


def _at(settings, group):
    for name in filter(None, group.split(".")):
        settings = settings[name]
    return settings


def _documented(what, key):
    """What the docstring of a class or function says of an argument, or the docstrings that it
    refers to.
    """
    for owner in (what, *getattr(what, "__bases__", ())):
        text = inspect.getdoc(owner) or ""
        entry = rf"^( *)(?:\w+, )*{key}(?:, \w+)*: (.+(?:\n\1 +\S.*)*)"
        if found := re.search(entry, text, re.MULTILINE):
            meaning = " ".join(found[2].split())
            reference = re.match(r"see `([\w.]+)`\.$", meaning)
            return _documented(_named(owner, reference[1]), key) if reference else meaning
        if reference := re.search(r"as those of `([\w.]+)`", text):
            return _documented(_named(owner, reference[1]), key)
    raise KeyError(f"the docstring of {what.__qualname__} does not say what {key} is")


def _named(owner, path):
    """What a docstring of `owner` calls `path`: a name of its module, or one with the module
    before it.
    """
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module or owner.__module__), name)


if __name__ == "__main__":
    command.run(lambda: print(page()), stopped="stopped")
