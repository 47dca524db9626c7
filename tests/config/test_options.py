"""Fields as keys and flags: defaults are values that their range allows, and each has a meaning."""

from typing import Annotated, NamedTuple

import pytest

from adaptive_jax.config import commands
from adaptive_jax.config.keys import ALL_GROUPS, NAMES, definition, keys_of
from adaptive_jax.config.options import Option, check, check_value, fields_of, meaning
from adaptive_jax.data.corpora.load import Settings
from adaptive_jax.errors import InputError
from adaptive_jax.generation.options import Options
from adaptive_jax.interop.export_command import Export
from adaptive_jax.scores.evaluate import Request
from adaptive_jax.scores.evaluate_command import Evaluate
from adaptive_jax.scores.methods import METHODS
from adaptive_jax.scores.report.report import ReportOptions
from adaptive_jax.text.generate_command import Generate
from adaptive_jax.text.score_command import Score
from adaptive_jax.training.command import Train
from adaptive_jax.training.make_clusters import Clustering, Files

FLAGS = [
    Clustering,
    Evaluate,
    Export,
    Files,
    Generate,
    ReportOptions,
    Options,
    Request,
    Score,
    Train,
]
FLAGS += [commands.Allow, commands.Hosts, commands.Workdir]
FLAGS += [method.options for method in METHODS.values()]


class Toy(NamedTuple):
    """A toy.

    Attributes:
        power: of the probabilities, which
            may be high.
        kind, form: how it looks.
    """

    power: Annotated[float, Option(within="(0, 2]")] = 1.0
    kind: Annotated[str | None, Option(among=("left", "right"))] = None
    form: str = "round"


@pytest.mark.parametrize("kind", FLAGS, ids=lambda kind: kind.__name__)
def test_a_flag_has_a_meaning(kind):
    """Without one, --help shows a name and no word about it; and a default is in its range."""
    for name, field in fields_of(kind).items():
        assert meaning(kind, name), name
        check_value(name, field.default, field.option)


@pytest.mark.parametrize("group", ALL_GROUPS)
def test_defaults_of_keys_are_in_range(group):
    """A config that states nothing would be refused otherwise, or its row in the page be wrong."""
    for name in definition(group) if group in NAMES else [None]:
        for key, field in keys_of(group, name).items():
            check_value(key, field.default, field.option)


def test_a_range_is_checked():
    """The message names the field, its range and the value; a default of None is never checked."""
    check(Toy())
    assert meaning(Toy, "power") == "of the probabilities, which may be high."
    assert meaning(Toy, "form") == "how it looks."
    with pytest.raises(InputError, match=r"^--power must be in \(0, 2\], got 0.0$"):
        check(Toy(power=0.0))
    with pytest.raises(InputError, match="^kind='up' is not one of left, right$"):
        check(Toy(kind="up"), prefix="")
    with pytest.raises(InputError, match=r"^data.threshold must be in \[1, inf\), got 0$"):
        check(Settings(threshold=0), prefix="data.")
