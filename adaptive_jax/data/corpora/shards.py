"""Text as shards: the distinct words of a few MiB of text, and the text as indices into them.

    the cat      words  the cat <eos> hat
    the hat      ids    0 1 2 0 3 2            counts  2 1 2 1

Parallel processes read and tokenise the text once, whatever vocabularies follow: counts of a corpus
are sums over its shards, and a vocabulary looks up each distinct word of a shard once. A shard is
written in one step, so a preparation that was killed resumes after the last one. The same text
gives the same bytes.
"""

import collections
import contextlib
import itertools
import json
import multiprocessing
import operator
import os
import re
import signal
import threading
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np

from adaptive_jax.config import signals
from adaptive_jax.data.batches.examples import ranges
from adaptive_jax.data.corpora.cached import damaged
from adaptive_jax.data.corpora.text import Chunk, Text, check_eos, encoding_fault
from adaptive_jax.data.corpora.tokenise import tokeniser
from adaptive_jax.data.vocabulary.words import BYTE_ORDER_MARK, EOS, Vocabulary
from adaptive_jax.errors import InputError
from adaptive_jax.files import remove_unfinished, replacing, write_bytes
from adaptive_jax.parallel import processors

CHUNK_BYTES = 1 << 23  # text of a shard: counting its words takes some 70 MiB of memory
PROCESSES = 8  # at most, since each needs that memory, and one process reads for all of them
COMPLETE = "whole.json"
NEWLINE = b"\n"


class FaultyText(Exception):
    """Text that cannot be trained on. The argument is the reason, without the file and the line."""


def pieces(chunks: Iterable[Chunk], size: int) -> Iterator[tuple[bytes, float]]:
    """Yields pieces of text of at most `size` bytes, each with the share of the split read so far.

    A piece consists of whole lines; a line longer than a piece is cut between words. Only `\\n` and
    the end of a file end a line.

    Raises:
        InputError: a word that is longer than a piece.
    """
    buffer = bytearray()
    for name, parts in itertools.groupby(chunks, lambda chunk: chunk.name):
        for chunk in parts:
            buffer += chunk.data
            while len(buffer) >= size:
                spaces = (buffer.rfind(space, 0, size) for space in b" \t\r\v\f")
                end = buffer.rfind(NEWLINE, 0, size) + 1 or max(spaces) + 1
                if not end:
                    raise InputError(
                        f"{name}: a word of more than {size:,} bytes; use text, words separated"
                        " by spaces"
                    )
                yield bytes(buffer[:end]), chunk.done
                del buffer[:end]
        if not chunk.data.endswith(NEWLINE):
            buffer += NEWLINE
    if buffer:
        yield bytes(buffer), 1.0


def write_shard(path: Path, piece: bytes, tokeniser_name: str, lower: bool) -> None:
    """Writes the shard of a piece in one step. With the tokeniser "" its lines take the place of
    words.

    Raises:
        FaultyText: the piece is not text.
    """
    if fault := encoding_fault(piece):
        raise FaultyText(fault)
    text = piece.decode("utf-8")
    if tokeniser_name not in ("", "none") or lower or BYTE_ORDER_MARK in text:
        split = tokeniser(tokeniser_name or "none", lower)
        text = "\n".join(map(split, text.split("\n")))
    # The number of each word, in the order of first appearance
    numbering: dict[str, int] = collections.defaultdict(itertools.count().__next__)
    if tokeniser_name:
        lines = text.replace("\n", f" {EOS}\n").split("\n")
        words = itertools.chain.from_iterable(map(str.split, lines))
    else:
        parts = re.findall(r"[^\n]+|\n", text.replace("\r\n", "\n"))
        words = (EOS if part == "\n" else part for part in parts)
    ids = np.fromiter(map(numbering.__getitem__, words), np.int32)
    distinct = "\n".join(numbering).encode("utf-8")  # no word contains a line feed
    with replacing(path) as file:
        words = np.array(bytearray(distinct), np.uint8)
        np.savez(file, words=words, counts=np.bincount(ids), ids=ids)


