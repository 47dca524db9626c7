"""The options of a model that fairseq trained, as a config of this project."""

import ast
import math

import numpy as np

from adaptive_jax.errors import InputError

# What fairseq takes where a checkpoint does not say: options came one by one over the years.
DEFAULTS = {
    "dropout": 0.1, "attention_dropout": 0.0, "activation_dropout": 0.0, "relu_dropout": 0.0,
    "decoder_embed_dim": 512, "decoder_ffn_embed_dim": 2048, "decoder_layers": 6, "decoder_attention_heads": 8,
    "decoder_normalize_before": True, "no_decoder_final_norm": False,
    "adaptive_input": False, "adaptive_input_cutoff": None, "adaptive_input_factor": 4,
    "adaptive_softmax_cutoff": None, "adaptive_softmax_factor": 4, "adaptive_softmax_dropout": 0.0,
    "tie_adaptive_weights": False, "tie_adaptive_proj": False, "share_decoder_input_output_embed": False,
    "character_embeddings": False, "character_embedding_dim": 4, "char_embedder_highway_layers": 2,
    "character_filters": "[(1, 64), (2, 128), (3, 192), (4, 256), (5, 256), (6, 256), (7, 256)]",
    "tokens_per_sample": 1024, "sample_break_mode": "none", "max_tokens": None,
    "update_freq": [1], "distributed_world_size": 1, "seed": 1,
}  # fmt: skip

# Options whose other values make another model than the layers here: fairseq's default, which they must have.
FIXED = {
    "activation_fn": "relu", "decoder_learned_pos": False, "no_token_positional_embeddings": False,
    "no_scale_embedding": False, "layernorm_embedding": False, "add_bos_token": False, "decoder_layers_to_keep": None,
    "quant_noise_pq": 0, "quant_noise_scalar": 0, "base_layers": 0, "decoder_xformers_att_config": None,
    "scale_fc": False, "scale_attn": False, "scale_heads": False, "scale_resids": False,
}  # fmt: skip

# The paper's training (Baevski & Auli 2019, section 4.5), where the checkpoint's is not of its kind, under fairseq's names.
TRAINING = {"max_update": 286_000, "lr": [1.0], "min_lr": 1e-5, "warmup_init_lr": 1e-7, "warmup_updates": 16_000,
            "lr_period_updates": 18_000, "t_mult": 2, "lr_shrink": 0.75, "momentum": 0.99, "clip_norm": 0.1}  # fmt: skip


