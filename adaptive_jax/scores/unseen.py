"""Out-of-vocabulary statistics of a text: the shares of `<unk>`, and of words that the training
text lacks.
"""

import logging

from adaptive_jax.data.corpora.corpus import Corpus

logger = logging.getLogger(__name__)

MANY = 0.05  # a perplexity says little about a text with a larger share of unseen words


def warn_of_unseen(unseen: int, words: int) -> None:
    """Warns if more than 5 % of the words are unseen."""
    if unseen > MANY * words:
        logger.warning(
            "%.1f%% of the words are unseen and read as <unk>: is the text tokenised as in"
            " training?",
            100 * unseen / words,
        )


def describe_words(corpus: Corpus, split: str) -> str:
    """Describes both shares of a split: "<unk> 2.1%, unseen words 1.9%", or "unseen tokens 0.1%"
    for ids. Reads all ids.

    Warns if more than 5 % of the words are unseen, unless sub-words spell them. A literal `<unk>`
    in the text is not unseen: the published WikiText-2 and Penn Treebank have it for rare words.
    """
    vocabulary = corpus.vocabulary
    unknown, unseen = vocabulary.unk_rate(corpus.ids[split]), corpus.unseen.get(split)
    shares = f"unseen {vocabulary.unit}s {'not known' if unseen is None else f'{unseen:.1%}'}"
    if vocabulary.unit == "word":
        shares = f"<unk> {unknown:.1%}, {shares}"
    if not vocabulary.mark and (unseen or 0.0) > MANY:
        message = (
            "%s split: %s: its perplexity says little about the text; prepare it as the train split"
            " was, or train with a lower data.threshold or with data.codes"
        )
        logger.warning(message, split, shares)
    return shares
