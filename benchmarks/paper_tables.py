"""The tables of the papers as rows that benchmarks.tables trains: models, published numbers,
and what differs scaled down.
"""

from adaptive_jax.config.rows import Paper, Row, streams
from benchmarks import gcnn_tables, groc_tables
from benchmarks.lines import CORPORA, WORDS, Line, Table, one_cycle
from configs import papers, wikitext2, wikitext103

# Half an epoch is too little to overfit, so dropout is low, and momentum forgets within 10 updates.
TRANSFORMER_CPU = one_cycle(steps=500, every=500, tokens=2_048, warmup=50) | {
    "batches.sequence_length": 128,
    "body.layers": 3,
    "body.features": 128,
    "body.heads": 4,
    "body.feed_forward": 512,
    "body.dropout": 0.1,
    "body.attention_dropout": 0.0,
    "body.activation_dropout": 0.0,
    "optimizer.learning_rate": 1.0,
    "optimizer.momentum": 0.9,
    "optimizer.clip_norm": 0.5,
}
# Two epochs of the Penn Treebank, or one of WikiText-2: little dropout.
AWD_CPU = one_cycle(steps=1_500, every=500, tokens=1_400, warmup=100) | {
    "body.features": 200,
    "body.widths": (400, 200),
    "body.input_dropout": 0.2,
    "body.hidden_dropout": 0.2,
    "body.dropout": 0.2,
    "body.weight_drop": 0.2,
    "optimizer.learning_rate": 0.003,
}
LSTM_CPU = one_cycle(steps=1_500, every=300, tokens=1_400, warmup=100) | {
    "batches.sequence_length": 70,
    "body.features": 256,
    "body.widths": (256,),
    "body.dropout": 0.2,
    "optimizer.learning_rate": 0.003,
}
SHORT = {"steps": 10, "evaluate_every": 10, "checkpoint_every": 10}


