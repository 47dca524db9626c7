"""The other output layers as peers of `benchmarks.outputs`, each as it trains."""

import jax

from adaptive_jax.outputs.differentiated import Differentiated
from adaptive_jax.outputs.sampled import NCE, Sampled
from adaptive_jax.outputs.softmax import Hierarchical
from adaptive_jax.outputs.tables import OwnTable
from adaptive_jax.planning.cutoffs import Workload, equal_products

# By which the vectors of each band are shorter than those of the band before, as in the adaptive
# softmax here
FACTOR = 4


def layers(width: int, vocabulary: int, cutoffs: tuple[int, ...]) -> dict:
    """Name to layer, for hidden states of `width`."""
    full, samples = OwnTable(vocabulary, width), 8_192 if vocabulary > 100_000 else 1_024
    equal = equal_products(vocabulary, 3, Workload(width, FACTOR))
    first = (
        width * FACTOR**2 // (FACTOR**2 + FACTOR + 1)
    )  # so that three slices fit the hidden states
    return {
        "hierarchical 3 clusters": Hierarchical(OwnTable(vocabulary, width, equal, FACTOR)),
        "hierarchical sqrt(V) classes": Hierarchical(full),
        f"sampled {samples}": Sampled(full, samples),
        f"nce {samples}": NCE(full, samples),
        "D-softmax": Differentiated(
            OwnTable(vocabulary, width, cutoffs, FACTOR, first, projected=False), "slices"
        ),
        "D-softmax*": Differentiated(OwnTable(vocabulary, width, cutoffs, FACTOR)),
    }


def peers(case, hidden: jax.Array, targets: jax.Array) -> dict:
    """Name to `(loss, (hidden, parameters, targets))`; `loss` of these three is the summed training
    loss.

    case: a `benchmarks.outputs.Case`. Layers of one band share a table, to save memory.
    """
    table = jax.random.normal(jax.random.key(0), (case.vocabulary, case.width)) * case.width**-0.5
    made = {}
    for name, layer in layers(*case[:3]).items():

        def loss(hidden, params, targets, layer=layer):
            rngs = {"dropout": jax.random.key(0)}
            return layer.apply(
                {"params": params}, hidden, targets, train=True, rngs=rngs, method="loss"
            ).total

        init = jax.jit(
            lambda layer=layer: layer.init(jax.random.key(0), hidden[:1], method="log_probs")[
                "params"
            ]
        )
        shapes = jax.eval_shape(init)
        if shapes["table"].keys() == {"table_0"}:
            params = {"table": {"table_0": table}}
            if "clusters" in shapes:
                params["clusters"] = table[: shapes["clusters"].shape[0]]
        else:
            params = init()
        made[name] = loss, (hidden, params, targets)
    return made