class Shards:
    """The complete shards of a split, in a directory. `Shards.make` writes them."""

    def __init__(self, directory: Path):
        self.directory = directory
        try:
            self.number = json.loads((directory / COMPLETE).read_text())["shards"]
            if self.number != (count := len(list(directory.glob("[!.]*.npz")))):
                raise ValueError(f"{count} shards of {self.number}")
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise damaged(directory / COMPLETE, error) from error

    @classmethod
    def make(
        cls,
        text: Text,
        directory: Path,
        tokeniser_name: str = "none",
        lower: bool = False,
        show: Callable = lambda done: None,
    ) -> "Shards":
        """Writes the missing shards, in parallel processes if the text is long.

        show: called with the finished share of the text, 0 to 1.

        Raises:
            InputError: as `pieces`; text without words or with a fault; an unknown tokeniser.
        """
        tokeniser(tokeniser_name or "none", lower)
        remove_unfinished(directory, "*.npz")
        number, words, ends, lines = 0, False, 0, 0
        one = contextlib.nullcontext(operator.call)
        try:
            with _processes() if text.size > 2 * CHUNK_BYTES else one as submit:
                for piece, done in pieces(text.chunks(), CHUNK_BYTES):
                    words = words or bool(piece.strip())
                    ends += (piece.lower() if lower else piece).count(EOS.encode())
                    lines += piece.count(NEWLINE)
                    check_eos(ends, lines, text.files[0])
                    if not (path := _path(directory, number)).exists():
                        submit(write_shard, path, piece, tokeniser_name, lower)
                    number += 1
                    show(done)
        except FaultyText as error:
            for _ in text.lines():
                pass  # reads up to the faulty line, and raises an error that names it
            raise InputError(f"{text.files[0]}: {error}") from error
        if not words:
            raise InputError(
                f"{text.files[0]} has no words; put text in it, one sentence or paragraph a line"
            )
        write_bytes(directory / COMPLETE, json.dumps({"shards": number}).encode())
        return cls(directory)

    def counts(self, show: Callable = lambda done: None) -> dict[str, int]:
        """Counts each word, and `<eos>` once a line. Needs some 230 bytes of memory for each
        distinct word.
        """
        total: dict[str, int] = {}
        for i in range(self.number):
            words, counts = self._read(i, "words", "counts")
            for word, count in zip(_split(words), counts.tolist(), strict=True):
                total[word] = total.get(word, 0) + count
            show((i + 1) / self.number)
        return total

    def encode(
        self,
        vocabulary: Vocabulary,
        path: Path,
        learnt_from: Container[str] = (),
        show: Callable = lambda done: None,
    ) -> tuple[int, int]:
        """Writes the ids of the split as .npy, int32 `[tokens]`, in one step.

        Returns:
            The number of words, `<eos>` included, and the number of those not in `learnt_from`.

        Raises:
            InputError: a word that the vocabulary cannot encode.
        """
        total = unseen = length = 0
        with replacing(path) as file:
            _write_header(file, length)
            for i in range(self.number):
                words, counts, ids = self._read(i, "words", "counts", "ids")
                words = _split(words)
                new = np.array([word not in learnt_from for word in words], bool)
                total, unseen = total + len(ids), unseen + int(counts[new].sum())
                tokens = _tokens_of_words(*vocabulary.encode_words(words), ids)
                file.write(tokens.astype("<i4", copy=False).data)
                length += len(tokens)
                show((i + 1) / self.number)
            file.seek(0)
            _write_header(file, length)
        return total, unseen

    def _read(self, number, *names):
        path = _path(self.directory, number)
        try:
            with np.load(path) as shard:
                return [shard[name] for name in names]
        except Exception as error:  # a damaged archive makes zipfile and NumPy fail in many ways
            raise damaged(path, error) from error


def _path(directory: Path, number: int) -> Path:
    return directory / f"{number:06}.npz"


def _split(words: np.ndarray) -> list[str]:
    return words.tobytes().decode("utf-8").split("\n") if len(words) else []


def _tokens_of_words(tokens: np.ndarray, lengths: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Concatenates the tokens of the words `ids`. Word 0 has the first `lengths[0]` of `tokens`,
    word 1 the next `lengths[1]`, …
    """
    if (lengths == 1).all():
        return tokens[ids]
    return tokens[ranges((np.cumsum(lengths) - lengths)[ids], lengths[ids])]


def _write_header(file, length):
    # NumPy pads headers, so that the final one is as long as the first.
    np.lib.format.write_array_header_1_0(
        file, {"descr": "<i4", "fortran_order": False, "shape": (length,)}
    )


@contextlib.contextmanager
def _processes() -> Iterator[Callable]:
    """Yields `submit(do, *arguments)`, which calls `do` in one of several processes. The end of the
    block waits for all calls.

    Processes are spawned, because a fork of a program that has started JAX may hang. Only this
    process handles signals, even if a terminal sends them to all; when the block fails or this
    process dies, the others end at once.
    """
    number = min(processors.cores(), PROCESSES)
    pool = ProcessPoolExecutor(number, multiprocessing.get_context("spawn"), _end_with_parent)
    earlier = {*multiprocessing.active_children()}
    waiting: collections.deque = collections.deque()

    def submit(do, *arguments):
        if len(waiting) > number:  # otherwise the whole text would be in memory
            waiting.popleft().result()
        waiting.append(pool.submit(do, *arguments))

    try:
        yield submit
        for future in waiting:
            future.result()
        pool.shutdown()
    except BrokenProcessPool as error:
        raise InputError(
            "a process that prepares the corpus was killed or could not start: free memory, and in"
            ' a script of your own load corpora under `if __name__ == "__main__":`; the same'
            " command resumes the preparation"
        ) from error
    except BaseException:
        for process in {*multiprocessing.active_children()} - earlier:
            process.kill()
        raise
    finally:
        # Does not wait: an interruption may come before the thread of the pool starts.
        pool.shutdown(wait=False, cancel_futures=True)


def _end_with_parent():
    """Ends this process when its parent dies, and ignores signals, which a terminal sends to
    both.
    """
    signals.handle(signal.SIG_IGN)

    def wait():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
