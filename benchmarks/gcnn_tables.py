"""The figures of Dauphin et al. 2017 as tables: activations, linear and bilinear layers, context,
and operations.

In small, WikiText-2 stands for WikiText-103, and single sentences of the Penn Treebank for Billion
Word. Networks that are compared have as many parameters: a layer without gates has 1.41 times the
units, as section 5.2 asks for.
"""

import math
from collections.abc import Mapping

from adaptive_jax.config.rows import Row
from benchmarks.lines import Line, Table, one_cycle
from configs import billion_word, penn_treebank, wikitext2, wikitext103

FILES = {"wikitext103": wikitext103, "billion_word": billion_word}
SMALL = {"wikitext103": wikitext2, "billion_word": penn_treebank}
SENTENCES = {"batches.break_mode": "eos"}
GATED = "glu", "gtu", "bilinear"
UNITS, LAYERS, KERNEL = 200, 6, 4  # of gcnn_small
FULL = {"wikitext103": "gcnn_8", "billion_word": "gcnn_13"}
# Two to three epochs of the Penn Treebank, one of WikiText-2; the rate falls once.
CPU = one_cycle(steps=2_000, every=500, tokens=1_024, warmup=100)
DEPTHS = (2, 2), (1, 3), (4, 2), (2, 3), (8, 2), (4, 3), (8, 3), (4, 5), (8, 5)  # and kernels
# The tokens that a prediction sees, itself among them, by row
CONTEXTS = {f"{layers}_layers_of_{kernel}": layers * (kernel - 1) + 1 for layers, kernel in DEPTHS}


def _units(activation: str, units: int) -> int:
    """Units with as many parameters as `units` gated ones."""
    return units if activation in GATED else round(math.sqrt(2) * units)


def _activation(name: str) -> tuple[dict, Mapping[str, dict]]:
    """What an activation changes: of the network in small, and of each in full."""
    small = {"body.activation": name, "body.blocks": ((LAYERS, KERNEL, _units(name, UNITS)),)}
    small |= {} if name in GATED else {"body.output_width": UNITS}  # that of the tied table
    small |= {"optimizer.learning_rate": 0.05} if name == "bilinear" else {}  # 0.25 diverges
    full = {}
    for corpus, row in FULL.items():
        blocks = FILES[corpus].ROWS[row].changes["body.blocks"]
        wider = tuple(
            (count, *(n if i % 2 == 0 else _units(name, n) for i, n in enumerate(layers)))
            for count, *layers in blocks
        )
        full[corpus] = {"body.activation": name, "body.blocks": wider}
        full[corpus] |= {} if name in GATED else {"body.output_width": blocks[-1][-1]}
    return small, full


def _context(layers: int, kernel: int) -> tuple[dict, Mapping[str, dict]]:
    """What depth and kernel change."""
    full = {corpus: {"body.blocks": ((layers, kernel, 900),)} for corpus in FULL}
    return {"body.blocks": ((layers, kernel, UNITS),)}, full


def _output(name: str) -> tuple[dict, Mapping[str, dict]]:
    """What an output changes, over the same network."""
    changes = {"output.name": name}
    if name == "softmax":
        changes |= {"output.table.cutoffs": ()}
    return changes, dict.fromkeys(FULL, changes)


def _table(title: str, corpora, variants: Mapping[str, tuple], **shown) -> Table:
    """A figure's networks on these corpora, by name; what `shown` of `Table` the figure shows."""
    rows, lines = {}, {"cpu": (), "full": ()}
    for corpus in corpora:
        alone = SENTENCES if corpus == "billion_word" else {}
        near, far = SMALL[corpus], FILES[corpus]
        of = near.__name__.removeprefix("configs.")
        small = {k: v for k, v in near.ROWS["gcnn_small"].changes.items() if k not in CPU}
        large = far.ROWS[FULL[corpus]].changes
        layers = near.ROWS["gcnn_small"].layers
        rows["cpu", of] = (
            {name: Row(layers, small | alone | each) for name, (each, _) in variants.items()},
            near.LAYERS,
        )
        rows["full", corpus] = (
            {name: Row("gcnn", large | each[corpus]) for name, (_, each) in variants.items()},
            far.LAYERS,
        )
        lines["cpu"] += tuple(Line(of, name) for name in variants)
        lines["full"] += tuple(Line(corpus, name) for name in variants)
    return Table(f"{title} (Dauphin et al. 2017)", lines, {"cpu": CPU}, rows, **shown)


TABLES = {
    "gcnn_figure_2": lambda: _table(
        "Perplexity by operations, Figure 2",
        ("billion_word",),
        {name: _output(name) for name in ("adaptive", "softmax")},
        operations=True,
    ),
    "gcnn_figure_3": lambda: _table(
        "Activations, Figure 3", FULL, {n: _activation(n) for n in ("glu", "gtu", "relu", "tanh")}
    ),
    "gcnn_figure_4": lambda: _table(
        "Context: layers and kernel, Figure 4",
        FULL,
        dict(zip(CONTEXTS, (_context(*each) for each in DEPTHS), strict=True)),
        contexts=CONTEXTS,
    ),
    "gcnn_figure_5": lambda: _table(
        "Linear and bilinear layers, Figure 5",
        ("billion_word",),
        {n: _activation(n) for n in ("glu", "bilinear", "linear")},
    ),
}
