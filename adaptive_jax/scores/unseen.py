"""Out-of-vocabulary statistics of a text: words that are `<unk>`, and words that the training text
lacks.
"""

import logging

from adaptive_jax.data.corpora.corpus import Corpus
from adaptive_jax.data.vocabulary.subwords import Subwords
from adaptive_jax.data.vocabulary.words import UNKNOWN

logger = logging.getLogger(__name__)

MANY = 0.05  # the share from which a perplexity says little about the text


def describe_words(corpus: Corpus, split: str) -> str:
    """Both shares of a split: "<unk> 2.1%, unseen words 1.9%", of ids "unseen tokens 0.1%". Reads
    all ids.

    Warns if more than 5 % of the words are unseen, unless units spell them, or more than 5 % are
    `<unk>` and that is twice the train split's share. (The published Penn Treebank has `<unk>` for
    rare words: 4.8 % of its train split and 5.8 % of its test split.)
    """
    vocabulary = corpus.vocabulary
    unknown, unseen = vocabulary.unk_rate(corpus.ids[split]), corpus.unseen.get(split)
    counts, usual = vocabulary.counts, 0.0
    if UNKNOWN in vocabulary.words:
        usual = counts[vocabulary.index[UNKNOWN]] / max(1, counts[vocabulary.ends_word].sum())
    shares = f"unseen {vocabulary.unit}s {'not known' if unseen is None else f'{unseen:.1%}'}"
    if vocabulary.unit == "word":
        shares = f"<unk> {unknown:.1%}, {shares}"
    spelt = isinstance(vocabulary, Subwords)
    if unknown > max(MANY, 2 * usual) or (not spelt and (unseen or 0.0) > MANY):
        message = (
            "%s split: %s: its perplexity says little about the text; is it tokenised like the"
            " train split?"
        )
        logger.warning(message, split, shares)
    return shares
