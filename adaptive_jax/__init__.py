"""adaptive_jax: language models with very large vocabularies, in JAX."""

import importlib

_HOMES = {
    "AdaptiveInput": "inputs.adaptive",
    "AdaptiveSoftmax": "outputs.adaptive",
    "LanguageModel": "model",
    "Lookup": "inputs.lookup",
    "OwnTable": "outputs.tables",
    "Softmax": "outputs.softmax",
    "TiedTable": "outputs.tables",
    "build": "model",
}
__all__ = list(_HOMES)


def __getattr__(name: str):
    """The layers, imported when asked for: processes that prepare text should not wait for JAX, nor hold it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
