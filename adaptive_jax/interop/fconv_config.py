"""Translates the options of fairseq's `fconv_lm`, the gated convolutional network, into a
config of this project.
"""

import numpy as np

from adaptive_jax.errors import InputError
from adaptive_jax.interop.config import RUN, completed, fairseq_run, list_of
from adaptive_jax.interop.fconv import blocks_of, layers_of

# fairseq's defaults, for options that a checkpoint lacks.
DEFAULTS = {
    "dropout": 0.1,
    "decoder_embed_dim": 128,
    "decoder_layers": "[(1268, 4)] * 13",
    "decoder_attention": "False",
    "adaptive_softmax_cutoff": None,
    "adaptive_softmax_dropout": 0.0,
    "add_bos_token": False,
} | RUN


def config_of(options: dict, state: dict[str, np.ndarray], vocabulary_size: int) -> dict:
    """The complete config of the model in a checkpoint, as evaluate.py reads it.

    The softmax is the one that the tensors belong to: fairseq ignores cutoffs where the model was
        trained without them.

    Args:
        options, state: see `Loaded`.
        vocabulary_size: number of words, including fairseq's own four.

    Raises:
        InputError: an option has a value that the layers here do not support; the message gives
            both.
    """
    options = DEFAULTS | {name: value for name, value in options.items() if value is not None}
    adaptive = any(name.startswith("decoder.adaptive_softmax.") for name in state)
    # One word for all layers, or a list.
    wrong = [name for name in ("decoder_attention",) if "True" in str(options[name])]
    wrong += [name for name in ("add_bos_token",) if options[name]]
    wrong += [
        name
        for name in ("dropout", "adaptive_softmax_dropout")
        if not isinstance(options[name], int | float)
    ]
    wrong += [name for name in ("adaptive_softmax_cutoff",) if adaptive and not options[name]]
    if wrong:
        shown = ", ".join(f"{name}={options[name]!r}" for name in wrong)
        raise InputError(
            f"cannot convert the checkpoint's {shown}: no layer of this project computes that; give"
            " another model"
        )
    table, rate = {"name": "own", "bias": True, "weight_norm": True}, 0.0
    if adaptive:
        cutoffs, rate = (
            list_of(options, "adaptive_softmax_cutoff"),
            options["adaptive_softmax_dropout"],
        )
        table = {
            "name": "own",
            "cutoffs": tuple(cut for cut in cutoffs if cut != vocabulary_size),
            "factor": 4,
        }
    model = {
        "input": {"name": "lookup"},
        "body": {
            "name": "gated_conv",
            "form": "fairseq",
            "features": options["decoder_embed_dim"],
            "blocks": blocks_of(layers_of(str(options["decoder_layers"]))),
            "activation": "glu",
            "weight_norm": True,
            "dropout": options["dropout"],
            "output_width": 0 if adaptive else options["decoder_embed_dim"],
        },
        "output": {
            "name": "adaptive" if adaptive else "softmax",
            "table": table,
            "tail_dropout": rate,
            "input_dropout": rate,
        },
    }
    return completed(fairseq_run(options, vocabulary_size) | model)