def _in_small(rows, features):
    """Rows of configs/wikitext103.py for WikiText-2 and a body of this width: cutoffs, widths
    and sub-words as much smaller.
    """
    narrower = {"asm": features // 4 / 64, "sm": features // 2 / 512, "sm_t": features // 2 / 512}

    def smaller(row, key, value):
        if key.endswith("cutoffs"):
            return tuple(
                round(cut * wikitext2.SETTINGS["data.vocabulary_size"] / 267_735) for cut in value
            )
        if key.endswith("width"):
            return max(1, round(value * narrower[row.layers]))
        return wikitext2.BPE.get(key, value)

    return {
        name: row._replace(
            changes={key: smaller(row, key, value) for key, value in row.changes.items()}
        )
        for name, row in rows.items()
    }


def _small(rows, tail_dropout=0.0):
    """The same rows on WikiText-2. Words of the full softmax are half as wide as the body, narrow
    ones a quarter.
    """
    cutoffs, features = wikitext2.LAYERS["adp"]["input.cutoffs"], TRANSFORMER_CPU["body.features"]
    widths, letters = (features // 2, features // 4), wikitext2.CHARACTERS
    layers = papers.layers(cutoffs, *widths, tail_dropout, letters)
    return {("cpu", "wikitext2"): (_in_small(rows, features), layers)}


def _transformers(title, table, rows=(), tail_dropout=0.0):
    """A table of Baevski & Auli 2019 on WikiText-103, scaled down on WikiText-2."""
    published = {
        name: row
        for name, row in wikitext103.ROWS.items()
        if row.paper.table == table or name in rows
    }
    small = tuple(Line("wikitext2", name, row.paper) for name, row in published.items())
    full = tuple(line._replace(corpus="wikitext103") for line in small)
    return Table(
        f"{title} (Baevski & Auli 2019, {table})",
        {"cpu": small, "full": full},
        {"cpu": TRANSFORMER_CPU},
        _small(published, tail_dropout),
    )


def _contexts():
    """Table 5: blocks of several lengths in training, with and without context in evaluation."""
    blocks = {  # the paper's: ours, our context; the paper's context, its numbers without and with
        512: (128, 120, 480, Paper(19.79, 20.51), Paper(18.35, 19.03)),
        2048: (256, 192, 1536, Paper(18.96, 19.53), Paper(18.23, 18.88)),
        3072: (384, 320, 2560, Paper(18.63, 19.34), Paper(17.97, 18.70)),
    }
    lines = {"wikitext2": (), "wikitext103": ()}
    rows = {corpus: {} for corpus in lines}
    for block, (short, short_context, context, without, within) in blocks.items():
        for corpus, length, given in (
            ("wikitext2", short, short_context),
            ("wikitext103", block, context),
        ):
            name, tokens = f"adp_t_{length}", 73_728 if length == 3072 else 65_536
            changes = {"tokens_per_update": tokens} if corpus == "wikitext103" else {}
            rows[corpus][name] = Row("adp_t", {"batches.sequence_length": length} | changes)
            lines[corpus] += Line(corpus, name, without), Line(corpus, name, within, context=given)
    return Table(
        "Context in training and in evaluation (Baevski & Auli 2019, Table 5)",
        {"cpu": lines["wikitext2"], "full": lines["wikitext103"]},
        {
            "cpu": TRANSFORMER_CPU | {"tokens_per_update": 3_072, "tokens_per_device": 3_072},
            "full": {"tokens_per_device": 6_144},
        },
        _small(rows["wikitext2"])
        | {("full", "wikitext103"): (rows["wikitext103"], wikitext103.LAYERS)},
    )


# Apostoae 2019, Table 5.1: rows awd_sm, hsm_frequency, awd_asm and awd_air; seconds an epoch, of
# Europarl and WikiText-103 mostly estimates; megabytes. On a GTX 1070, from Europarl on a P100.
_TABLE_5_1 = {
    "penn_treebank": ((31.9, 28.7, 27.2, 27.6), (6221, 4359, 4283, 4271)),
    "wikitext2": ((115.4, 90.0, 80.5, 73.2), (6013, 3593, 2975, 2749)),
    "europarl": ((3097, 1770, 1668, 1548), (12513, 4077, 4027, 3515)),
    "wikitext103": ((21558, None, 12524, 8150), (14109, None, 5761, 4701)),
}


def _clusters(row):
    """Clustering of a row of the thesis: the method and the vectors, or ()."""
    method, _, vectors = row.removeprefix("hsm_").rpartition("_")
    if row.endswith("_autoencoder"):
        return "autoencoder", "pretrained"
    return (method, vectors) if vectors in ("pretrained", "glove") else ()


def _thesis(corpus):
    """Table 4.3, 4.4, 4.5 or 4.6: the rows for which it has numbers."""
    file = CORPORA[corpus]
    lines = tuple(
        Line(corpus, name, file.ROWS[name].paper, epoch, clusters=_clusters(name))
        for name, (_, _, epoch, _) in file.THESIS.items()
    )
    small = lines
    if corpus == "wikitext103":  # too large for a CPU
        small = tuple(line._replace(corpus="wikitext2") for line in lines)
    title = f"Output layers of AWD-LSTM ({file.ROWS['awd_sm'].paper.table})"
    return Table(title, {"cpu": small, "full": lines}, {"cpu": AWD_CPU})


def _thesis_memory():
    """Table 5.1: 10 updates of each, every output with as many streams as the full softmax has."""
    lines, rows = {}, {}
    for corpus, published in _TABLE_5_1.items():
        file = CORPORA[corpus]
        batch = {
            key: file.ROWS["awd_sm"].changes[key]
            for key in ("tokens_per_update", "tokens_per_device")
        }
        for name, epoch, memory in zip(
            ("awd_sm", "hsm_frequency", "awd_asm", "awd_air"), *published, strict=True
        ):
            row = file.ROWS[name]
            rows.setdefault(corpus, {})[name] = row._replace(changes=row.changes | batch | SHORT)
            paper = Paper(parameters=row.paper.parameters)
            lines[corpus] = (
                *lines.get(corpus, ()),
                Line(corpus, name, paper, epoch, memory=memory),
            )
    small = lines["penn_treebank"] + lines["wikitext2"]
    return Table(
        "Memory, time and parameters of AWD-LSTM (Apostoae 2019, Table 5.1)",
        {"cpu": small, "full": sum(lines.values(), ())},
        {},
        {
            (size, corpus): (rows[corpus], CORPORA[corpus].LAYERS)
            for size in ("cpu", "full")
            for corpus in rows
        },
    )


def _grave():
    """Every output over the same LSTM. The published numbers are those of Text8, which is not
    among the corpora here.
    """
    outputs = {  # settings; Text8's perplexity and hours, with a fifth of its vocabulary as samples
        "full": ({"output.name": "softmax"}, Paper(test=144, hours=1.38)),
        "sampled": (
            {"output.name": "sampled", "output.samples": 1_024},
            Paper(test=166, hours=0.68),
        ),
        "nce": ({"output.name": "nce", "output.samples": 1_024}, Paper()),
        "hierarchical": ({"output.name": "hierarchical"}, Paper(test=166, hours=0.57)),
        "d_softmax": (
            {
                "output.name": "differentiated",
                "output.table.projected": False,
            },
            Paper(test=195, hours=0.88),
        ),
        "d_softmax_star": (
            {"output.name": "differentiated"},
            Paper(test=147, hours=0.9),
        ),
        "adaptive": ({"output.name": "adaptive"}, Paper(test=147, hours=0.5)),
    }
    in_bands = "d_softmax", "d_softmax_star", "adaptive"
    lines, rows = (), {}
    for corpus, cutoffs in ("penn_treebank", (1_000, 4_000)), ("wikitext2", (2_500, 10_000)):
        epochs = streams(20, WORDS[corpus], epochs=5, window=20)
        layers = {name: papers.LSTM | epochs | changes for name, (changes, _) in outputs.items()}
        for name in in_bands:
            layers[name] |= {"output.table.cutoffs": cutoffs}
        # Slices of width, width / 4 and / 16 fill the hidden state.
        for size, width in ("cpu", 195), ("full", 390):
            slices = {"d_softmax": layers["d_softmax"] | {"output.table.width": width}}
            rows[size, corpus] = {name: Row(name) for name in outputs}, layers | slices
        lines += tuple(Line(corpus, name, paper) for name, (_, paper) in outputs.items())
    full = {"body.features": 512, "body.widths": (512,)}
    return Table(
        "Approximations of the softmax over one LSTM (Grave et al. 2017; published: Table 1, on"
        " Text8)",
        {"cpu": lines, "full": lines},
        {"cpu": LSTM_CPU, "full": full},
        rows,
    )


TABLES = (
    {
        "adaptive_inputs_3": lambda: _transformers("Inputs and outputs", "Table 3"),
        "adaptive_inputs_5": _contexts,
        "adaptive_inputs_6": lambda: _transformers(
            "Dropout in the tails", "Table 6", ("sm", "asm"), 0.1
        ),
        "adaptive_inputs_7": lambda: _transformers(
            "Widths and sharing", "Table 7", ("asm", "sm", "sm_t", "adp_t")
        ),
        "adaptive_inputs_8": lambda: _transformers("Bands", "Table 8", ("adp_t",)),
        "thesis_4_3": lambda: _thesis("penn_treebank"),
        "thesis_4_4": lambda: _thesis("wikitext2"),
        "thesis_4_5": lambda: _thesis("europarl"),
        "thesis_4_6": lambda: _thesis("wikitext103"),
        "thesis_5_1": _thesis_memory,
        "grave_table": _grave,
    }
    | gcnn_tables.TABLES
    | groc_tables.TABLES
)
