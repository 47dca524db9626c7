"""Options of fairseq's gated convolutional networks that cannot be converted.

`tests/reference/test_gcnn_code.py` compares the models that can, whose files name the cases.
"""

from pathlib import Path

import pytest

from adaptive_jax.errors import InputError
from adaptive_jax.interop.convert import read_checkpoint
from adaptive_jax.interop.fconv import config_of
from adaptive_jax.model.language_model import build

LEGACY = Path(__file__).parents[1] / "fixtures" / "gcnn" / "plain_full_legacy.pt"
WORDS = 240


@pytest.mark.parametrize(
    "changes, says",
    [
        (
            {"decoder_layers": "[(16, 4)] * 10 ** 3"},
            ["'[(16, 4)] * 10 ** 3'", "must be a list such as"],
        ),
        ({"decoder_layers": "[(16, 4)] * 1000000000"}, ["1000000000", "must be a list such as"]),
        ({"decoder_layers": "open('x')"}, ["open('x')", "must be a list such as"]),
        ({"decoder_layers": "[(16, 4, 0)]"}, ["must have a residual at its last layer"]),
        ({"decoder_layers": "[(16, 4, 2)]"}, ["got 2 after 1 layers"]),
        (
            {"decoder_layers": "[(16, 4, 0)] * 5 + [(16, 4, 6)]"},
            ["must be a block of 1 to 5 layers"],
        ),
        ({"decoder_layers": "[('a', 4)]"}, ["('a', 4)", "must be a list such as"]),
        (
            {"decoder_attention": "[False, True, False]"},
            ["decoder_attention='[False, True, False]'"],
        ),
        ({"add_bos_token": True}, ["add_bos_token=True"]),
        ({"dropout": "x"}, ["dropout='x'"]),
    ],
)
def test_an_option_that_cannot_be_converted(changes, says):
    """The message has the option with its value."""
    _, found = read_checkpoint(LEGACY)
    with pytest.raises(InputError) as error:
        config = config_of(found.options | changes, found.state, WORDS)
        build(config, WORDS)
    line = str(error.value)
    assert "\n" not in line and all(part in line for part in says), line
