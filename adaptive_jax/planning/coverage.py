"""Coverage of a prepared corpus by the vocabularies that it could have, and the work of an adaptive
softmax over its bands.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from adaptive_jax.config.keys import at, word_group
from adaptive_jax.data.corpora.load import count_prepared
from adaptive_jax.data.vocabulary.words import EOS, UNKNOWN, Vocabulary
from adaptive_jax.model.language_model import LanguageModel, band_shapes
from adaptive_jax.planning.cutoffs import Workload, band_shares, cost, propose, smallest_band

THRESHOLDS = (1, 2, 3, 5, 10)
BANDS = (2, 3, 4, 5)


class Folded(NamedTuple):
    """A vocabulary whose rare words are folded into `<unk>`.

    Attributes:
        counts: occurrences in the train split of each word that remains, with `<eos>` and, if there
            is one, `<unk>`: `[V]`, largest first.
        unknown: share of the tokens of each split that become or are `<unk>`.
    """

    counts: np.ndarray
    unknown: dict[str, float]


def fold(
    words: Vocabulary, splits: Mapping[str, np.ndarray], threshold: int, limit: int = 0
) -> Folded:
    """Vocabulary that `words.cut(threshold, limit)` keeps, without building it.

    words: all words of the train split, with `<unk>`. splits: counts of these words in each split,
        train among them, `[words]`.
    """
    special = [words.index[EOS], words.index[UNKNOWN]]
    foldable = np.delete(np.arange(len(words)), special)
    count = int(np.searchsorted(-words.counts[foldable], -threshold, side="right"))
    has_unknown = bool(words.counts[special[1]])
    if limit and count + 1 + (has_unknown or count < len(foldable)) > limit:
        count = limit - 2
    ids = np.append(foldable[:count], special[0])
    counts, unknown = words.counts[ids], words.counts.sum() - words.counts[ids].sum()
    counts = np.append(counts, unknown) if unknown else counts
    shares = {split: float(1 - n[ids].sum() / n.sum()) for split, n in splits.items()}
    return Folded(np.sort(counts)[::-1], shares)


def workload(config: Mapping, model: LanguageModel) -> Workload:
    """The softmax of a config, to divide it into bands.

    model: of the config, with a vocabulary of any size.
    """
    table = config["output"]["table"]
    of_table = table.get("cutoffs") or "factor" in table
    bands = table if of_table else at(config, word_group(config))
    return Workload(
        features=model.output.table.features,
        factor=bands.get("factor", 1),
        width=band_shapes(model)[0].table.shape[1],
    )


def describe(config: Mapping, model: LanguageModel, by_frequency: bool = True) -> str:
    """Lines for a plan: the vocabulary of the config and those of other thresholds; the cutoffs of
    the config and the cheapest ones. "" for sub-words, ids of a tokenizer, a list of words, and a
    corpus that is not prepared on this machine.

    model: as that of `workload`.
    by_frequency: whether bands follow the frequency of words; clusters do not.
    """
    data = config["data"]
    splits = {} if data["codes"] or data["words"] else count_prepared(data)
    if not splits:
        return ""
    words = Vocabulary.build({UNKNOWN: 0} | splits["train"])
    counts = {
        split: np.bincount(words.encode_words([*numbers])[0], [*numbers.values()], len(words))
        for split, numbers in splits.items()
    }
    chosen = data["threshold"], data["limit"]
    lines = []
    for threshold, limit in dict.fromkeys([chosen, *((n, 0) for n in THRESHOLDS)]):
        folded = fold(words, counts, threshold, limit)
        shares = ", ".join(f"{share:.2%} of {split}" for split, share in folded.unknown.items())
        name = "of the config, " * ((threshold, limit) == chosen) + f"threshold {threshold}"
        name += f", limit {limit:,}" if limit else ""
        lines.append(f"{name}: {len(folded.counts):,} words; {shares} become {UNKNOWN}")
    lines = [f"{'words' if i == 0 else '':13}{line}" for i, line in enumerate(lines)]
    if by_frequency:
        counts = fold(words, counts, *chosen).counts
        lines += _cutoffs(config, model, counts)
    return "\n".join(lines)


def _cutoffs(config, model, counts):
    """A line for the cutoffs of the config, and for the cheapest ones of each number of bands."""
    size, load = len(counts), workload(config, model)
    source = at(config, word_group(config))
    configured = config["output"]["table"].get("cutoffs") or source.get("cutoffs", ())
    most = size // smallest_band(size)
    bands = [n for n in BANDS if n <= most and load.width >= load.factor ** (n - 1)]
    rows = {"of the config": configured} if configured else {}
    rows |= {f"cheapest of {n} bands": propose(counts, n, load)[0] for n in bands}
    full, lines = cost(counts, (), load), []
    for name, cutoffs in rows.items():
        work = cost(counts, cutoffs, load) / full
        shares = " ".join(f"{share:.1%}" for share in band_shares(counts, cutoffs))
        places = ", ".join(f"{cutoff:,}" for cutoff in cutoffs)
        lines.append(f"{name}: {places}; tokens {shares}; {work:.1%} of the full softmax's work")
    return [f"{'cutoffs' if i == 0 else '':13}{line}" for i, line in enumerate(lines)]
