"""Preparing a corpus, from text to a vocabulary and ids: speed and memory, beside a plain loop.

    python -m benchmarks.preparation --path=DIR [--corpus=text_files] [--tokeniser=moses]
        [--threshold=3] [--repeats=3]

- `adaptive_jax`: corpora.load with an empty cache.
- `plain loop`: Python, line by line, with a dict of counts and then one of ids. It must produce
  exactly the same ids.

Each runs in a process and a directory of its own. Seconds are from the start of the process to its
end, imports included. Words are those of all splits, <eos> included. Peak memory is that of the
largest of its processes. The text is read once before the first run, so no peer waits for the disk.
"""

import array
import gzip
import hashlib
import lzma
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from absl import flags

from adaptive_jax.config import commands
from adaptive_jax.data.corpora import load as corpora
from adaptive_jax.data.corpora.corpus import SPLITS
from adaptive_jax.data.corpora.text import Text, local_texts
from adaptive_jax.data.corpora.tokenise import tokeniser
from adaptive_jax.data.vocabulary.words import EOS, UNKNOWN
from adaptive_jax.errors import InputError, check_at_least

OURS, PLAIN = "adaptive_jax", "plain loop"
DATA = "corpus", "tokeniser", "lower", "threshold"  # flags named as a config's group `data`


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
    kept = EOS, UNKNOWN
    rare = [word for word, n in counts.items() if n < data["threshold"] and word not in kept]
    if rare:
        counts[UNKNOWN] = counts.get(UNKNOWN, 0) + sum(map(counts.pop, rare))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    index = {word: i for i, word in enumerate(ranked)}
    for split in SPLITS:
        ids = array.array("i")
        for words in lines(split):
            for word in words:
                ids.append(index.get(word, index.get(UNKNOWN)))
        np.save(directory / f"{split}.npy", np.frombuffer(ids, np.int32))


def measure(peer: str, given: list[str]) -> tuple[float, int, int, str]:
    """Runs a peer: its seconds, peak bytes, the number of its tokens and a digest of their ids.

    Raises:
        InputError: it fails.
    """
    with tempfile.TemporaryDirectory() as directory:
        own = [f"--peer={peer}", f"--directory={directory}"]
        command, start = [sys.executable, "-m", "benchmarks.preparation", *own, *given], time.time()
        process = subprocess.Popen(command, cwd=Path(__file__).parents[1])
        _, status, used = os.wait4(process.pid, 0)
        if status:
            raise InputError(f"{' '.join(command)} failed: see its message above")
        seconds, digest, tokens = time.time() - start, hashlib.sha256(), 0
        for split in SPLITS:
            (file,) = Path(directory).rglob(f"{split}.npy")
            ids = np.load(file, mmap_mode="r")
            digest.update(ids)
            tokens += len(ids)
    return seconds, 1024 * used.ru_maxrss, tokens, digest.hexdigest()


def main(settings) -> None:
    """Prints the table; with --peer, runs that peer only."""
    data = {"path": str(Path(settings.path).expanduser().resolve())}
    data |= {name: getattr(settings, name) for name in DATA}
    check_at_least(1, repeats=settings.repeats)
    texts = local_texts(data["path"], SPLITS)
    if any(text.members for text in texts.values()):
        raise InputError(f"--path={settings.path} must be a directory of text, got an archive")
    if settings.peer == OURS:
        return corpora.load(data | {"cache": settings.directory})
    if settings.peer == PLAIN:
        return plain_loop(texts, data, Path(settings.directory))
    for text in texts.values():
        for _ in text.chunks():
            pass
    given, runs = [f"--{name}={value}" for name, value in data.items()], {OURS: [], PLAIN: []}
    for _ in range(settings.repeats):
        for peer, found in runs.items():
            found.append(measure(peer, given))
    if runs[OURS][0][2:] != runs[PLAIN][0][2:]:
        raise RuntimeError(f"the peers made different ids of the same text: {runs}")
    print("| peer | words | seconds | words/s | peak MB |\n|---|---:|---:|---:|---:|")
    for peer, found in runs.items():
        seconds, words = statistics.median(each[0] for each in found), found[0][2]
        peak = max(each[1] for each in found) / 1e6
        print(f"| {peer} | {words:,} | {seconds:,.1f} | {words / seconds:,.0f} | {peak:,.0f} |")


if __name__ == "__main__":  # its worker processes import this file, too
    flags.DEFINE_string("path", None, "Directory with train, valid and test.", required=True)
    flags.DEFINE_string("corpus", "text_files", "Name of the corpus.")
    flags.DEFINE_string("tokeniser", "none", "See data.tokeniser.")
    flags.DEFINE_boolean("lower", False, "See data.lower.")
    flags.DEFINE_integer("threshold", 1, "See data.threshold; 2 or more if text lacks <unk>.")
    flags.DEFINE_integer("repeats", 1, "Runs of each peer.")
    flags.DEFINE_enum("peer", None, [OURS, PLAIN], "Run only this peer, and measure nothing.")
    flags.DEFINE_string("directory", None, "Where that peer writes.")
    commands.run(lambda: main(flags.FLAGS))
