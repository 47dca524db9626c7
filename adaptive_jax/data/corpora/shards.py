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
import functools
import itertools
import json
import multiprocessing
import multiprocessing.connection
import operator
import os
import signal
import threading
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

import numpy as np

from adaptive_jax.data.batches.examples import ranges
from adaptive_jax.data.batches.prefetch import Ahead
from adaptive_jax.data.corpora.text import Chunk, Text
from adaptive_jax.data.corpora.tokenise import tokeniser
from adaptive_jax.data.vocabulary.words import EOS, Vocabulary
from adaptive_jax.errors import InputError
from adaptive_jax.files import replacing

PIECE = 1 << 23  # bytes of text: counting its words takes some 70 MiB of memory
PROCESSES = 8  # at most, since each needs that memory and one process reads for all
COMPLETE = "whole.json"
NEWLINE = b"\n"


class Piece(NamedTuple):
    """The text of one shard: whole lines, unless a line is longer than a piece and is cut between
    words.

    origins: the offset in `data`, name and line number of each file at its first byte in this
        piece.
    done: the share of the split read so far, 0 to 1.
    """

    number: int
    data: bytes
    origins: tuple[tuple[int, str, int], ...]
    done: float

    def line(self, offset: int) -> str:
        """Returns file and line of the byte at `offset`."""
        start, name, line = [origin for origin in self.origins if origin[0] <= offset][-1]
        return f"{name}, line {line + self.data.count(NEWLINE, start, offset)}"


def pieces(chunks: Iterable[Chunk], size: int) -> Iterator[Piece]:
    """Cuts text into pieces of `size` bytes or slightly fewer. Only `\\n` and the end of a file end
    a line.

    Raises:
        InputError: a word that is longer than a piece.
    """
    buffer, origins, number, last, chunk = bytearray(), [], itertools.count(), "", None

    def piece(cut):
        data = bytes(buffer[:cut])
        del buffer[:cut]
        made = Piece(
            next(number), data, tuple(origin for origin in origins if origin[0] < cut), chunk.done
        )
        begin, name, line = made.origins[-1]
        after = [(begin - cut, name, line) for begin, name, line in origins if begin >= cut]
        origins[:] = [
            (0, name, line + data.count(NEWLINE, begin)),
            *after,
        ]  # of equal offsets the last one counts
        return made

    open_line = False
    for chunk in chunks:
        if chunk.name != last:
            if open_line:
                buffer += NEWLINE
            origins.append((len(buffer), chunk.name, 1))
            last = chunk.name
        buffer += chunk.data
        open_line = not chunk.data.endswith(NEWLINE)
        while len(buffer) >= size:
            cut = buffer.rfind(NEWLINE, 0, size) + 1 or buffer.rfind(b" ", 0, size) + 1
            if not cut:
                raise InputError(
                    f"{chunk.name}: a word of more than {size:,} bytes; give text, words separated"
                    " by spaces"
                )
            yield piece(cut)
    if open_line:
        buffer += NEWLINE
    if buffer:
        yield piece(len(buffer))


class _Numbering(dict[str, int]):
    """Numbers words in the order of their first appearance."""

    def __missing__(self, word: str) -> int:
        self[word] = number = len(self)
        return number


def write_shard(path: Path, piece: Piece, tokeniser_name: str, lower: bool) -> None:
    """Writes the shard of a piece in one step. Raises InputError with file and line for bytes
    that are not text.
    """
    try:
        text = piece.data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{piece.line(error.start)}: not UTF-8; convert the file to UTF-8"
        ) from error
    if (zero := piece.data.find(b"\0")) >= 0:
        raise InputError(
            f"{piece.line(zero)}: a NUL byte, which text never has; repair the file, or convert it"
            " to UTF-8"
        )
    if tokeniser_name != "none" or lower:
        text = "\n".join(map(tokeniser(tokeniser_name, lower), text.split("\n")))
    words = itertools.chain.from_iterable(
        map(str.split, text.replace("\n", f" {EOS}\n").split("\n"))
    )
    numbering = _Numbering()
    ids = np.fromiter(map(numbering.__getitem__, words), np.int32)
    names = np.array(
        bytearray("\n".join(numbering).encode("utf-8")), np.uint8
    )  # no word contains a line feed
    with replacing(path) as file:
        np.savez(file, words=names, counts=np.bincount(ids), ids=ids)


