"""Writes text with a trained model, after prompts.

    python -m adaptive_jax generate --workdir=runs/quickstart --prompt="And the king" --top_p=0.9
    python -m adaptive_jax generate --workdir=runs/quickstart --prompt=Noah --beams=5 --samples=3
    python -m adaptive_jax generate --workdir=runs/quickstart --prompts=- --format=jsonl < FILE
    python -m adaptive_jax generate --workdir=runs/quickstart

Prompts are those of --prompt, or the lines of a file or of stdin. With neither, on a terminal, the
command asks for prompts; words appear as they are drawn, and Ctrl-D ends it. docs/text.md
says more.
"""

import json
import sys
from collections.abc import Iterator
from typing import Annotated, NamedTuple

from absl import flags

from adaptive_jax.config import commands
from adaptive_jax.config.flags import define_options, options
from adaptive_jax.config.options import Option
from adaptive_jax.data.corpora.line_files import STDIN, TextFiles
from adaptive_jax.errors import InputError
from adaptive_jax.files import escaped
from adaptive_jax.generation.options import Options


class Generate(NamedTuple):
    """Flags of the command besides --prompt and those of `Options`.

    Attributes:
        prompts: File with a prompt a line, or - for stdin.
        checkpoint: best (by validation), latest, or a step.
        format: text, or a JSON object for each text.
    """

    prompts: str = ""
    checkpoint: str = "best"
    format: Annotated[str, Option(among=("text", "jsonl"))] = "text"


def define_flags() -> None:
    """Defines the flags of the command."""
    several = "Text to continue; repeat the flag for several prompts."
    flags.DEFINE_multi_string("prompt", None, several)
    define_options(Generate, Options, commands.Workdir, commands.Allow)


def typed_prompts() -> Iterator[str]:
    """Yields prompts that the user types on the terminal."""
    print("write the beginning of a text; Ctrl-D ends", file=sys.stderr)
    while True:
        try:
            if not sys.stdout.isatty():  # keep the prompt out of the output
                print("> ", end="", file=sys.stderr, flush=True)
            yield input("> " if sys.stdout.isatty() else "")
        except EOFError:
            print(file=sys.stderr)
            return


def main() -> None:
    """Continues every prompt."""
    import adaptive_jax  # after the flags: --help and their errors should not wait for jax
    from adaptive_jax.generation.generate import Writer
    from adaptive_jax.scores.unseen import warn_of_unseen

    workdir, command, writing = commands.workdir(), options(Generate), options(Options)
    writing.check()
    prompts = flags.FLAGS.prompt
    if prompts and command.prompts:
        raise InputError("--prompt and --prompts are both given: use one of them")
    if not prompts:
        asks = not command.prompts and sys.stdin is not None and sys.stdin.isatty()
        prompts = typed_prompts() if asks else TextFiles([command.prompts or STDIN])
    model, prompt = adaptive_jax.load(workdir, command.checkpoint), None
    words = unseen = 0
    for prompt in prompts:
        unseen_words = [*model.lines.unseen(prompt)]
        words, unseen = words + len(unseen_words), unseen + sum(unseen_words)
        writer = Writer(model.decoder, model.lines, prompt, writing)
        show(writer, prompt, writing.samples, command.format)
    if prompt is None:
        raise InputError("there is no prompt: pass --prompt=TEXT, or text on stdin")
    warn_of_unseen(unseen, words)


def show(writer, prompt: str, samples: int, form: str) -> None:
    """Prints the texts after a prompt; a single text appears word by word."""
    if form == "jsonl":
        for continuation in writer.continuations():
            columns = {
                "prompt": prompt,
                "text": continuation.text,
                "log_prob": continuation.log_prob,
                "tokens": len(continuation.tokens),
            }
            print(escaped(json.dumps(columns, ensure_ascii=False), sys.stdout), flush=True)
    elif samples == 1:
        print(escaped(prompt, sys.stdout), end="", flush=True)
        piece = ""
        for piece in writer.stream():
            print(escaped(piece, sys.stdout), end="", flush=True)
        print("" if piece.endswith("\n") else "\n", end="", flush=True)
    else:
        for continuation in writer.continuations():
            text = escaped(prompt + continuation.text.removesuffix("\n"), sys.stdout)
            print(text, end="\n\n", flush=True)
