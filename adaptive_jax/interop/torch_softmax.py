"""Weights of `torch.nn.AdaptiveLogSoftmaxWithLoss` in and out of `AdaptiveSoftmax`, bit by bit.

    layer, params = from_torch(module.state_dict())
    state = to_torch(layer.bind({"params": params}))
    module.load_state_dict({name: torch.from_numpy(array) for name, array in state.items()})

Torch is not imported: tensors and numpy arrays will do. There, clusters are the last rows of the
head, in the order of the tails, as they are the last columns here; a tail is a projection
`tail.i.0.weight [width, features]` and a table `tail.i.1.weight [words, width]`.
"""

import itertools
from collections.abc import Mapping

import jax
import numpy as np

from adaptive_jax.errors import InputError
from adaptive_jax.outputs.softmax import AdaptiveSoftmax


def from_torch(state: Mapping[str, object], **settings) -> tuple[AdaptiveSoftmax, dict]:
    """A layer and its parameters, float32, from the `state_dict()` of torch's module.

    Sizes and cutoffs are read off the shapes. With head_bias, the layer has a bias for every word,
    0 for those of the tails: the same probabilities, and further training learns them too.

    Args:
        state: tensors or numpy arrays under torch's names.
        settings: other fields of the layer, such as tail_dropout.

    Raises:
        InputError: tensors that are missing, left over or do not fit together, tails without
            width or of widths that are not those of a whole div_value, or settings that the state
            says.
    """
    if not isinstance(state, Mapping):
        raise InputError(f"{type(state).__name__} must be a state: use module.state_dict()")
    arrays = {name: _float32(tensor) for name, tensor in state.items()}
    tails = sum(name.endswith(".1.weight") for name in arrays)
    expected = [f"tail.{i}.{j}.weight" for i in range(tails) for j in (0, 1)]
    wrong = {*arrays} - {"head.bias"} ^ {"head.weight", *expected}
    if wrong or not tails:
        raise InputError(
            f"a state of {_listed(arrays)} must have head.weight, tail.i.0.weight and"
            " tail.i.1.weight: use the state_dict() of torch.nn.AdaptiveLogSoftmaxWithLoss"
        )
    head, bias = arrays["head.weight"], arrays.get("head.bias")
    projections, tables = ([arrays[name] for name in expected[i::2]] for i in (0, 1))
    words, features = len(head) - tails, head.shape[-1]
    widths = [table.shape[-1] for table in tables]
    shapes = {"head.weight": (max(words, 1) + tails, features), "head.bias": (words + tails,)}
    for i, (table, width) in enumerate(zip(tables, widths, strict=True)):
        shapes |= {
            f"tail.{i}.0.weight": (width, features),
            f"tail.{i}.1.weight": (len(table), width),
        }
    for name, shape in shapes.items():
        if name in arrays and arrays[name].shape != shape:
            raise InputError(
                f"{name} of shape {list(arrays[name].shape)} must be {list(shape)} to fit the"
                " others: use the state of one module"
            )
    sizes = [words, *map(len, tables)]
    *cutoffs, vocabulary_size = itertools.accumulate(sizes)
    from_state = {
        "vocabulary_size": vocabulary_size,
        "features": features,
        "cutoffs": tuple(cutoffs),
        "factor": _factor(features, widths),
        "bias": bias is not None,
    }
    for name in {"table", *from_state} & settings.keys():
        raise InputError(f"{name}={settings[name]!r} is what the state says: leave it out")
    layer = AdaptiveSoftmax(**from_state, **settings)
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
        table["bias"] = np.concatenate([bias[:words], np.zeros(sum(sizes[1:]), np.float32)])
    params = {"table": {name: table[name] for name in names}, "clusters": head[words:]}
    if bias is not None:
        params["cluster_bias"] = bias[words:]
    return layer, params


def to_torch(softmax) -> dict[str, np.ndarray]:
    """The state, float32, of a `torch.nn.AdaptiveLogSoftmaxWithLoss` with a layer's probabilities.

    Args:
        softmax: a layer with its parameters: `layer.bind({"params": params})`, or one of
            `adaptive_jax.nnx`; that of a model in `model.apply(variables, method=lambda m:
            to_torch(m.softmax))`.

    Raises:
        InputError: a layer that torch's module cannot express: one band, a projection of the head,
            a tail without one, or a bias in a tail.
    """
    if not hasattr(softmax, "arrays") or getattr(softmax, "scope", softmax) is None:
        raise InputError(
            f"{type(softmax).__name__} must be an adaptive softmax with its parameters: use"
            ' softmax.bind({"params": params})'
        )
    (head, *tails), clusters = softmax.arrays()
    if not len(head.table):
        raise InputError("a head of classes alone must have words for torch's module: use cutoffs")
    if not tails:
        raise InputError("a softmax of 1 band must have cutoffs for torch's module: add one")
    if head.projection is not None:
        raise InputError(
            f"a head with a projection {list(head.projection.shape)} must have none for torch's"
            " module: make the first band as wide as the features"
        )
    state = {"head.weight": np.concatenate([_float32(head.table), _float32(clusters.table)])}
    if head.bias is not None:
        state["head.bias"] = np.concatenate([_float32(head.bias), _float32(clusters.bias)])
    for i, (table, projection, bias) in enumerate(tails):
        if projection is None:
            raise InputError(f"tail {i} must have a projection for torch's module: use OwnTable")
        if bias is not None and np.any(bias):
            raise InputError(
                f"tail {i} must have no bias for torch's module, and has one up to"
                f" {np.abs(bias).max():.3g}: make it 0"
            )
        state |= {f"tail.{i}.0.weight": _float32(projection), f"tail.{i}.1.weight": _float32(table)}
    return state


def _float32(array):
    """A tensor of torch, or what numpy reads, as an array of float32."""
    if hasattr(array, "detach"):
        array = array.detach().cpu().float().numpy()
    return np.array(array, np.float32)


def _factor(features, widths):
    """The whole number by which each band is narrower than the one before it."""
    if 0 in widths:
        raise InputError(
            f"tail {widths.index(0)} of width 0 must be 1 wide or more: of {features} features and"
            " this div_value torch gives all its words one probability, which no layer here does"
        )
    for factor in range(1, features + 1):
        if widths == [features // factor ** (i + 1) for i in range(len(widths))]:
            return factor
    raise InputError(
        f"tails of widths {_listed(widths)} must be those of a whole div_value for {features}"
        " features: pass them to adaptive_cross_entropy as bands"
    )


def _listed(values, most=2):
    values = [str(value) for value in values]
    return ", ".join(values[:most]) + ", ..." * (len(values) > most)