class Shards:
    """The complete shards of a split, in a directory of their own. `Shards.make(text,
    directory)` writes them.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        try:
            self.number = json.loads((directory / COMPLETE).read_text())["shards"]
            if self.number != (found := len(list(directory.glob("[!.]*.npz")))):
                raise ValueError(f"{found} shards of {self.number}")
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise InputError(_damaged(directory / COMPLETE, error)) from error

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

        show: called with the share of the text that is done, 0 to 1.
        Raises InputError as `pieces` and `write_shard`, for text without words, and for an unknown
        tokeniser.
        """
        tokeniser(tokeniser_name, lower)
        for unfinished in directory.glob(".*.npz.*"):  # left by a killed process
            unfinished.unlink()
        number, words = 0, False
        with (
            _processes() if text.size > 2 * PIECE else contextlib.nullcontext(operator.call)
        ) as submit:
            for piece in pieces(text.chunks(), PIECE):
                words = words or bool(piece.data.strip())
                if not (path := _path(directory, piece.number)).exists():
                    submit(write_shard, path, piece, tokeniser_name, lower)
                number = piece.number + 1
                show(piece.done)
        if not words:
            raise InputError(
                f"{text.files[0]} has no words; put text in it, one sentence or paragraph a line"
            )
        with replacing(directory / COMPLETE) as file:
            file.write(json.dumps({"shards": number}).encode())
        return cls(directory)

    def counts(self, show: Callable = lambda done: None) -> dict[str, int]:
        """Returns how often each word occurs; `<eos>` once a line. Needs some 230 bytes of
        memory for each distinct word.
        """
        numbering, total = _Numbering(), np.zeros(1 << 20, np.int64)
        for i in range(self.number):
            words, counts = self._read(i, "words", "counts")
            at = np.fromiter(map(numbering.__getitem__, _split(words)), np.int64, len(counts))
            if len(numbering) > len(total):
                total = np.append(total, np.zeros(len(numbering), np.int64))
            total[at] += counts  # a word occurs once in `at`
            show((i + 1) / self.number)
        return dict(zip(numbering, total.tolist(), strict=False))

    def count(self, known: Container[str], show: Callable = lambda done: None) -> tuple[int, int]:
        """Returns the number of words, `<eos>` included, and how many of them are not in
        `known`.
        """
        total = unseen = 0
        for i in range(self.number):
            words, counts = self._read(i, "words", "counts")
            strange = np.array([word not in known for word in _split(words)], bool)
            total, unseen = total + int(counts.sum()), unseen + int(counts[strange].sum())
            show((i + 1) / self.number)
        return total, unseen

    def encode(
        self, vocabulary: Vocabulary, path: Path, show: Callable = lambda done: None
    ) -> None:
        """Writes the ids of the split as .npy, int32 `[tokens]`, in one step. InputError: a
        word it cannot encode.
        """

        def tokens_of(number):
            words, ids = self._read(number, "words", "ids")
            return _tokens_of_words(*vocabulary.encode_words(_split(words)), ids).astype(
                "<i4", copy=False
            )

        with replacing(path) as file, Ahead(tokens_of, range(self.number)) as parts:
            length = 0
            _write_header(file, length)
            for i, tokens in parts:
                file.write(tokens.data)
                length += len(tokens)
                show((i + 1) / self.number)
            file.seek(0)
            _write_header(file, length)

    def _read(self, number, *names):
        path = _path(self.directory, number)
        try:
            with np.load(path) as shard:
                return [shard[name] for name in names]
        except Exception as error:  # a damaged archive makes zipfile and NumPy fail in many ways
            raise InputError(_damaged(path, error)) from error


def _damaged(path, error):
    reason = " ".join(str(error).split())[:150] or type(error).__name__
    return f"{path} is damaged ({reason}); remove {path.parent} to have it made again"


def _path(directory: Path, number: int) -> Path:
    return directory / f"{number:06}.npz"


def _split(words: np.ndarray) -> list[str]:
    return words.tobytes().decode("utf-8").split("\n") if len(words) else []


def _tokens_of_words(tokens: np.ndarray, lengths: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The tokens of the words `ids`. Word 0 has the first `lengths[0]` of `tokens`, word 1 the
    next `lengths[1]`, …
    """
    if len(tokens) == len(lengths):  # one token a word
        return tokens[ids]
    return tokens[ranges((np.cumsum(lengths) - lengths)[ids], lengths[ids])]


def _write_header(file, length):
    # NumPy pads the header for longer lengths, so the final one takes the room of the first.
    np.lib.format.write_array_header_1_0(
        file, {"descr": "<i4", "fortran_order": False, "shape": (length,)}
    )


@contextlib.contextmanager
def _processes() -> Iterator[Callable]:
    """Yields `submit(do, *arguments)`, which runs in one of several processes. The end of the block
    waits for all of them.

    Processes are spawned, because a fork of a program that has started JAX may hang. Ctrl-C and
    SIGTERM reach this process alone, also where the terminal sends them to all; when the block
    fails or this process dies, the others end at once.
    """
    number = min(
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        PROCESSES,
    )
    context = multiprocessing.get_context("spawn")
    alive, holder = context.Pipe(duplex=False)  # nothing is sent: its end is the sign
    pool = ProcessPoolExecutor(number, context, initializer=_end_with, initargs=(alive,))
    # A process inherits the mask of the thread that starts it, so it answers no signal, not even
    # while it starts. And only the main thread is interrupted, so no start is left half done.
    mask = functools.partial(
        signal.pthread_sigmask, signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM}
    )
    starter = ThreadPoolExecutor(1, initializer=mask)
    waiting: collections.deque = collections.deque()

    def submit(do, *arguments):
        if len(waiting) > number:  # otherwise the whole text would be in memory
            waiting.popleft().result()
        waiting.append(starter.submit(pool.submit, do, *arguments).result())

    try:
        yield submit
        for future in waiting:
            future.result()
    except BrokenProcessPool as error:
        raise InputError(
            "a process that prepares the corpus was killed or could not start: free memory, and in"
            ' a script of your own load corpora under `if __name__ == "__main__":`; the same'
            " command resumes the preparation"
        ) from error
    finally:
        holder.close()
        starter.shutdown()
        pool.shutdown(cancel_futures=True)
        alive.close()


def _end_with(alive: multiprocessing.connection.Connection):
    """Ends this process when the one that made it closes the other end of `alive`, or dies."""
    threading.Thread(
        target=lambda: multiprocessing.connection.wait([alive]) and os._exit(1), daemon=True
    ).start()
