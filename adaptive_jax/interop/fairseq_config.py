"""Translates the options of a `transformer_lm` of fairseq into a config of this project."""

import numpy as np

from adaptive_jax.errors import InputError
from adaptive_jax.interop.config import RUN, completed, fairseq_run, list_of
from adaptive_jax.interop.fairseq import FIRST_POSITION, POSITIONS

# fairseq's defaults, for options that a checkpoint lacks: fairseq added them one by one over the
# years.
DEFAULTS = {
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "relu_dropout": 0.0,
    "decoder_embed_dim": 512,
    "decoder_ffn_embed_dim": 2048,
    "decoder_layers": 6,
    "decoder_attention_heads": 8,
    "decoder_normalize_before": True,
    "no_decoder_final_norm": False,
    "adaptive_input": False,
    "adaptive_input_cutoff": None,
    "adaptive_input_factor": 4,
    "adaptive_softmax_cutoff": None,
    "adaptive_softmax_factor": 4,
    "adaptive_softmax_dropout": 0.0,
    "tie_adaptive_weights": False,
    "tie_adaptive_proj": False,
    "share_decoder_input_output_embed": False,
    "character_embeddings": False,
    "character_embedding_dim": 4,
    "char_embedder_highway_layers": 2,
    "character_filters": "[(1, 64), (2, 128), (3, 192), (4, 256), (5, 256), (6, 256), (7, 256)]",
    "decoder_learned_pos": False,
    "no_token_positional_embeddings": False,
} | RUN

# Options that must have fairseq's default, given here: with any other value, no layer of this
# project computes the same.
FIXED = {
    "activation_fn": "relu",
    "no_scale_embedding": False,
    "layernorm_embedding": False,
    "add_bos_token": False,
    "decoder_layers_to_keep": None,
    "quant_noise_pq": 0,
    "quant_noise_scalar": 0,
    "base_layers": 0,
    "decoder_xformers_att_config": None,
    "scale_fc": False,
    "scale_attn": False,
    "scale_heads": False,
    "scale_resids": False,
}


def config_of(options: dict, state: dict[str, np.ndarray], vocabulary_size: int) -> dict:
    """The complete config of the model in a checkpoint, as evaluate.py reads it.

    The corpus is `text_files` without a path, because a checkpoint does not contain its training
    text.

    Args:
        options, state: see `Loaded`.
        vocabulary_size: number of words, including fairseq's own four.

    Raises:
        InputError: an option has a value that the layers here do not support; the message gives
            both.
    """
    options = _checked(
        _renamed(DEFAULTS | {name: value for name, value in options.items() if value is not None}),
        state,
    )
    before = bool(options["decoder_normalize_before"])
    # fairseq normalises after the last block since version 3 of its decoder, unless each block ends
    # with a norm.
    final_norm = (
        before
        and not options["no_decoder_final_norm"]
        and state.get("decoder.version", np.ones(1)).item() > 2
    )
    model = {
        "input": _input_of(options, vocabulary_size),
        "body": (
            {
                "name": "transformer" if before else "transformer_post_norm",
                "layers": options["decoder_layers"],
                "features": options["decoder_embed_dim"],
                "heads": options["decoder_attention_heads"],
                "feed_forward": options["decoder_ffn_embed_dim"],
                "dropout": options["dropout"],
                "attention_dropout": options["attention_dropout"],
                "activation_dropout": options["activation_dropout"] or options["relu_dropout"],
                "final_norm": final_norm,
                "remat": "auto",
            }
            | _positions_of(options, state)
        ),
        "output": _output_of(options, vocabulary_size),
    }
    return completed(fairseq_run(options, vocabulary_size) | model)


def _renamed(options):
    """The options in today's terms."""
    options = dict(options)
    # Until 2019: the opposite of today's option, and no model had a final norm.
    if "no_tie_adaptive_proj" in options:
        options["no_decoder_final_norm"] = True
        options["tie_adaptive_proj"] |= options["no_tie_adaptive_proj"] is False
    if "decoder_final_norm" in options:
        options["no_decoder_final_norm"] = not options["decoder_final_norm"]
    for name in ("decoder_input_dim", "decoder_output_dim"):
        options.setdefault(name, options["decoder_embed_dim"])
    return options


