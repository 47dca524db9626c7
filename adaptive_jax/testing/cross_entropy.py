"""Checks cross-entropy losses in JAX against float64; needs only jax and numpy."""

import inspect
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import P

from adaptive_jax.errors import one_line

# Bounds of the relative error of the loss and of the norm of a gradient's relative error. In half
# precision, the logits and their gradient may be rounded once, sums may not.
BOUNDS = {"float32": (1e-5, 1e-5), "bfloat16": (2e-3, 1e-2), "float16": (3e-4, 2e-3)}
SETTINGS = {"ignore_index": -100, "soft_cap": 1.5}


class Case(NamedTuple):
    """Arrays and options of one call of the loss."""

    sizes: tuple[int, int, int] = (61, 13, 1_009)  # tokens, width, words
    dtype: str = "float32"
    scale: float = 1.0  # standard deviation of the logits
    option: str = ""  # keyword argument that the case needs
    ignored: float = 0.0  # share of the tokens
    differentiated: tuple[str, ...] = ("hidden", "table")  # arrays that get a gradient
    jit: bool = True
    specs: dict[str, P] = {}  # for a mesh of all devices; sizes are rounded up to divide by them


CASES = {
    "prime sizes": Case(),
    "powers of two": Case((64, 16, 1_024)),
    "many tokens": Case((4_099, 3, 101)),
    "many words": Case((7, 5, 70_001)),
    "one token": Case((1, 13, 1_009)),
    "large logits": Case(scale=100.0),
    "bfloat16": Case(dtype="bfloat16"),
    "float16": Case(dtype="float16"),
    "without jit": Case(jit=False),
    "frozen table": Case(differentiated=("hidden",)),
    "frozen hidden states": Case(differentiated=("table",)),
    "bias": Case(option="bias", differentiated=("hidden", "table", "bias")),
    "weights": Case(option="weights"),
    "ignored tokens": Case(option="ignore_index", ignored=0.4),
    "all tokens ignored": Case(option="ignore_index", ignored=1.0),
    "soft cap": Case(option="soft_cap", scale=2.0),
    "tokens over devices": Case(specs={"hidden": P("devices"), "targets": P("devices")}),
    "words over devices": Case(specs={"table": P("devices")}),
    "width over devices": Case(specs={"table": P(None, "devices")}),
}


class Result(NamedTuple):
    """Outcome of a case; `passed` is None if it was not run, `errors` are compared with BOUNDS."""

    case: str
    passed: bool | None
    note: str
    errors: tuple[float, float] = (np.nan, np.nan)  # of the loss, and the largest of a gradient


def check_cross_entropy(function: Callable, *, raises: bool = True) -> list[Result]:
    """Compares a loss and its gradients with float64 in every case of `CASES` that it supports.

    Args:
        function: `function(hidden [tokens, width], table [words, width], targets [tokens])`, the
            mean loss in nats. Its signature may have bias `[words]`; weights `[tokens]`, whose sum
            then divides the loss; ignore_index; soft_cap, as `soft_cap · tanh(logits / soft_cap)`.
        raises: if False, failed results are returned without an error.

    Raises:
        AssertionError: has a line for every failed case.
    """

    def mean(differentiated, rest, **settings):
        named = differentiated | rest | settings
        return function(named.pop("hidden"), named.pop("table"), named.pop("targets"), **named)

    eager, options = jax.value_and_grad(mean), {"", *inspect.signature(function).parameters}
    steps = {False: eager, True: jax.jit(eager, static_argnames=tuple(SETTINGS))}
    results = [_result(steps[case.jit], options, name, case) for name, case in CASES.items()]
    failed = [f"\n  {result.case}: {result.note}" for result in results if result.passed is False]
    if failed and raises:
        raise AssertionError(f"{len(failed)} of {len(CASES)} cases failed:{''.join(failed)}")
    return results


def _result(step, options, name, case):
    if case.option not in options:
        return Result(name, None, f"no argument {case.option}")
    devices = jax.device_count() if case.specs else 1
    if case.specs and devices == 1:
        return Result(name, None, "needs several devices")
    settings = {k: v for k, v in SETTINGS.items() if k == case.option}
    arrays = _arrays(case, devices)
    exact = _exact(**{k: np.float64(a) for k, a in arrays.items()}, **settings)
    mesh = jax.make_mesh((devices,), ("devices",), (jax.sharding.AxisType.Auto,))
    layout = {k: jax.NamedSharding(mesh, case.specs.get(k, P())) for k in arrays}
    arrays = jax.device_put(arrays, layout if case.specs else None)
    try:
        loss, gradients = step({k: arrays.pop(k) for k in case.differentiated}, arrays, **settings)
        errors = {k: np.float64(a) - exact[k] for k, a in {"loss": loss, **gradients}.items()}
    except Exception as error:  # another package may raise any type
        return Result(name, False, f"{type(error).__name__}: {one_line(error)}")
    norm = np.linalg.norm
    loss, *gradients = (float(norm(array) / (norm(exact[k]) or 1)) for k, array in errors.items())
    gradient = float(np.max(gradients))  # NaN if one of them is
    loss_bound, bound = BOUNDS[case.dtype]
    bound *= max(1, case.scale)
    note = f"loss off by {loss:.0e} (at most {loss_bound:.0e})"
    note += f", gradient by {gradient:.0e} ({bound:.0e})"
    return Result(name, loss <= loss_bound and gradient <= bound, note, (loss, gradient))


def _arrays(case, devices):
    tokens, width, words = (-(-size // devices) * devices for size in case.sizes)
    rng = np.random.default_rng(0)
    targets = rng.integers(0, words, tokens).astype(np.int32)
    targets[:3] = (words - 1, 0, 0)[:tokens]  # the last word, and the first word twice
    targets[rng.random(tokens) < case.ignored] = SETTINGS["ignore_index"]
    hidden = (case.scale * rng.standard_normal((tokens, width))).astype(jnp.dtype(case.dtype))
    table = (rng.standard_normal((words, width)) * width**-0.5).astype(hidden.dtype)
    options = {"bias": rng.standard_normal(words), "weights": rng.integers(0, 4, tokens) / 2}
    options = {k: np.float32(a) for k, a in options.items() if k == case.option}
    return {"hidden": hidden, "table": table, "targets": targets, **options}


def _exact(hidden, table, targets, bias=0.0, weights=1.0, ignore_index=None, soft_cap=1e12):
    tanh = np.tanh((hidden @ table.T + bias) / soft_cap)  # a cap of 1e12 changes nothing
    log_probs = soft_cap * tanh - np.logaddexp.reduce(soft_cap * tanh, axis=1, keepdims=True)
    weights = (weights * (targets != ignore_index))[:, None]
    weights = weights / max(weights.sum(), 1e-30)  # a mean over no tokens is 0
    one_hot = np.arange(len(table))[None] == targets[:, None]
    d_logits = weights * (np.exp(log_probs) - one_hot) * (1 - tanh**2)
    gradients = {
        "hidden": d_logits @ table,
        "table": d_logits.T @ hidden,
        "bias": d_logits.sum(axis=0),
    }
    return gradients | {"loss": -(weights * log_probs * one_hot).sum()}
