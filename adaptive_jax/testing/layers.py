"""Checks that inputs, bodies and outputs of any package must pass."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adaptive_jax.numerics.batch import Batch

TIME, ROWS = 8, 3
SEGMENTS = (1, 1, 1, 2, 3, 3, 0, 0)  # 0: padding
RTOL, ATOL = 1e-4, 2e-5


def check_input(layer: Any, variables: Any = None, *, own_rows: bool = True) -> None:
    """Checks that an input returns the rows of its table, reads at most `reach` earlier tokens, and
    has gradients for the words it reads.

    Args:
        layer: a linen module with `vocabulary_size`, `features`, `bands()`, and, if it remembers
            tokens, their number `reach`; see docs/adding_a_layer.md.
        variables: of the layer; None: the layer is initialised.
        own_rows: False if words share parameters, such as those of their letters.

    Raises:
        AssertionError: the vector of a token without earlier ones is not its row of `bands()`, or
            its width is not `features`; a word that was read has no gradient, or with `own_rows`
            another word has one; a vector depends on another segment, on later tokens, or on tokens
            further back than `reach`.
    """
    words = jnp.arange(layer.vocabulary_size)
    reach = getattr(layer, "reach", 0)
    variables = _variables(layer, variables, words[:, None])
    _check_reach(layer, variables, reach)
    tokens = jnp.stack([words[::2], words[::2][::-1]])
    tokens = tokens.reshape(-1, 1) if reach else tokens  # one token a row

    @jax.jit
    def results(variables):
        def vectors(params):
            return layer.apply(variables | {"params": params}, tokens)

        values, pull = jax.vjp(vectors, variables["params"])
        [gradient] = pull(jax.random.normal(jax.random.key(3), values.shape, values.dtype))
        bands = layer.apply(variables, method="bands")
        return values, bands, _row_norms(layer.apply, variables, gradient, method="bands")

    vectors, bands, gradients = results(variables)
    table = np.concatenate([band.vectors() for band in bands])
    _equal(table.shape, (len(words), layer.features), "the shape of bands()'s vectors")
    _close(vectors, table[np.asarray(tokens)], "vectors are not the rows of bands()")
    if own_rows:
        _equal(np.flatnonzero(gradients).tolist(), words[::2].tolist(), "words with a gradient")


def _check_reach(layer, variables, reach):
    """Checks the tokens on which a vector depends."""
    tokens = jax.random.randint(jax.random.key(4), (ROWS, TIME), 0, layer.vocabulary_size)
    numbers, segments = jnp.zeros_like(tokens), jnp.tile(jnp.array([SEGMENTS]), (ROWS, 1))
    batch = Batch(tokens, numbers, numbers, jnp.arange(ROWS), segments)
    columns = [np.flatnonzero(np.equal(SEGMENTS, number)) for number in {*SEGMENTS} - {0}]
    begins = 1, TIME // 2

    @jax.jit
    def results(variables):
        def part(begin):
            before = jnp.pad(tokens[:, :begin], ((0, 0), (reach, 0)), constant_values=-1)
            before = {"earlier": before[:, begin:]} if reach else {}
            return layer.apply(variables, tokens[:, begin:], **before)

        alone = [layer.apply(variables, tokens[:, segment]) for segment in columns]
        sentences = layer.apply(variables, tokens, batch)
        inside = [sentences[:, segment] for segment in columns]
        first = layer.apply(variables, tokens[:, : TIME // 2])
        return layer.apply(variables, tokens), [*map(part, begins)], first, inside, alone

    vectors, parts, first, inside, alone = results(variables)
    for begin, rest in zip(begins, parts, strict=True):
        _close(rest, vectors[:, begin:], f"vectors depend on more than {reach} earlier tokens")
    _close(first, vectors[:, : TIME // 2], "vectors depend on later tokens")
    for segment, expected in zip(inside, alone, strict=True):
        _close(segment, expected, "vectors depend on tokens of another segment")


def check_body(layer: Any, variables: Any = None) -> None:
    """Checks that a hidden state depends on its own and all earlier tokens of its segment and on no
    others, and that reading a row in two parts gives the same hidden states.

    Args:
        layer: a linen module with `features`, `initial_carry(rows)` and `cache(rows, length)`,
            which maps vectors `[rows, time, features]`, a carry and a `Batch` to hidden states and
            the next carry.
        variables: of the layer; None: the layer is initialised.

    Raises:
        AssertionError: a hidden state depends on a later token or another segment, or not on its
            own or an earlier token; a carry changes hidden states; the carry after `()` is not
            `()`.
    """
    vectors = jax.random.normal(jax.random.key(0), (ROWS, TIME, layer.features))
    variables = _variables(layer, variables, vectors[:1])
    segments = jnp.array([SEGMENTS])
    numbers = jnp.zeros((1, TIME), jnp.int32)
    batch = Batch(numbers, numbers, numbers, jnp.arange(1), segments)
    run = jax.jit(layer.apply)

    @jax.jit
    def reached(*arguments):
        """Sizes of the gradients of hidden states with respect to vectors, `[time, time]`."""

        def state(position, vectors):
            hidden, _ = layer.apply(variables, vectors, *arguments)
            pull = jax.random.normal(jax.random.key(2), hidden.shape[-1:])
            return jnp.vdot(hidden[0, position], pull)

        gradients = jax.vmap(jax.grad(state, argnums=1), (0, None))(jnp.arange(TIME), vectors[:1])
        return jnp.abs(gradients[:, 0]).sum(axis=-1)

    causal = np.tril(np.ones((TIME, TIME), bool))
    _equal((np.asarray(reached()) > 0).tolist(), causal.tolist(), "tokens that a state reads")
    same_segment, tokens = causal & np.asarray(segments == segments.T), sum(map(bool, SEGMENTS))
    in_segments = np.asarray(reached((), batch)) > 0
    _equal(in_segments[:tokens].tolist(), same_segment[:tokens].tolist(), "tokens of a segment")
    states, carry = run(variables, vectors)
    assert carry == (), f"the carry after () must be (), got {carry}"
    carries = {"cache": layer.cache(ROWS, TIME), "initial_carry": layer.initial_carry(ROWS)}
    for name, carry in carries.items():
        parts = []
        for part in jnp.split(vectors, 2, axis=1) if jax.tree.leaves(carry) else ():
            hidden, carry = run(variables, part, carry)
            parts.append(hidden)
        if parts:
            _close(jnp.concatenate(parts, axis=1), states, f"halves from {name} are not the whole")


def check_output(
    module: Any,
    variables: Any = None,
    *,
    own_rows: bool = True,
    part: Callable = lambda module: module,
) -> None:
    """Checks that an output is normalised, that its loss, nll and log_probs agree, and that every
    word gets a gradient.

    Args:
        module: a linen module such as an `adaptive_jax.Output`, whose table has `features`.
        variables: of the module; None: the module is initialised.
        own_rows: False if words share parameters; their gradients are not checked.
        part: function from the module to the output, such as `lambda model: model.output` for a
            language model.

    Raises:
        AssertionError: probabilities do not sum to 1; the nll is not minus the log-probability of
            the target, for any order of the tokens; the loss is not the weighted sum of the nll, or
            depends on tokens of weight 0; a word has no gradient; the output has parameters
            that `setup` does not make, such as those of an `nn.Dense`.
    """

    def call(name, variables, *arrays):
        method = lambda module, *arrays: getattr(part(module), name)(*arrays)
        return module.apply(variables, *arrays, method=method)

    features = part(module).table.features
    hidden = jax.random.normal(jax.random.key(2), (1, features))
    if variables is None:
        # A run initialises its output without a call.
        variables = module.init(jax.random.key(0), method=lambda module: part(module).bands())
        after_call = module.init(jax.random.key(0), hidden, method="log_probs")
        missing = sorted(_names(after_call["params"]) - _names(variables["params"]))
        assert not missing, (
            f"`setup` must make all parameters, with self.param, got none for {missing}"
        )
    words = jax.eval_shape(functools.partial(call, "log_probs"), variables, hidden).shape[-1]
    hidden = jax.random.normal(jax.random.key(2), (words, features))
    targets, weights = jnp.arange(words), jnp.linspace(0, 2, words)
    orders = jnp.stack([targets, jax.random.permutation(jax.random.key(5), words)])

    @jax.jit
    def results(variables):
        def loss(params, *arrays):
            return call("loss", variables | {"params": params}, *arrays)

        def gradient_of(word):
            token = hidden[:1], word[None], jnp.ones(1)
            gradient = jax.grad(lambda params: loss(params, *token).total)(variables["params"])
            bands = lambda module: part(module).table.bands()
            return _row_norms(module.apply, variables, gradient, method=bands)[word]

        log_probs = call("log_probs", variables, hidden)
        nll = jax.lax.map(lambda order: call("nll", variables, hidden[order], order), orders)
        damaged = hidden.at[0].set(jnp.nan)  # of weight 0
        total = loss(variables["params"], damaged, targets, weights)
        gradients = jax.vmap(gradient_of)(targets) if own_rows else jnp.ones(words)
        return log_probs, nll, total, gradients

    log_probs, nll, loss, gradients = jax.tree.map(np.asarray, results(variables))
    _close(np.logaddexp.reduce(log_probs, axis=1), 0, "probabilities do not sum to 1")
    expected = -np.diag(log_probs)
    _close(nll, expected[np.asarray(orders)], "nll is not minus log_probs")
    _close(loss.nll, np.where(weights == 0, 0, expected), "the loss's nll is not minus log_probs")
    _close(loss.total, np.sum(weights * expected), "the loss is not the weighted sum of the nll")
    assert (gradients > 1e-4).all(), f"word {np.argmin(gradients)} has no gradient"


def _row_norms(apply, variables, gradient, method):
    """Sums of absolute values of the rows of a gradient's bands, `[words]`."""
    bands = apply(variables | {"params": gradient}, method=method)
    return jnp.concatenate([jnp.abs(band.table).sum(axis=1) for band in bands])


def _variables(layer, variables, *arrays):
    return layer.init(jax.random.key(0), *arrays) if variables is None else variables


def _names(params):
    return {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)}


def _equal(value, expected, name):
    assert value == expected, f"{name} must be {expected}, got {value}"


def _close(value, expected, message):
    np.testing.assert_allclose(value, expected, RTOL, ATOL, err_msg=message)
