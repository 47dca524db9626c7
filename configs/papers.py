"""Layers and training of the papers' models, which the files of several corpora share: settings by
dotted key, for the `LAYERS` of a file. Its rows add sizes.
"""

import re
from collections.abc import Mapping

from adaptive_jax.config.rows import Paper, Row, streams

# The body of Baevski & Auli 2019 and its training, but for the length of its cycles
TRANSFORMER = {
    "dtype": "bfloat16",
    "tokens_per_update": 65_536,
    "tokens_per_device": 0,  # what memory holds
    "log_every": 100,
    "keep": 2,
    "batches.sequence_length": 512,
    "body.layers": 16,
    "body.features": 1024,
    "body.heads": 16,
    "body.feed_forward": 4096,
    "body.final_norm": False,
    "schedule.warmup_steps": 16_000,
}
# The same on WikiText-103
TRANSFORMER_103 = TRANSFORMER | {
    "evaluate_every": 2_000,
    "checkpoint_every": 2_000,
    "body.dropout": 0.3,
    "body.activation_dropout": 0.1,
    "schedule.cycle_steps": 18_000,
}


def layers(
    cutoffs, width: int, narrow: int, tail_dropout: float = 0.0, characters: Mapping | None = None
) -> dict[str, dict]:
    """The input and output layers that Baevski & Auli 2019 compare, at any size: settings by the
    paper's names.

    `sm`: words of `width`, full softmax. `bpe`: sub-words as wide as the body, full softmax. `asm`:
    words of `narrow`, adaptive softmax. `cnn`: character CNN, adaptive softmax. `adp`: adaptive
    input, adaptive softmax. With `_t`, tied: input and output share embeddings and, in `adp_t`, the
    projections of the tails. `asm_t` has words of `width` in all bands.

    cutoffs: of every adaptive layer, whose bands narrow from the body's width by a factor of 4.
    characters: settings of the character CNN that differ from the defaults.
    """
    own = {"output.name": "softmax", "output.table.name": "own"}
    tied = own | {"output.table.name": "tied"}
    to_bands = {"output.name": "adaptive", "output.tail_dropout": tail_dropout}
    own_bands = own | to_bands | {"output.table.cutoffs": cutoffs}
    words, lookup = {"input.name": "lookup", "input.width": width}, {"input.name": "lookup"}
    adaptive = {"input.name": "adaptive", "input.cutoffs": cutoffs}
    characters = {f"input.{key}": value for key, value in (characters or {}).items()}
    cnn = {"input.name": "char_cnn"} | characters
    return {
        "sm": words | own | {"output.table.width": width},
        "sm_t": words | tied,
        "bpe": lookup | own,
        "bpe_t": lookup | tied,
        "asm": words | {"input.width": narrow} | own_bands,
        "asm_t": words | tied | to_bands | {"output.table.cutoffs": cutoffs},
        "cnn": cnn | own_bands,
        "adp": adaptive | own_bands,
        "adp_t": adaptive | tied | to_bands,
    }


def with_ngrams(layers: Mapping, **tables) -> dict:
    """Layers with n-grams beside the words of their input. tables: keys of `ngrams`."""
    words = {re.sub("^input[.]", "input.words.", key): value for key, value in layers.items()}
    return words | {"input.name": "ngrams"} | {f"input.{key}": tables[key] for key in tables}


