"""Preparing a corpus, from text to a vocabulary and ids: speed and memory, against two peers in one run.

    python -m benchmarks.preparation --path=DIR [--corpus=text_files] [--tokeniser=moses] [--threshold=3] [--repeats=3]

Peers, each counting the words of the train split and then encoding every split, into files of ids:

- `adaptive_jax`: corpora.load with an empty cache.
- `plain loop`: Python, line by line, with a dict of counts and then one of ids. It must end with the very same ids.
- `fairseq`: fairseq-preprocess where it is on the PATH and no tokeniser is asked for, on all cores, from text already unpacked.

Each runs in a process of its own, with a directory of its own that is removed afterwards. Seconds are from the start of the
process to its end, imports included; words are those of all splits, <eos> included. Peak memory is the resident memory of the
process and all that it started, summed and sampled with psutil, pages that they share counted more than once; without
psutil it is that of the largest single process. The text is read once before, so no peer waits for the disk.
"""

import array
import contextlib
import gzip
import hashlib
import lzma
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import numpy as np
from absl import flags

from adaptive_jax import command
from adaptive_jax.data.corpora import load as corpora
from adaptive_jax.data.corpora.text import SPLITS, Text, local_texts
from adaptive_jax.data.corpora.tokenise import tokeniser
from adaptive_jax.data.vocabulary.words import EOS, UNKNOWN
from adaptive_jax.errors import InputError, check_at_least

ROOT = Path(__file__).parents[1]
OURS, PLAIN, FAIRSEQ = "adaptive_jax", "plain loop", "fairseq"


def plain_loop(texts: dict[str, Text], directory: Path, threshold: int, tokenise) -> None:
    """Writes `train.npy`, `validation.npy` and `test.npy`: what corpora.load makes, in the most usual way."""

    def lines(split):
        for file in texts[split].files:
            unpack = {".xz": lzma.open, ".gz": gzip.open}.get(file.suffix, open)
            with unpack(file, "rt", encoding="utf-8", newline="\n") as stream:
                for line in stream:
                    yield (*tokenise(line.rstrip("\n")).split(), EOS)

    counts = {}
    for words in lines("train"):
        for word in words:
            counts[word] = counts.get(word, 0) + 1
    rare = [word for word, count in counts.items() if count < threshold and word not in (EOS, UNKNOWN)]
    if rare:
        counts[UNKNOWN] = counts.get(UNKNOWN, 0) + sum(map(counts.pop, rare))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    index = {word: i for i, word in enumerate(ranked)}
    unknown = index.get(UNKNOWN)
    for split in SPLITS:
        ids = array.array("i")
        for words in lines(split):
            for word in words:
                ids.append(index.get(word, unknown))
        np.save(directory / f"{split}.npy", np.frombuffer(ids, np.int32))


def fairseq_command(texts: dict[str, Text], directory: Path, threshold: int) -> list[str]:
    """Unpacks the text into a directory, and says how fairseq-preprocess is to be called on it."""
    for split in SPLITS:
        with (directory / split).open("wb") as file:
            file.writelines(chunk.data for chunk in texts[split].chunks())
    names = {"train": "train", "validation": "valid", "test": "test"}
    prefixes = [f"--{names[split]}pref={directory / split}" for split in SPLITS]
    where = [f"--destdir={directory / 'ids'}", f"--workers={os.cpu_count()}", f"--thresholdsrc={threshold}"]
    return ["fairseq-preprocess", "--only-source", *prefixes, *where]


def measure(arguments: list[str]) -> tuple[float, int]:
    """Seconds that a command takes, and its peak memory in bytes. InputError if it fails."""
    start = time.perf_counter()
    with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        peak = _sampled(process) if memory_by() == "psutil" else _largest(process)
    seconds = time.perf_counter() - start
    if process.returncode:
        raise InputError(f"{' '.join(arguments)} ended with status {process.returncode}: see what it said above")
    return seconds, peak


def memory_by() -> str:
    """How memory is measured here: "psutil" or "ru_maxrss"."""
    with contextlib.suppress(ImportError):
        import psutil

        return psutil.__name__
    return "ru_maxrss"


def _sampled(process):
    import psutil

    whole, peak = psutil.Process(process.pid), 0
    while process.poll() is None:
        resident = 0
        with contextlib.suppress(psutil.Error):  # one that ends meanwhile
            for one in (whole, *whole.children(recursive=True)):
                resident += one.memory_info().rss
        peak = max(peak, resident)
        time.sleep(0.1)
    return peak