def config_of(options: dict, state: dict[str, np.ndarray], vocabulary_size: int) -> dict:
    """The config of the model that a checkpoint holds, every field stated, as evaluate.py reads it.

    The corpus is `text_files` without a path: a checkpoint does not hold the text it was trained on.

    Args:
        options, state: see `Loaded`.
        vocabulary_size: words, fairseq's own four included.

    Raises:
        InputError: an option, with its value, that the layers here do not have.
    """
    options = DEFAULTS | {name: value for name, value in options.items() if value is not None}
    _settle(options, state)
    features, block = options["decoder_embed_dim"], options["tokens_per_sample"]
    # fairseq normalises after the last block only from version 3 of its decoder, and never where every block ends so.
    final_norm = not options["no_decoder_final_norm"] and state.get("decoder.version", np.ones(1)).item() > 2
    normalize_before = bool(options["decoder_normalize_before"])
    rows = max(1, (options["max_tokens"] or block) // block)
    training, optimizer = _training_of(options)
    return training | {
        "seed": options["seed"],
        "dtype": "float32",
        "tokens_per_update": rows * block * options["update_freq"][-1] * options["distributed_world_size"],
        "tokens_per_device": rows * block,
        "fsdp": 0,
        "data": {
            "corpus": "text_files",
            "path": "",
            "cache": "~/.cache/adaptive_jax",
            "threshold": 1,
            "limit": 0,
            "codes": 0,
            "tokeniser": "none",
            "lower": False,
            "vocabulary_size": vocabulary_size,
            "block": block,
            "break_mode": options["sample_break_mode"],
            "rows": "packed",
        },
        "input": _input_of(options, vocabulary_size),
        "body": {
            "name": "transformer" if normalize_before else "transformer_post_norm",
            "layers": options["decoder_layers"],
            "features": features,
            "heads": options["decoder_attention_heads"],
            "feed_forward": options["decoder_ffn_embed_dim"],
            "dropout": options["dropout"],
            "attention_dropout": options["attention_dropout"],
            "activation_dropout": options["activation_dropout"] or options["relu_dropout"],
            "final_norm": final_norm and normalize_before,
            "attention": "auto",
            "remat": "none",
        },
        "output": _output_of(options, vocabulary_size),
        "optimizer": optimizer,
    }


def _settle(options, state):
    """Brings older options into today's terms, in place, and refuses what the layers here do not have."""
    arch = options.get("arch")
    if not str(arch).startswith("transformer_lm"):
        raise InputError(
            f"the checkpoint's arch={arch!r} is no transformer_lm: give a language model that fairseq trained"
        )
    if "no_tie_adaptive_proj" in options:  # until 2019 an option said the opposite, and no model had a final norm
        options["no_decoder_final_norm"] = True
        options["tie_adaptive_proj"] |= options["no_tie_adaptive_proj"] is False
    if "decoder_final_norm" in options:
        options["no_decoder_final_norm"] = not options["decoder_final_norm"]
    for name in ("decoder_input_dim", "decoder_output_dim"):
        options.setdefault(name, options["decoder_embed_dim"])
    wrong = [name for name, value in FIXED.items() if (options.get(name, value) or None) != (value or None)]
    wrong += [
        name for name, value in DEFAULTS.items() if isinstance(value, int | float) and not _is_number(options[name])
    ]
    if options["tie_adaptive_weights"]:
        pairs = [("adaptive_input", True), ("decoder_output_dim", options["decoder_embed_dim"]),
                 ("decoder_input_dim", options["decoder_embed_dim"]),
                 ("adaptive_input_factor", options["adaptive_softmax_factor"]),
                 ("adaptive_input_cutoff", options["adaptive_softmax_cutoff"])]  # fmt: skip
        wrong += [name for name, value in pairs if options[name] != value]
    if options["share_decoder_input_output_embed"] and not options["adaptive_softmax_cutoff"]:
        wrong += [name for name in ("adaptive_input", "character_embeddings") if options[name]]
    for name in ("adaptive_input_factor", "adaptive_softmax_factor"):
        wrong += [name] if _is_number(options[name]) and options[name] % 1 else []
    if wrong:
        shown = ", ".join(f"{name}={options.get(name)!r}" for name in wrong)
        raise InputError(
            f"the checkpoint's {shown} cannot be converted: the layers of this project, so set, do not exist"
        )
    if options["adaptive_softmax_cutoff"] and "decoder.adaptive_softmax.version" not in state:
        raise InputError("the checkpoint's adaptive softmax has no version: it is older than fairseq itself can read")


def _is_number(value):
    return isinstance(value, int | float)


def _literal(options, name):
    """The list that an option spells out: "200,500" or "[(1, 64), (2, 128)]"; fairseq evaluates it."""
    value = options[name]
    try:
        return tuple(
            ast.literal_eval(value if value.startswith(("[", "(")) else f"[{value}]")
            if isinstance(value, str)
            else value
        )
    except (ValueError, TypeError, SyntaxError):
        raise InputError(f"the checkpoint's {name}={value!r} is no list of numbers: give another checkpoint") from None


def _cutoffs(options, name, vocabulary_size):
    # fairseq lets the last band's end be spelt out too.
    return tuple(cut for cut in _literal(options, name) if cut != vocabulary_size)


def _width(options, name):
    return 0 if options[name] == options["decoder_embed_dim"] else options[name]


def _input_of(options, vocabulary_size):
    if options["character_embeddings"]:
        return {
            "name": "char_cnn",
            "width": options["character_embedding_dim"],
            "filters": _literal(options, "character_filters"),
            "highway_layers": options["char_embedder_highway_layers"],
            "length": 50,
        }
    if options["adaptive_input"]:
        return {
            "name": "adaptive",
            "cutoffs": _cutoffs(options, "adaptive_input_cutoff", vocabulary_size),
            "factor": int(options["adaptive_input_factor"]),
            "width": _width(options, "decoder_input_dim"),
        }
    return {"name": "lookup", "width": _width(options, "decoder_input_dim")}


def _output_of(options, vocabulary_size):
    adaptive = bool(options["adaptive_softmax_cutoff"])
    tied = options["tie_adaptive_weights"] if adaptive else options["share_decoder_input_output_embed"]
    share = adaptive and options["tie_adaptive_proj"]
    table = {"name": "tied", "share_projections": share, "share_head_projection": False, "cutoffs": ()}
    if not tied:
        table = {
            "name": "own",
            "cutoffs": _cutoffs(options, "adaptive_softmax_cutoff", vocabulary_size) if adaptive else (),
            "factor": int(options["adaptive_softmax_factor"]),
            "width": _width(options, "decoder_output_dim"),
        }
    # The released code drops units of the softmax's whole input too, at the rate of its tails.
    rate = options["adaptive_softmax_dropout"] if adaptive else 0.0
    common = {"table": table, "input_dropout": rate, "label_smoothing": 0.0, "z_loss": 0.0}
    return {"name": "adaptive", "tail_dropout": rate} | common if adaptive else {"name": "softmax"} | common


def _training_of(options):
    """The config's settings of steps, and its optimizer: the checkpoint's if it is nag with cosine cycles."""
    cosine = options.get("optimizer") == "nag" and options.get("lr_scheduler") == "cosine"
    found = {name: options[name] for name in TRAINING if cosine and options.get(name) is not None}
    found = TRAINING | {"t_mult": 1, "lr_shrink": 1.0} | found if cosine else TRAINING
    highest, lowest = found["lr"][0], found["min_lr"]
    if cosine and "max_lr" in options:  # until 2020 `lr` was the lowest rate
        highest, lowest = options["max_lr"], found["lr"][0]
    steps, warmup = found["max_update"], found["warmup_updates"]
    cycle = int(found["lr_period_updates"]) if found["lr_period_updates"] > 0 else steps - warmup
    cycle = max(1, cycle)
    cycles = math.ceil(math.log2(max(1, steps - warmup) / cycle + 1)) if found["t_mult"] == 2 else 1
    training = {"steps": max(1, steps), "log_every": 100, "evaluate_every": 2_000, "checkpoint_every": 2_000, "keep": 2}
    return training, {
        "learning_rate": highest,
        "min_learning_rate": lowest,
        "warmup_from": found["warmup_init_lr"],
        "warmup_steps": warmup,
        "cycle_steps": cycle,
        "cycles": max(1, cycles),
        "shrink": found["lr_shrink"],
        "momentum": found["momentum"],
        "clip_norm": found["clip_norm"] or math.inf,
    }
