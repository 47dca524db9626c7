"""Weights of `torch.nn.AdaptiveLogSoftmaxWithLoss` in and out of `AdaptiveSoftmax`, bit by bit.

    layer, params = from_torch(module.state_dict())
    state = to_torch(layer.bind({"params": params}))
    module.load_state_dict({name: torch.from_numpy(array) for name, array in state.items()})

Torch is not imported: tensors and numpy arrays will do. There, clusters are the last rows of the
head, in the order of the tails, as they are the last columns here; a tail is a projection
`tail.i.0.weight [width, features]` and a table `tail.i.1.weight [words, width]`.
"""

import itertools
import reprlib
from collections.abc import Mapping

import jax
import numpy as np

from adaptive_jax.errors import InputError
from adaptive_jax.outputs.softmax import AdaptiveSoftmax


def from_torch(state: Mapping[str, object], **settings) -> tuple[AdaptiveSoftmax, dict]:
    """A layer and its parameters, float32, from the `state_dict()` of torch's module.

    Shapes give the sizes and cutoffs. With head_bias, the layer has a bias for every word, 0 in the
    tails: the probabilities are the same, and further training also learns these.

    Args:
        state: tensors or numpy arrays under torch's names.
        settings: other fields of the layer, such as tail_dropout.

    Raises:
        InputError: tensors that are missing, left over, not finite or do not fit together, or tails
            whose widths need a fractional div_value.
    """
    arrays = {name: _float32(name, tensor) for name, tensor in state.items()}
    tails = range(sum(name.endswith(".1.weight") for name in arrays))
    names = ["head.weight", *(f"tail.{i}.{j}.weight" for i in tails for j in (0, 1))]
    if not tails or {*arrays} - {"head.bias"} != {*names}:
        raise InputError(
            "state must have head.weight, tail.i.0.weight and tail.i.1.weight, got"
            f" {reprlib.repr(sorted(arrays))}"
        )
    head, bias = arrays["head.weight"], arrays.get("head.bias")
    projections, tables = ([arrays[f"tail.{i}.{j}.weight"] for i in tails] for j in (0, 1))
    words, features = len(head) - len(tails), head.shape[-1]
    shapes = {"head.weight": (max(words, 1) + len(tails), features), "head.bias": (len(head),)}
    for i, table in enumerate(tables):
        shapes[f"tail.{i}.0.weight"] = table.shape[-1], features
        shapes[f"tail.{i}.1.weight"] = len(table), table.shape[-1]
    for name, array in arrays.items():
        if array.shape != shapes[name]:
            raise InputError(f"{name} must have shape {shapes[name]}, got {array.shape}")
    *cutoffs, vocabulary_size = itertools.accumulate([words, *map(len, tables)])
    layer = AdaptiveSoftmax(
        vocabulary_size=vocabulary_size,
        features=features,
        cutoffs=tuple(cutoffs),
        factor=_div_value([table.shape[-1] for table in tables], features),
        bias=bias is not None,
        **settings,
    )
    tables = [head[:words], *tables]
    table = {f"table_{i}": array for i, array in enumerate(tables)}
    table |= {f"projection_{i}": array for i, array in enumerate(projections, 1)}
    # Many bands of one width share parameters.
    names = jax.eval_shape(lambda: layer.init(jax.random.key(0), method="bands"))["params"]["table"]
    if "table" in names:
        table["table"] = np.concatenate(tables)
    if "projections" in names:
        table["projections"] = np.stack(projections)
    if "bias" in names:
        table["bias"] = np.pad(bias[:words], (0, vocabulary_size - words))
    params = {"table": {name: table[name] for name in names}, "clusters": head[words:]}
    if bias is not None:
        params["cluster_bias"] = bias[words:]
    return layer, params


def _div_value(widths, features):
    """The integer div_value that gives tails of these widths."""
    for value in range(1, features + 1):
        if 0 not in widths and widths == [features // value**i for i in range(1, len(widths) + 1)]:
            return value
    raise InputError(
        f"tails must have the widths of a whole div_value for {features} features, got"
        f" {reprlib.repr(widths)}: pass them to adaptive_cross_entropy as bands"
    )


def to_torch(softmax) -> dict[str, np.ndarray]:
    """The state, float32, of a `torch.nn.AdaptiveLogSoftmaxWithLoss` with a layer's probabilities.

    Args:
        softmax: a layer with its parameters: `layer.bind({"params": params})`, or one of
            `adaptive_jax.nnx`. For a layer of a model: `model.apply(variables, method=lambda m:
            to_torch(m.softmax))`.

    Raises:
        InputError: a layer that torch's module cannot express: one band, a head without words or
            with a projection, or a tail without a projection or with a bias.
    """
    (head, *tails), clusters = softmax.arrays()
    needs = {
        "cutoffs": tails,
        "words in its head": len(head.table),
        "a head without a projection": head.projection is None,
        "a projection in every tail": all(tail.projection is not None for tail in tails),
        "no bias in a tail": not any(np.any(tail.bias) for tail in tails if tail.bias is not None),
    }
    if missing := [need for need, fulfilled in needs.items() if not fulfilled]:
        raise InputError(f"a softmax for torch's module must have {missing[0]}")
    state = {"head.weight": np.concatenate([head.table, clusters.table])}
    if head.bias is not None:
        state["head.bias"] = np.concatenate([head.bias, clusters.bias])
    for i, tail in enumerate(tails):
        state |= {f"tail.{i}.0.weight": tail.projection, f"tail.{i}.1.weight": tail.table}
    return {name: np.array(array, np.float32) for name, array in state.items()}


def _float32(name, array):
    """A tensor or an array as a NumPy array of float32."""
    if hasattr(array, "detach"):
        array = array.detach().cpu()
        array = (array if array.is_complex() else array.float()).numpy()
    array = np.asarray(array)
    with np.errstate(over="ignore"):
        array = array if np.iscomplexobj(array) else array.astype(np.float32)
    if np.iscomplexobj(array) or not np.isfinite(array).all():
        raise InputError(f"{name} must be real and finite, got {array.dtype}: NaN, inf or complex")
    return array
