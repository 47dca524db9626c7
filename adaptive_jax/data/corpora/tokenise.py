"""Words of a line of running text, set apart by spaces: what corpora that are already tokenised do without."""

import functools
from collections.abc import Callable

from adaptive_jax.errors import check_known


def moses() -> Callable[[str], str]:
    """The tokeniser of Moses, as ported by sacremoses, for English: `"Mr Smith's."` becomes `"Mr Smith 's ."`."""
    import sacremoses

    tokenizer = sacremoses.MosesTokenizer(lang="en")
    return lambda line: tokenizer.tokenize(line, return_str=True, escape=False)


TOKENISERS = {"none": lambda: str, "moses": moses}


@functools.cache
def tokeniser(name: str, lower: bool) -> Callable[[str], str]:
    """Line to line, by the name of a tokeniser, and in lower case or not.

    The case is lowered last: to a tokeniser a capital tells where a sentence begins. Raises InputError for other names.
    """
    check_known(f"data.tokeniser={name!r}", name, TOKENISERS)
    split = TOKENISERS[name]()
    return (lambda line: split(line).lower()) if lower else split
