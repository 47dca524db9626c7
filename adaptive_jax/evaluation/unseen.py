"""How much of a text a model cannot know: tokens that are `<unk>`, and words that its vocabulary was not learnt from."""

import logging

from adaptive_jax.data.corpora.corpus import Corpus

logger = logging.getLogger(__name__)

MANY = 0.05  # the share from which a perplexity says little about the text


def describe_words(corpus: Corpus, split: str) -> str:
    """Says it of a split: "<unk> 2.1%, unseen words 1.9%". Warns where one of the two is above 5 %. Reads all ids."""
    unknown, unseen = corpus.vocabulary.unknown(corpus.ids[split]), corpus.unseen.get(split)
    shares = f"<unk> {unknown:.1%}, unseen words {'not known' if unseen is None else f'{unseen:.1%}'}"
    if max(unknown, unseen or 0.0) > MANY:
        message = "%s split: %s: its perplexity says little about the text; is it tokenised like the train split?"
        logger.warning(message, split, shares)
    return shares
