"""The words that occur in a split, whether or not a vocabulary has them."""

from collections.abc import Mapping

from adaptive_jax.data.corpora import kept, known
from adaptive_jax.data.corpora.kept import cache_of
from adaptive_jax.data.corpora.load import checked_settings, shards_of, source_of, texts_of
from adaptive_jax.errors import InputError


def occurring(data: Mapping, split: str) -> dict[str, int]:
    """How often each word of a split occurs, `<eos>` once a line.

    data: as of `adaptive_jax.data.corpora.load.load`, whose cache is used.

    Raises:
        InputError: as `load`, and for a URL, which holds no words but those of its vocabulary.
    """
    settings = checked_settings(data)
    corpus, path = settings[:2]
    if "://" in path or corpus == "ids":
        raise InputError(
            f"{path} holds ids of one vocabulary: for the words of a text give the text itself as"
            " --data_path=DIR"
        )
    cache = cache_of(settings.cache)
    texts = texts_of(corpus, path, [split])
    how = settings.tokeniser, settings.lower
    home = cache / corpus / source_of(corpus, texts, *how)
    with kept.usable(cache):
        home.mkdir(parents=True, exist_ok=True)

        def text():
            return (texts or known.published(corpus, home.parents[1] / "published"))[split]

        shards = shards_of(home / "shards" / split, text, f"{corpus} {split}", *how)
        with kept.bar("counting words") as show:
            return shards.counts(show)