def _checked(options, state):
    """The options, if the layers here support them."""
    arch = options.get("arch")
    if not str(arch).startswith("transformer_lm"):
        raise InputError(
            f"the checkpoint's arch={arch!r} is not a transformer_lm: give a language model trained"
            " with fairseq"
        )
    wrong = [
        name
        for name, value in FIXED.items()
        if (options.get(name, value) or None) != (value or None)
    ]
    numbers = [name for name, value in DEFAULTS.items() if isinstance(value, int | float)]
    wrong += [name for name in numbers if not isinstance(options[name], int | float)]
    if options["tie_adaptive_weights"]:
        required = {
            "adaptive_input": True,
            "decoder_output_dim": options["decoder_embed_dim"],
            "decoder_input_dim": options["decoder_embed_dim"],
            "adaptive_input_factor": options["adaptive_softmax_factor"],
            "adaptive_input_cutoff": options["adaptive_softmax_cutoff"],
        }
        wrong += [name for name, value in required.items() if options[name] != value]
    if options["share_decoder_input_output_embed"] and not options["adaptive_softmax_cutoff"]:
        wrong += [name for name in ("adaptive_input", "character_embeddings") if options[name]]
    factors = ("adaptive_input_factor", "adaptive_softmax_factor")
    wrong += [name for name in factors if name not in wrong and options[name] % 1]
    if wrong:
        shown = ", ".join(f"{name}={options.get(name)!r}" for name in wrong)
        raise InputError(
            f"cannot convert the checkpoint's {shown}: no layer of this project computes that; give"
            " another model"
        )
    if options["adaptive_softmax_cutoff"] and "decoder.adaptive_softmax.version" not in state:
        raise InputError(
            "the checkpoint's adaptive softmax has no version: it is older than fairseq itself can"
            " read"
        )
    return options


def _bands(options, layer, side, vocabulary_size):
    """The fields of an adaptive layer. fairseq accepts the vocabulary size as a last cutoff."""
    cutoffs = list_of(options, f"{layer}_cutoff") if options[f"{layer}_cutoff"] else ()
    return {
        "cutoffs": tuple(cut for cut in cutoffs if cut != vocabulary_size),
        "factor": int(options[f"{layer}_factor"]),
    } | _width(options, side)


def _width(options, side):
    """The width of the vectors on one side of the body, 0 if it is the body's."""
    width = options[f"decoder_{side}_dim"]
    return {"width": 0 if width == options["decoder_embed_dim"] else width}


def _positions_of(options, state):
    """How tokens know their order; learned positions are as many as the table has, less the
    first, see transformer.py.
    """
    if options["no_token_positional_embeddings"]:
        return {"positions": "none"}
    if not options["decoder_learned_pos"]:
        return {"positions": "sinusoidal"}
    # A table that is missing is reported with all other tensors.
    rows = np.atleast_1d(state.get(POSITIONS, ()))
    return {"positions": "learned", "max_positions": max(1, len(rows) - FIRST_POSITION)}


def _input_of(options, vocabulary_size):
    if options["character_embeddings"]:
        return {
            "name": "char_cnn",
            "width": options["character_embedding_dim"],
            "filters": list_of(options, "character_filters"),
            "highway_layers": options["char_embedder_highway_layers"],
            "length": 50,
        }
    if options["adaptive_input"]:
        return {"name": "adaptive"} | _bands(options, "adaptive_input", "input", vocabulary_size)
    return {"name": "lookup"} | _width(options, "input")


def _output_of(options, vocabulary_size):
    adaptive = bool(options["adaptive_softmax_cutoff"])
    table = {"name": "own"} | _bands(options, "adaptive_softmax", "output", vocabulary_size)
    if options["tie_adaptive_weights"] if adaptive else options["share_decoder_input_output_embed"]:
        share = bool(adaptive and options["tie_adaptive_proj"])
        table = {
            "name": "tied",
            "share_projections": share,
            "share_head_projection": False,
            "cutoffs": (),
        }
    # The released code applies the rate of the tails to the whole input of the softmax too.
    rate = options["adaptive_softmax_dropout"] if adaptive else 0.0
    name = "adaptive" if adaptive else "softmax"
    return {
        "name": name,
        "table": table,
        "tail_dropout": rate,
        "input_dropout": rate,
        "label_smoothing": 0.0,
        "z_loss": 0.0,
    }
