"""Identity of a run: the settings, words and text by which a resumed run, or another host of the
run, is the same.

An identity is a dict of values by name: settings by dotted key, "vocabulary", and "train text" and
so on. Two identities are compared in the names that both have, see `differences`. A run also has a
random id, which stands in text.json and in each of its checkpoints.
"""

import hashlib
import json
import zlib
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from adaptive_jax.data.corpora.corpus import Corpus
from adaptive_jax.data.vocabulary.words import Vocabulary, pieces
from adaptive_jax.errors import InputError, one_line
from adaptive_jax.optimizers import optim
from adaptive_jax.parallel import sharding
from adaptive_jax.runs.checkpoints import recorded, steps_in
from adaptive_jax.runs.settings import as_json, read_config, read_words, to_json

LEXICONS = "input.lexicon", "input.words.lexicon"
# Settings that may change when a run is resumed: none of them changes an update that does not
# diverge. (evaluate_every: unless `optim.waits`.)
FREE = {
    "steps",
    "hours",
    "log_every",
    "evaluate_every",
    "checkpoint_every",
    "keep",
    "early_stopping",
    "divergence",
    "metrics.tensorboard",
    "metrics.wandb",
    "tokens_per_device",
    "fsdp",
    "shard_words",
    "body.remat",
    "data.path",
    "data.vocabulary_size",
    "data.tokenizer",  # of these files the run keeps its own copies, which are compared
    "data.words",
    *LEXICONS,
    "input.counts",
}
# Settings that may differ between the hosts of a run
OF_A_HOST = {
    "data.path",
    "data.tokenizer",
    "data.words",
    "output.clusters",
    *LEXICONS,
    "input.counts",
}
ID = "id"  # key of text.json and of a checkpoint's metadata
ENDS = 1 << 16  # tokens at each end of a text that its checksum reads


def free_keys(config: Mapping) -> set[str]:
    """The settings that may change when a run of this config is resumed."""
    return FREE - {"evaluate_every"} if optim.waits(config) else FREE


def of_config(config: Mapping) -> dict[str, object]:
    """The settings of a run, without those that may change. Of a file of clusters only that there
    is one: cutoffs and vocabulary tell whether its clusters are the same.
    """
    free = free_keys(config)
    settings = {key: value for key, value in as_json(config).items() if key not in free}
    return settings | {"output.clusters": settings["output.clusters"] and "a file"}


def of_corpus(corpus: Corpus) -> dict[str, object]:
    """The words of a corpus in their order, and the text of each split."""
    return {"vocabulary": _words(corpus.vocabulary), **_texts(text_of(corpus))}


def of_workdir(workdir: Path) -> dict[str, object]:
    """The identity of the run in a workdir: config.json, vocabulary.txt and, but for runs from
    before there was one, text.json. {} where no run has begun.

    Raises:
        InputError: one of them is missing or damaged.
    """
    if not (workdir / "config.json").exists():
        return {}
    texts, _ = _read_text(workdir)
    return of_config(read_config(workdir)) | {"vocabulary": _words(read_words(workdir)), **texts}


def id_of(workdir: Path) -> str:
    """The id of the run in a workdir; "" for none, and for runs from before there was one. Raises
    InputError: text.json is damaged.
    """
    return _read_text(workdir)[1]


def _read_text(workdir):
    """The texts of a run as an identity has them, and its id; of text.json."""
    path = workdir / "text.json"
    try:
        content = json.loads(path.read_text()) if path.exists() else {}
        return _texts(content), str(content.get(ID, ""))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(
            f"{path} is damaged ({one_line(error)[:80]}): remove it to resume without its check"
        ) from error


def text_of(corpus: Corpus) -> dict[str, dict]:
    """The content of text.json: of each split, its number of tokens, and a checksum of those at
    its ends.
    """

    def size_and_checksum(ids):
        ends = np.concatenate([ids[:ENDS], ids[max(0, len(ids) - ENDS) :]])
        return {"tokens": len(ids), "crc32": zlib.crc32(ends.astype("<i4").tobytes())}

    return {split: size_and_checksum(ids) for split, ids in corpus.ids.items()}


def differences(
    old: Mapping, new: Mapping, form: str = "{key} was {old} and is now {new}"
) -> list[str]:
    """A phrase for each name that both identities have with different values."""
    return [
        form.format(key=key, old=_shown(old[key]), new=_shown(new[key]))
        for key in sorted(old.keys() & new.keys())
        if old[key] != new[key]
    ]


def check_resumes(workdir: Path, identity: Mapping) -> None:
    """Raises InputError if the run that has begun in `workdir` differs from this one, or holds
    checkpoints of another training, whose workdir was removed while it trained.
    """
    if differ := differences(of_workdir(workdir), identity):
        raise InputError(
            f"{workdir} holds another run: {'; '.join(differ)}. Undo what has changed, or use"
            " another --workdir"
        )
    run = id_of(workdir)
    for step in steps_in(workdir / "checkpoints"):
        directory = workdir / "checkpoints" / str(step)
        if run and (other := recorded(directory, ID)) and other != run:
            raise InputError(
                f"{directory} was saved by another training than that of {workdir}: remove it, or"
                " move it to a workdir of its own"
            )


def check_hosts(settings: Mapping, corpus: Corpus | None = None) -> None:
    """Raises InputError if hosts differ in a setting, their number of devices, words or texts. Such
    hosts would update, evaluate or end at different steps, and wait for each other for ever.
    """
    values = {key: value for key, value in as_json(settings).items() if key not in OF_A_HOST}
    values |= {"devices": jax.local_device_count()} | (of_corpus(corpus) if corpus else {})
    first, *other_hosts = map(json.loads, sharding.texts_of_hosts(to_json(values)))
    for host, other in enumerate(other_hosts, start=1):
        form = f"{{key}}={{old}} on host 0 and {{new}} on host {host}"
        if differ := differences(first, other, form):
            raise InputError(
                f"{'; '.join(differ)} must be the same on all hosts: pass the same flags and"
                " prepare the same text on all"
            )


def of_scores(step: int, checkpoint: bytes, vocabulary: Vocabulary, ids: np.ndarray) -> str:
    """16 hexadecimal digits that differ when the parameters, the words or the text of scores do.

    step, checkpoint: `step` and `identity` of a Run.
    """
    return digest(f"{step} {vocabulary.digest}", checkpoint, ids)[:16]


def digest(*parts: str | bytes | np.ndarray) -> str:
    """SHA-256 of texts, bytes and arrays, one after the other, in hexadecimal digits."""
    total = hashlib.sha256()
    for part in parts:
        if isinstance(part, str | bytes):
            total.update(part.encode() if isinstance(part, str) else part)
        else:
            for piece in pieces(part):
                total.update(np.ascontiguousarray(piece))
    return total.hexdigest()


def _words(vocabulary: Vocabulary):
    return f"{len(vocabulary):,} words of digest {vocabulary.digest}"


def _texts(content):
    """The texts of the content of text.json, as an identity has them."""
    return {
        f"{split} text": f"{text['tokens']:,} tokens of checksum {text['crc32']:08x}"
        for split, text in content.items()
        if split != ID
    }


def _shown(value):
    return value if value != "" else "empty"
