"""Ways to score, and their options: one is added by a class of options, a function and a line."""

from typing import Annotated, NamedTuple

import pytest

from adaptive_jax.config.options import Option
from adaptive_jax.errors import InputError
from adaptive_jax.scores import evaluate_command as command
from adaptive_jax.scores.evaluate import Request, evaluate
from adaptive_jax.scores.methods import METHODS, Method, prepared


class Toy(NamedTuple):
    """The options of a toy: the model's probabilities to several powers, normalised by nothing."""

    power: Annotated[tuple[float, ...], Option("power of the probabilities", "(0, 2]")] = (1.0,)
    kind: Annotated[str, Option("what it is called", among=("left", "right"))] = "left"
    shift: Annotated[float, Option("added to the nll", "[0, inf)", only=("kind", "right"))] = 0.0


def score_toy(job, options):
    """Its label has keys that no other way to score has."""
    nll, _ = job.score()
    for power in options.power:
        yield {"power": power, "kind": options.kind}, nll * power + options.shift


def test_a_way_to_score_is_its_function_and_a_line(trained_copy, monkeypatch, capsys):
    """Its options are checked and stand in the lines and the JSON."""
    monkeypatch.setitem(METHODS, "toy", Method(score_toy, Toy))
    request = Request("validation", checkpoint="latest", method="toy")
    result = evaluate(trained_copy, request._replace(options={"power": (1.0, 0.5, 2.0)}))
    out = capsys.readouterr().out.splitlines()
    plain = evaluate(trained_copy, request._replace(method="plain"))
    assert [line["nll"] for line in result["grid"]] == pytest.approx(
        [power * plain["nll"] for power in (1.0, 0.5, 2.0)]
    )
    assert (result["power"], result["kind"]) == (0.5, "left")
    one = ["perplexity", f"{plain['perplexity']:.2f}", "power", "1,", "kind", "left"]
    assert out[0].split() == one
    assert out[3].endswith("; method toy, power 0.5, kind left")
    for options, says in [
        ({"power": (3.0,)}, r"--power must be in \(0, 2\], got 3.0"),
        ({"power": ()}, r"--power must be in \(0, 2\], got none"),
        ({"kind": "up"}, "kind='up' is not one of left, right"),
        ({"shift": 1.0}, "--shift has no meaning with --kind=left: leave it out, or use --kind=ri"),
        ({"theta": (1.0,)}, "--theta has no meaning with --method=toy: .* use --method=cache"),
    ]:
        with pytest.raises(InputError, match=says):
            prepared("toy", options)
    assert command.options_of_methods()["power"] == {"toy": Toy}
