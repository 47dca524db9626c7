"""Start of a run: checks of its workdir, and the files that say what the run is."""

import logging
import re
import tempfile
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax

from adaptive_jax.data.corpora.corpus import Corpus
from adaptive_jax.data.vocabulary.lexicon import lexicon_of, read_entries, write_entries
from adaptive_jax.data.vocabulary.ngrams import count_for, counted_settings
from adaptive_jax.data.vocabulary.ngrams import write as write_counts
from adaptive_jax.data.vocabulary.on_disk import write_with_checksums
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.errors import InputError
from adaptive_jax.files import absolute, in_bucket, names_in, replacing
from adaptive_jax.parallel import hosts, sharding
from adaptive_jax.runs.checkpoints import steps_in
from adaptive_jax.runs.identity import (
    ID,
    check_resumes,
    free_keys,
    id_of,
    of_config,
    of_corpus,
    text_of,
)
from adaptive_jax.runs.settings import NGRAMS, PUBLISHED, is_exported, write_json

# Beginnings of the names that a dry run leaves, or a run that ended before it wrote config.json
EARLY_FILES = ".", "plan.", "vocabulary.", "subwords.", "tokenizer.", "lexicon.", "ngrams.", "text."
# Keys that may change when a run resumes, and are a difference from a published row
DIFFERENCES = {"steps", "hours", "early_stopping", "data.words", "data.tokenizer"}
# Seconds until all hosts see a file that one of them wrote: NFS may cache its absence for 60
VISIBLE = 100

logger = logging.getLogger(__name__)


def write_published(
    workdir: Path, config: Mapping, row: Mapping | None, changed: Iterable[str]
) -> None:
    """Records what a paper prints of the row of a run, and the keys in which the run differs from
    that row; nothing without a row.

    row: as `config.flags.published` returns it.
    changed: keys of the config; those that change no update are left out, but for how long the run
        trains, and its words.
    """
    if row is not None and hosts.first():
        free = free_keys(config) - DIFFERENCES
        keys = [key for key in dict.fromkeys(changed) if key not in free]
        write_json(workdir / PUBLISHED, {**row, "changed": keys})


def check_name(workdir: Path) -> None:
    """Raises InputError if Orbax would write checkpoints of this workdir elsewhere, or not find
    them again.
    """
    name = str(absolute(workdir))
    if re.search(r"[\\\[\udc80-\udcff]", name):  # the last are bytes that Python could not decode
        raise InputError(
            f"{name} must be UTF-8 without \\ and [: use another name, or set LANG=C.UTF-8"
        )


def check_place(workdir: Path) -> None:
    """Checks, before a long preparation, that a run can begin or resume in `workdir`. Warns of
    other files there.

    Raises:
        InputError: see `check_name`; or it holds an exported model, or checkpoints without a
            config.
        OSError: the directory cannot be made or written.
    """
    check_name(workdir)
    if is_exported(workdir):
        raise InputError(
            f"{workdir} holds an exported model, which cannot be trained on: use another"
            f" --workdir, and --init_from={workdir} to start from its parameters"
        )
    if hosts.first():
        _check_writable(workdir)
    if (workdir / "config.json").exists():
        return
    if steps_in(workdir / "checkpoints"):
        raise InputError(
            f"{workdir} has checkpoints and no config.json: restore it, or use another --workdir"
        )
    other_files = (name for name in names_in(workdir) if not name.startswith(EARLY_FILES))
    if other := min(other_files, default=""):
        text = "--workdir=%s holds other files, such as %s: a run needs a directory of its own"
        logger.warning(text, workdir, other)


def _check_writable(workdir):
    if in_bucket(workdir):
        return
    path = workdir.absolute()
    nearest = next(place for place in (path, *path.parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        error.filename = str(workdir)  # instead of the temporary file's
        raise


def begin(workdir: Path, config: dict, plan: dict, corpus: Corpus) -> None:
    """Writes the files that say what the run is. The first host does; the others wait until they
    see them.

    Raises:
        InputError: another run is there, the hosts do not share a disk, or their settings or texts
            differ.
    """
    check_resumes(workdir, of_config(config) | of_corpus(corpus))
    hosts.barrier("before the workdir")  # all have checked for another run there
    if hosts.first():
        workdir.mkdir(parents=True, exist_ok=True)
    _check_shared(workdir)
    if hosts.first():
        write_words(workdir, config, corpus.vocabulary)
        name = id_of(workdir) or uuid.uuid4().hex
        write_json(workdir / "text.json", {ID: name, **text_of(corpus)})
        write_json(workdir / "plan.json", plan)
        write_json(workdir / "config.json", config)
    hosts.barrier("the workdir")
    deadline = time.monotonic() + VISIBLE
    while not (workdir / "config.json").exists() and time.monotonic() < deadline:
        time.sleep(1)


def write_ngrams(workdir: Path, config: Mapping, vocabulary: Vocabulary, ids=()) -> None:
    """Writes the n-grams that the input of a new run reads, if it reads counted ones; see
    `adaptive_jax.data.vocabulary.ngrams.count_for`.

    ids: of the train split.
    """
    if counted_settings(config) and not (workdir / "config.json").exists():
        write_counts(workdir / NGRAMS, vocabulary, count_for(config, vocabulary, ids))


def write_words(workdir: Path, config: dict, vocabulary: Vocabulary) -> None:
    """Writes the vocabulary of a run, and of a new one the entries of its words in the lexicon."""
    write_with_checksums(vocabulary, workdir / "vocabulary.txt")
    if (lexicon := lexicon_of(config)) and not (workdir / "config.json").exists():
        write_entries(workdir / "lexicon.jsonl", read_entries(vocabulary, lexicon))


def _check_shared(workdir):
    """Raises InputError on all hosts if one of them does not see what host 0 writes there.

    The file has a new name each time: NFS asks its server for a name that it has never looked up.
    """
    if not jax.distributed.is_initialized():
        return
    probe = workdir / f".shared-{sharding.texts_of_hosts(uuid.uuid4().hex)[0]}"
    if hosts.first():
        with replacing(probe):
            pass
    hosts.barrier("the probe of the workdir")
    missing = sharding.sum_over_hosts(not probe.exists())
    if hosts.first():
        probe.unlink()
    if missing:
        raise InputError(
            f"{workdir} is not the same on all hosts: use a --workdir on a disk that they share, or"
            " gs://BUCKET/NAME"
        )
