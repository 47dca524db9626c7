"""Preparing a corpus, from text to a vocabulary and ids: speed and memory, against two peers in one
run.

    python -m benchmarks.preparation --path=DIR [--corpus=text_files] [--tokeniser=moses]
        [--threshold=3] [--repeats=3]

Each peer counts the words of the train split and then writes files with the ids of every split:

- `adaptive_jax`: corpora.load with an empty cache.
- `plain loop`: Python, line by line, with a dict of counts and then one of ids. It must produce
  exactly the same ids.
- `fairseq`: fairseq-preprocess on all cores, from unpacked text, where it is on the PATH and no
  tokeniser is asked for.

Each runs in a process and a directory of its own. Seconds are from the start of the process to its
end, imports included. Words are those of all splits, <eos> included. Peak memory is the resident
memory of the process and its children, sampled with psutil; pages that they share count more than
once. The text is read once before the first run, so no peer waits for the disk.
"""

import array
import contextlib
import gzip
import hashlib
import importlib.util
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

from adaptive_jax.config import commands
from adaptive_jax.data.corpora import load as corpora
from adaptive_jax.data.corpora.corpus import SPLITS
from adaptive_jax.data.corpora.text import NAMES, Text, local_texts
from adaptive_jax.data.corpora.tokenise import tokeniser
from adaptive_jax.data.vocabulary.words import EOS, UNKNOWN
from adaptive_jax.errors import InputError, check_at_least

ROOT = Path(__file__).parents[1]
OURS, PLAIN, FAIRSEQ = "adaptive_jax", "plain loop", "fairseq"
DATA = {
    "corpus": "text_files",
    "tokeniser": "none",
    "lower": False,
    "threshold": 1,
}  # flags named as a config's group `data`


def plain_loop(texts: dict[str, Text], data: dict, directory: Path) -> None:
    """Writes `train.npy`, `validation.npy` and `test.npy`, the ids that corpora.load makes, in
    the most usual way.
    """
    tokenise = tokeniser(data["tokeniser"], data["lower"])

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
    rare = [
        word
        for word, count in counts.items()
        if count < data["threshold"] and word not in (EOS, UNKNOWN)
    ]
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
    """Unpacks the text into a directory, and returns the command that runs fairseq-preprocess
    on it.
    """
    for split in SPLITS:
        with (directory / split).open("wb") as file:
            file.writelines(chunk.data for chunk in texts[split].chunks())
    prefixes = [f"--{NAMES[split][0]}pref={directory / split}" for split in SPLITS]
    where = [
        f"--destdir={directory / 'ids'}",
        f"--workers={os.cpu_count()}",
        f"--thresholdsrc={threshold}",
    ]
    return ["fairseq-preprocess", "--only-source", *prefixes, *where]


def measure(arguments: list[str]) -> tuple[float, int]:
    """Runs a command and returns its seconds and its peak memory in bytes. InputError if it
    fails.
    """
    import psutil

    start, peak = time.perf_counter(), 0
    with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        parent = psutil.Process(process.pid)
        while process.poll() is None:
            with contextlib.suppress(psutil.Error):  # a process may end meanwhile
                peak = max(
                    peak,
                    sum(
                        one.memory_info().rss for one in (parent, *parent.children(recursive=True))
                    ),
                )
            time.sleep(0.1)
    seconds = time.perf_counter() - start
    if process.returncode:
        raise InputError(
            f"{' '.join(arguments)} failed with status {process.returncode}: read its message above"
        )
    return seconds, peak


def ids_in(directory: Path) -> tuple[int, str]:
    """The number of tokens of the three splits below a directory, and a digest of their ids."""
    digest, tokens = hashlib.sha256(), 0
    for split in SPLITS:
        (file,) = directory.rglob(f"{split}.npy")
        ids = np.load(file, mmap_mode="r")
        digest.update(ids)
        tokens += len(ids)
    return tokens, digest.hexdigest()