def _largest(process):
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def ids_in(directory: Path) -> tuple[int, str]:
    """Tokens of the three splits that lie somewhere in a directory, and a digest of them."""
    digest, tokens = hashlib.sha256(), 0
    for split in SPLITS:
        (file,) = directory.rglob(f"{split}.npy")
        ids = np.load(file, mmap_mode="r")
        digest.update(ids)
        tokens += len(ids)
    return tokens, digest.hexdigest()


def table(rows: list[dict], what: str) -> str:
    """Markdown for RESULTS.md: date, machine and versions, the command, and a line a peer."""
    versions = f"python {platform.python_version()}, numpy {np.__version__}"
    lines = [
        f"{date.today()}, {os.cpu_count()} CPU cores, {platform.system()}; {versions}; memory by {memory_by()}.",
        "",
        f"    python -m benchmarks.preparation --path=DIR {what}",
        "",
        "| peer | words | seconds | words/s | peak MiB | time / adaptive_jax |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {row['peer']} | {row['words']:,} | {row['seconds']:,.1f} | {row['words'] / row['seconds']:,.0f} "
            f"| {row['peak'] / 2**20:,.0f} | {row['seconds'] / rows[0]['seconds']:.2f} |"
        )
    return "\n".join(lines)


def compare(texts: dict[str, Text], given: list[str], threshold: int, peers: list[str], repeats: int) -> list[dict]:
    """A row a peer: its name, the words, the median of its seconds, and the peak of its bytes.

    given: the flags that the peers of this module are run with.
    """
    for text in texts.values():
        for _ in text.chunks():
            pass
    runs, made = {peer: [] for peer in peers}, {}
    for _ in range(repeats):
        for peer in peers:
            with tempfile.TemporaryDirectory() as directory:
                if peer == FAIRSEQ:
                    runs[peer].append(measure(fairseq_command(texts, Path(directory), threshold)))
                    continue
                own = [sys.executable, "-m", "benchmarks.preparation", f"--peer={peer}", f"--directory={directory}"]
                runs[peer].append(measure([*own, *given]))
                made[peer] = ids_in(Path(directory))
    if made[OURS] != made[PLAIN]:
        raise RuntimeError(f"the peers made other ids of the same text: {made}")
    words = made[OURS][0]
    return [
        {"peer": peer, "words": words, "seconds": statistics.median(seconds), "peak": max(peaks)}
        for peer, (seconds, peaks) in ((peer, zip(*taken, strict=True)) for peer, taken in runs.items())
    ]


def main(settings: flags.FlagValues) -> None:
    """Prints the table; or, called for one peer, runs it."""
    path = Path(settings.path).expanduser().resolve()
    texts = local_texts(settings.corpus, str(path), SPLITS)
    if any(text.members for text in texts.values()):
        raise InputError(f"--path={settings.path} is an archive, and the peers read files: give a directory of text")
    what = {"tokeniser": settings.tokeniser, "lower": settings.lower}
    if settings.peer == OURS:
        corpora.load(settings.corpus, str(path), settings.directory, settings.threshold, **what)
    elif settings.peer == PLAIN:
        tokenise = tokeniser(settings.tokeniser, settings.lower)
        plain_loop(texts, Path(settings.directory), settings.threshold, tokenise)
    else:
        check_at_least(1, repeats=settings.repeats)
        names = [name for name in ("corpus", *what, "threshold") if settings[name].present]
        given = [f"--{name}={settings[name].value}" for name in names]
        as_is = settings.tokeniser == "none" and not settings.lower
        peers = [OURS, PLAIN] + [FAIRSEQ] * (as_is and shutil.which("fairseq-preprocess") is not None)
        rows = compare(texts, [f"--path={path}", *given], settings.threshold, peers, settings.repeats)
        print(table(rows, " ".join([*given, f"--repeats={settings.repeats}"])))


def _define() -> flags.FlagValues:
    flags.DEFINE_string("path", None, "Directory with train, valid and test as text.", required=True)
    flags.DEFINE_string("corpus", "text_files", "Name of the corpus.")
    flags.DEFINE_string("tokeniser", "none", "See data.tokeniser.")
    flags.DEFINE_boolean("lower", False, "See data.lower.")
    flags.DEFINE_integer("threshold", 1, "See data.threshold; text without <unk> needs 2 or more.")
    flags.DEFINE_integer("repeats", 1, "Runs of each peer.")
    flags.DEFINE_enum("peer", None, [OURS, PLAIN], "Run this peer alone, in this process, and measure nothing.")
    flags.DEFINE_string("directory", None, "Where such a peer writes.")
    return flags.FLAGS


if __name__ == "__main__":  # its worker processes import this file, too
    defined = _define()
    command.run(lambda: main(defined))
