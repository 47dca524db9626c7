"""The figures of Dauphin et al. 2017 as tables: activations, linear and bilinear layers, context,
operations, and weight normalisation and clipping.

Scaled down, WikiText-2 stands for WikiText-103, and single sentences of the Penn Treebank for
Billion Word. Networks that are compared have as many parameters: a layer without gates has 1.41
times the units, as section 5.2 asks for.
"""

import math
from collections.abc import Callable, Mapping

from adaptive_jax.config.rows import Row
from benchmarks.lines import CORPORA, Line, Table, one_cycle

# By the paper's corpus: a row of it, and the corpus that stands for it in small
NETWORKS = {
    "wikitext103": ("gcnn_8", "wikitext2"),
    "billion_word": ("gcnn_13", "penn_treebank"),
}
GATED = "glu", "gtu", "bilinear"
UNITS = {"cpu": 200, "full": 900}
SMALL_RATES = {"bilinear": 0.05}  # of which 0.25 diverges
# Two to three epochs of the Penn Treebank, one of WikiText-2; the rate falls once.
CPU = one_cycle(steps=2_000, every=500, tokens=1_024, warmup=100)
DEPTHS = (2, 2), (1, 3), (4, 2), (2, 3), (8, 2), (4, 3), (8, 3), (4, 5), (8, 5)  # and kernels
# The tokens that a prediction sees, itself among them, by row
CONTEXTS = {f"{layers}_layers_of_{kernel}": layers * (kernel - 1) + 1 for layers, kernel in DEPTHS}
# What Figure 6 leaves out, and the rates of which the paper chose the best for each
ABLATIONS = {
    "both": {},
    "no_clipping": {"optimizer.clip_norm": None, "divergence": "skip"},
    "no_weight_norm": {"body.weight_norm": False},
}
RATES = 1.0, 0.1, 0.01
# What a network of a size, which has these blocks, changes
Variant = Callable[[str, tuple], dict]


def _activation(name: str) -> Variant:
    """With an activation, and as many parameters as with a gate."""

    def changes(size, blocks):
        if name in GATED:
            return {"body.activation": name, "body.blocks": blocks}
        wider = tuple(
            (count, *(n if i % 2 == 0 else round(math.sqrt(2) * n) for i, n in enumerate(layers)))
            for count, *layers in blocks
        )
        width = {"body.output_width": blocks[-1][-1]}  # scaled down, that of the tied table
        return {"body.activation": name, "body.blocks": wider} | width

    return changes


def _context(layers: int, kernel: int) -> Variant:
    """With a depth and a kernel."""
    return lambda size, _: {"body.blocks": ((layers, kernel, UNITS[size]),)}


def _ablation(changes: Mapping[str, object], rate: float) -> Variant:
    """Without a part, at a rate."""
    return lambda *_: changes | {"optimizer.learning_rate": rate}


def _output(name: str) -> Variant:
    """With an output over a table of its own; scaled down, of these bands."""

    def changes(size, _):
        if name == "softmax":
            return {"output.name": name, "output.table.cutoffs": ()}
        bands = {"output.table.cutoffs": (2_000, 5_000)} if size == "cpu" else {}
        return {"output.name": name} | bands

    return changes


def _table(title: str, corpora, variants: Mapping[str, Variant], operations: bool = False) -> Table:
    """A figure's networks on these corpora, by name. operations: as in `Table`."""
    rows, lines = {}, {"cpu": (), "full": ()}
    for corpus in corpora:
        full, near = NETWORKS[corpus]
        for size, of, name in ("cpu", near, "gcnn_small"), ("full", corpus, full):
            layers, changes, _ = CORPORA[of].ROWS[name]
            if size == "cpu":
                changes = {key: value for key, value in changes.items() if key not in CPU}
                changes |= {"batches.break_mode": "eos"} if corpus == "billion_word" else {}
            made = {}
            for each, variant in variants.items():
                own = variant(size, changes["body.blocks"])
                if size == "cpu" and each in SMALL_RATES:
                    own["optimizer.learning_rate"] = SMALL_RATES[each]
                made[each] = Row(layers, changes | own)
            rows[size, of] = made, CORPORA[of].LAYERS
            lines[size] += tuple(Line(of, each) for each in variants)
    return Table(f"{title} (Dauphin et al. 2017)", lines, {"cpu": CPU}, rows, operations=operations)


TABLES = {
    "gcnn_figure_2": lambda: _table(
        "Perplexity by operations, Figure 2",
        ("billion_word",),
        {name: _output(name) for name in ("adaptive", "softmax")},
        operations=True,
    ),
    "gcnn_figure_3": lambda: _table(
        "Activations, Figure 3",
        NETWORKS,
        {n: _activation(n) for n in ("glu", "gtu", "relu", "tanh")},
    ),
    "gcnn_figure_4": lambda: _table(
        "Context: layers and kernel, Figure 4",
        NETWORKS,
        dict(zip(CONTEXTS, (_context(*each) for each in DEPTHS), strict=True)),
    ),
    "gcnn_figure_5": lambda: _table(
        "Linear and bilinear layers, Figure 5",
        ("billion_word",),
        {n: _activation(n) for n in ("glu", "bilinear", "linear")},
    ),
    "gcnn_figure_6": lambda: _table(
        "Weight normalisation and clipping, Figure 6",
        ("billion_word",),
        {f"{n}_{rate:g}": _ablation(c, rate) for n, c in ABLATIONS.items() for rate in RATES},
    ),
}