def compare(texts: dict[str, Text], data: dict, repeats: int, peers: list[str]) -> list[dict]:
    """One row for each peer: its name, the words, the median of its seconds and its peak in
    bytes.
    """
    for text in texts.values():
        for _ in text.chunks():
            pass
    given, runs, made = (
        [f"--{name}={value}" for name, value in data.items()],
        {peer: [] for peer in peers},
        {},
    )
    for _ in range(repeats):
        for peer in peers:
            with tempfile.TemporaryDirectory() as directory:
                if peer == FAIRSEQ:
                    runs[peer].append(
                        measure(fairseq_command(texts, Path(directory), data["threshold"]))
                    )
                    continue
                own = [
                    sys.executable,
                    "-m",
                    "benchmarks.preparation",
                    f"--peer={peer}",
                    f"--directory={directory}",
                ]
                runs[peer].append(measure([*own, *given]))
                made[peer] = ids_in(Path(directory))
    if made[OURS] != made[PLAIN]:
        raise RuntimeError(f"the peers made different ids of the same text: {made}")
    rows = []
    for peer, taken in runs.items():
        seconds, peaks = zip(*taken, strict=True)
        rows.append(
            {
                "peer": peer,
                "words": made[OURS][0],
                "seconds": statistics.median(seconds),
                "peak": max(peaks),
            }
        )
    return rows


def table(rows: list[dict], given: str) -> str:
    """Markdown for RESULTS.md: date, machine, versions, the command, and a line for each peer."""
    machine = f"{os.cpu_count()} CPU cores, {platform.system()}"
    versions = f"python {platform.python_version()}, numpy {np.__version__}"
    lines = [
        f"""{date.today()}, {machine}; {versions}; memory by psutil.

    python -m benchmarks.preparation --path=DIR {given}

| peer | words | seconds | words/s | peak MB | time / adaptive_jax |
|---|---:|---:|---:|---:|---:|"""
    ]
    for row in rows:
        lines.append(
            f"| {row['peer']} | {row['words']:,} | {row['seconds']:,.1f} |"
            f" {row['words'] / row['seconds']:,.0f} | {row['peak'] / 1e6:,.0f} |"
            f" {row['seconds'] / rows[0]['seconds']:.2f} |"
        )
    return "\n".join(lines)


def main(settings) -> None:
    """Prints the table; with --peer, runs that peer only."""
    data = {"path": str(Path(settings.path).expanduser().resolve())} | {
        name: getattr(settings, name) for name in DATA
    }
    check_at_least(1, repeats=settings.repeats)
    texts = local_texts(data["path"], SPLITS)
    if any(text.members for text in texts.values()):
        raise InputError(
            f"--path={settings.path} is an archive, and the peers read files: give a directory of"
            " text"
        )
    if settings.peer == OURS:
        corpora.load(data | {"cache": settings.directory})
    elif settings.peer == PLAIN:
        plain_loop(texts, data, Path(settings.directory))
    elif not importlib.util.find_spec("psutil"):
        raise InputError("benchmarks.preparation measures memory with psutil: pip install psutil")
    else:
        as_is = data["tokeniser"] == "none" and not data["lower"]
        peers = [OURS, PLAIN] + [FAIRSEQ] * (
            as_is and shutil.which("fairseq-preprocess") is not None
        )
        given = [f"--{name}={data[name]}" for name in DATA if data[name] != DATA[name]]
        print(
            table(
                compare(texts, data, settings.repeats, peers),
                " ".join([*given, f"--repeats={settings.repeats}"]),
            )
        )


if __name__ == "__main__":  # its worker processes import this file, too
    flags.DEFINE_string(
        "path", None, "Directory with train, valid and test as text.", required=True
    )
    flags.DEFINE_string("corpus", DATA["corpus"], "Name of the corpus.")
    flags.DEFINE_string("tokeniser", DATA["tokeniser"], "See data.tokeniser.")
    flags.DEFINE_boolean("lower", DATA["lower"], "See data.lower.")
    flags.DEFINE_integer(
        "threshold", DATA["threshold"], "See data.threshold; text without <unk> needs 2 or more."
    )
    flags.DEFINE_integer("repeats", 1, "Runs of each peer.")
    flags.DEFINE_enum(
        "peer", None, [OURS, PLAIN], "Run only this peer, in this process, and measure nothing."
    )
    flags.DEFINE_string("directory", None, "Where that peer writes.")
    commands.run(lambda: main(flags.FLAGS))
