"""Coverage of a prepared corpus by possible vocabularies, and the work of an adaptive softmax with
possible cutoffs.
"""

from collections.abc import Mapping

from adaptive_jax.config.keys import at, word_group
from adaptive_jax.data.corpora.load import count_prepared
from adaptive_jax.data.vocabulary.words import UNKNOWN, Vocabulary
from adaptive_jax.model.language_model import LanguageModel, band_shapes
from adaptive_jax.planning.cutoffs import Workload, band_shares, cost, propose, smallest_band

THRESHOLDS = (1, 2, 3, 5, 10)
BANDS = (2, 3, 4, 5)


def workload(config: Mapping, model: LanguageModel) -> Workload:
    """The softmax of a config, as `propose` needs it.

    model: the config's model, with a vocabulary of any size.
    """
    return Workload(
        features=model.output.table.features,
        factor=_banded(config).get("factor", 1),
        width=band_shapes(model)[0].table.shape[1],
    )


def _banded(config):
    """The settings of the layer that defines the softmax's bands."""
    table = config["output"]["table"]
    has_bands = table.get("cutoffs") or "factor" in table
    return table if has_bands else at(config, word_group(config))


def describe(config: Mapping, model: LanguageModel, by_frequency: bool = True) -> str:
    """Lines for a plan: the config's vocabulary and those of other thresholds; the config's cutoffs
    and the cheapest ones. "" for sub-words, ids of a tokenizer, a list of words, and a corpus that
    is not prepared on this machine.

    model: as for `workload`.
    by_frequency: whether bands follow the frequency of words, unlike clusters.
    """
    data = config["data"]
    splits = {} if data["codes"] or data["words"] else count_prepared(data)
    if not splits:
        return ""
    words = Vocabulary.build(splits["train"])
    chosen = data["threshold"], data["limit"]
    vocabularies = {
        limits: words.cut(*limits) for limits in (chosen, *((n, 0) for n in THRESHOLDS))
    }
    lines = []
    for (threshold, limit), vocabulary in vocabularies.items():
        shares = ", ".join(
            f"{_unknown(vocabulary, n):.2%} of {split}" for split, n in splits.items()
        )
        name = "of the config, " * ((threshold, limit) == chosen) + f"threshold {threshold}"
        name += f", limit {limit:,}" if limit else ""
        lines.append(f"{name}: {len(vocabulary):,} words; {shares} become {UNKNOWN}")
    lines = [f"{'words' if i == 0 else '':13}{line}" for i, line in enumerate(lines)]
    if by_frequency:
        lines += _cutoffs(config, model, vocabularies[chosen].counts)
    return "\n".join(lines)


def _unknown(vocabulary, counts):
    """The share of tokens, from the counts of their words, that are or become `<unk>`."""
    covered = sum(n for word, n in counts.items() if word in vocabulary.index and word != UNKNOWN)
    return 1 - covered / sum(counts.values())


def _cutoffs(config, model, counts):
    """A line for the config's cutoffs, and one for the cheapest cutoffs of each number of bands."""
    size, load = len(counts), workload(config, model)
    configured = _banded(config).get("cutoffs", ()) if len(band_shapes(model)) > 1 else ()
    most = size // smallest_band(size)
    bands = [n for n in BANDS if n <= most and load.width >= load.factor ** (n - 1)]
    added = config["init_words"] == "both"  # words of another run follow those of the corpus
    rows = {"of the config": configured} if configured and not added else {}
    rows |= {f"cheapest of {n} bands": propose(counts, n, load)[0] for n in bands}
    full, lines = cost(counts, (), load), []
    for name, cutoffs in rows.items():
        work = cost(counts, cutoffs, load) / full
        shares = " ".join(f"{share:.1%}" for share in band_shares(counts, cutoffs))
        places = ", ".join(f"{cutoff:,}" for cutoff in cutoffs)
        lines.append(f"{name}: {places}; tokens {shares}; {work:.1%} of the full softmax's work")
    return [f"{'cutoffs' if i == 0 else '':13}{line}" for i, line in enumerate(lines)]