def banded(rows: int) -> dict:
    """Keys of `ngrams` with vectors for the `rows` most frequent n-grams of each order, in bands of
    width 64, 32 and 16: a tenth, a quarter, the rest; and half as many rows of width 8, shared by
    all other n-grams.
    """
    settings = {"kind": "banded", "rows": rows, "row_width": 64, "row_factor": 2}
    return settings | {"row_cutoffs": (rows // 10, rows * 7 // 20), "hashed_rows": rows // 2}


# Dauphin et al. 2017, section 4.2 and 4.3; the division of the rate is that of fairseq's recipe
GCNN = {
    "input.name": "lookup",
    "body.name": "gated_conv",
    "output.name": "adaptive",
    "output.table.name": "own",
    "optimizer.name": "nag",
    "optimizer.learning_rate": 1.0,
    "optimizer.momentum": 0.99,
    "optimizer.clip_norm": 0.1,
    "schedule.name": "plateau",
    "schedule.warmup_steps": 0,
    "schedule.factor": 2.0,
    "schedule.patience": 1,
    "schedule.threshold": 1e-4,
}
AWD = {  # Merity et al. 2018, and Table 4.1 of Apostoae 2019
    "dtype": "float32",
    "batches.layout": "streams",
    "batches.sequence_length": 70,
    "input.name": "lookup",
    "input.word_dropout": 0.1,
    "input.init_range": 0.1,
    "body.name": "awd_lstm",
    "body.features": 400,
    "body.widths": (1150, 1150, 400),
    "body.biases": 2,
    "body.input_dropout": 0.65,
    "body.hidden_dropout": 0.2,
    "body.dropout": 0.4,
    "body.weight_drop": 0.5,
    "output.name": "softmax",
    "output.table.name": "tied",
    "output.table.bias": True,
}
AWD_LSTM = AWD | {  # Merity et al. 2018
    "body.ar": 2.0,
    "body.tar": 1.0,
    "optimizer.name": "nt_asgd",
    "optimizer.learning_rate": 30.0,
    "optimizer.clip_norm": 0.25,
    "optimizer.l2_decay": 1.2e-6,
    "schedule.name": "constant",
    "schedule.warmup_steps": 0,
}
AWD_SM = AWD | {  # Apostoae 2019, Table 4.1
    "body.ar": 1.0,
    "body.tar": 2.0,
    "optimizer.name": "adam",
    "optimizer.clip_norm": 0.25,
    "optimizer.l2_decay": 1.2e-6,
    "schedule.name": "plateau",
    "schedule.warmup_steps": 0,
    "schedule.factor": 10.0,
    "schedule.patience": 3,
    "schedule.threshold": 0.0,
    "schedule.divisions": 3,
}
AWD_HSM = AWD_SM | {"output.name": "hierarchical", "output.table.bias": False}
AWD_ASM = AWD_SM | {
    "output.name": "adaptive",
    "output.table.bias": False,
    "output.table.own_head": True,
}
AWD_AIR = {key: value for key, value in AWD_ASM.items() if not key.startswith("input.")}
AWD_AIR |= {"input.name": "adaptive", "input.factor": 3, "output.tail_dropout": 0.2}
# Section 3.2 tried these two, and prints no numbers of them. "Vanilla" is read as without dropout.
TRIED = {
    "awd_sm_small": {"body.features": 300, "body.widths": (600, 300)},
    "lstm_sm": dict.fromkeys(
        [
            "input.word_dropout",
            *(f"body.{key}" for key in ("input_dropout", "hidden_dropout", "dropout")),
            *(f"body.{key}" for key in ("weight_drop", "ar", "tar")),
        ],
        0.0,
    ),
}
THESIS = ["awd_sm", "awd_asm", "awd_asm_autoencoder", "awd_air", "awd_air_autoencoder"]
THESIS += ["hsm_frequency"]
THESIS += [
    f"hsm_{method}_{vectors}"
    for method in ("kmeans", "weighted_kmeans", "mixture")
    for vectors in ("pretrained", "glove")
]
LSTM = {  # Grave et al. 2017, section 5; accumulators from 0, as in Torch, are ours
    "dtype": "float32",
    "batches.break_mode": "none",
    "batches.layout": "streams",
    "batches.sequence_length": 20,
    "input.name": "lookup",
    "body.name": "lstm",
    "body.dropout": 0.0,
    "output.name": "adaptive",
    "output.table.name": "own",
    "optimizer.name": "adagrad",
    "optimizer.learning_rate": 0.1,
    "optimizer.clip_norm": 1.0,
    "optimizer.initial_accumulator_value": 0.0,
    "optimizer.eps": 1e-10,
    "schedule.name": "constant",
    "schedule.warmup_steps": 0,
}

# Pappas et al. 2020, appendix B.1. Dropout and decay are the public code's defaults: as the paper
# words it, 0.65 for hidden units and nothing else, `groc_tied` ends at 103.1 (86.2).
GROC = {
    "dtype": "float32",
    "early_stopping": 8,
    "batches.layout": "streams",
    "batches.sequence_length": 35,
    "input.name": "lookup",
    "input.init_range": 0.05,
    "body.name": "awd_lstm",
    "body.input_dropout": 0.65,
    "body.hidden_dropout": 0.3,
    "body.dropout": 0.4,
    "body.weight_drop": 0.0,
    "body.ar": 0.0,
    "body.tar": 0.0,
    "output.name": "softmax",
    "optimizer.name": "adam",
    "optimizer.learning_rate": 0.001,
    "optimizer.epsilon": 1e-9,
    "optimizer.clip_norm": 0.1,
    "optimizer.l2_decay": 1.2e-6,
    "schedule.name": "plateau",
    "schedule.warmup_steps": 0,
    "schedule.factor": 10.0,
    "schedule.patience": 4,
    "schedule.threshold": 0.0,
}
NO_RELATIONS, NO_DEFINITIONS = {"input.relations": 0}, {"input.definition": 0}  # Table 3
LEXICON = "~/nltk_data/corpora/wordnet"  # where NLTK keeps WordNet
GROC_CNN = {
    "width": 16,
    "filters": ((1, 32), (2, 32), (3, 64), (4, 128), (5, 256), (6, 512)),
    "highway_layers": 1,
    "length": 20,
    "strides": (1, 1, 2, 3, 4, 5),
    "activation": "selu",
    "letters": "elmo",
}


def thesis_layers(cutoffs) -> dict[str, dict]:
    """The layers of Apostoae 2019 with these cut-offs."""
    cut = {"output.table.cutoffs": cutoffs}
    return {
        "awd_sm": AWD_SM,
        "awd_hsm": AWD_HSM | cut,
        "awd_asm": AWD_ASM | cut,
        "awd_air": AWD_AIR | {"input.cutoffs": cutoffs},
    }


def thesis_rows(
    corpus: str, words: int, setups: Mapping, table: str, results: Mapping, epochs: int = 1
) -> dict[str, Row]:
    """The rows `THESIS` and `TRIED` of Apostoae 2019 for a text of this many words. Rows with
    clusters need a file of them, see docs/words.md.

    setups: layers to (streams, learning rate, millions of parameters or None): Tables 4.2 and 5.1.
    results: row to (perplexity on valid, on test, seconds an epoch, total seconds), as printed in
        `table`.
    epochs: epochs of rows that the thesis did not run.
    """
    rows = {}
    for name in THESIS:
        layers = "awd_hsm" if name.startswith("hsm") else name[:7].rstrip("_")
        count, rate, parameters = setups[layers]
        paper = Paper(parameters=parameters, table=parameters and "Apostoae 2019, Table 5.1")
        if name in results:
            valid, test, epoch, total = results[name]
            paper = Paper(
                valid, test, parameters, round(total / 3600, 1), f"Apostoae 2019, Table {table}"
            )
        times = round(total / epoch) if name in results else epochs
        changes = {**streams(count, words, times), "optimizer.learning_rate": rate}
        if name.endswith(("autoencoder", "pretrained", "glove")):
            changes["output.clusters"] = f"clusters/{corpus}_{name}.txt"
        rows[name] = Row(layers, changes, paper)
    for name, changes in TRIED.items():
        changes = rows["awd_sm"].changes | changes
        rows[name] = Row("awd_sm", changes, Paper(table="Apostoae 2019, section 3.2"))
    return rows


def groc_layers(width: int, cutoffs) -> dict[str, dict]:
    """The layers that Pappas et al. 2020 compare (Table 2), with word vectors of this width."""
    groc = GROC | {"body.features": width, "body.widths": (1024, width)}
    own, tied, mapped = ({"output.table.name": name} for name in ("own", "tied", "mapped"))
    characters = {f"output.table.cnn.{key}": value for key, value in GROC_CNN.items()}
    adaptive = {key: value for key, value in groc.items() if not key.startswith("input.")}
    grounded = adaptive | {"input.name": "groc", "input.lexicon": LEXICON}
    return {
        "groc_lookup": groc | own | {"output.table.bias": True},
        "groc_convolutional": (
            groc | characters | {"output.table.name": "composed", "output.table.bias": "own"}
        ),
        "groc_tied": groc | tied | {"output.table.bias": True},
        "groc_bilinear": (
            groc | mapped | {"output.table.form": "bilinear", "output.table.bias": "own"}
        ),
        "groc_deep_residual": groc | mapped | {"output.table.bias": "own"},
        "groc_adaptive": (
            adaptive
            | {"input.name": "adaptive", "input.cutoffs": cutoffs}
            | {"output.table.name": "assembled", "output.table.bias": "own"}
        ),
        "groc": grounded | mapped | {"output.table.depth": 0, "output.table.bias": "predicted"},
    }


def groc_rows(words: int, rows: Mapping[str, tuple]) -> dict[str, Row]:
    """Rows of Pappas et al. 2020 for a text of this many words.

    rows: row to (number of the table, or another place; layers, changes, perplexity on valid, on
        test, millions of parameters, which the paper rounds down: 13.8 to 13).
    """
    epochs = streams(20, words, epochs=100, window=35)  # at most, see early_stopping
    papers_rows = {}
    for name, (table, layers, changes, *numbers) in rows.items():
        citation = table if isinstance(table, str) else f"Table {table}"
        paper = Paper(*numbers, table=f"Pappas et al. 2020, {citation}")
        papers_rows[name] = Row(layers, epochs | changes, paper)
    return papers_rows


def output_network(depth: int, rate: float, activation: str = "selu") -> dict[str, object]:
    """Changes for an output network of k = `depth` layers with dropout r = `rate` (Pappas et al.
    2020, Table 8).

    Dropout is applied between its layers (section 3.2), and to the word vectors if there are none.
    """
    if not depth:
        return {"output.table.depth": 0, "output.table.dropout": rate}
    return {
        "output.table.depth": depth,
        "output.table.activation": activation,
        "output.table.layer_dropout": rate,
    }
