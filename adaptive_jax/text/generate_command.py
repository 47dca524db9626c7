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
from pathlib import Path

from absl import flags

from adaptive_jax.config import commands
from adaptive_jax.errors import InputError

PROMPT = flags.DEFINE_multi_string(
    "prompt", None, "Text to write on from; give the flag again for several."
)
PROMPTS = flags.DEFINE_string("prompts", None, "File with a prompt a line, or - for stdin.")
CHECKPOINT = flags.DEFINE_string("checkpoint", "best", "best (by validation), latest, or a step.")
FORMAT = flags.DEFINE_enum(
    "format", "text", ["text", "jsonl"], "text, or a JSON object for each text."
)
OPTIONS = (
    flags.DEFINE_integer("words", 100, "Words to write at most; the end of a line is one."),
    flags.DEFINE_integer("lines", 0, "Stop after so many ends of lines; 0: do not."),
    flags.DEFINE_float(
        "temperature",
        1.0,
        "Draw words in proportion to p^(1/temperature); 0: always the most probable word.",
    ),
    flags.DEFINE_integer("top_k", 0, "Draw among the k most probable words; 0: among all."),
    flags.DEFINE_float(
        "top_p", 1.0, "Draw among the most probable words that hold this share of the probability."
    ),
    flags.DEFINE_integer(
        "beams", 0, "Search for the most probable text with so many hypotheses; 0: draw."
    ),
    flags.DEFINE_integer("samples", 1, "Texts for each prompt; of a beam search the best ones."),
    flags.DEFINE_integer("seed", 0, "Of the draws."),
    flags.DEFINE_integer(
        "window", 0, "Tokens that a transformer sees at most; 0: as many as it was trained with."
    ),
    flags.DEFINE_list("avoid", ["<unk>"], "Words that are never written; --avoid= for none."),
)
commands.define_workdir("Directory of a run that train.py made.", several_hosts=False)
flags.adopt_module_key_flags(commands)  # --help shows them


def prompts(model) -> Iterator[str]:
    """The prompts that the flags name, or that are typed; each without its line feed."""
    if PROMPT.value:
        yield from PROMPT.value
    elif PROMPTS.value not in (None, "-"):
        with open(PROMPTS.value, encoding="utf-8", errors="surrogateescape") as file:
            yield from map(strip, file)
    elif PROMPTS.value == "-" or not sys.stdin.isatty():
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
        yield from map(strip, sys.stdin)
    else:
        print(f"{model!r}: write the beginning of a text; Ctrl-D ends", file=sys.stderr)
        while True:
            try:
                yield input("> ")
            except EOFError:
                print(file=sys.stderr)
                return


def check_prompts() -> None:
    """Checks the flags that name prompts. Raises InputError."""
    if PROMPT.value and PROMPTS.value:
        raise InputError("--prompt and --prompts are both given: give one of them")
    if PROMPTS.value not in (None, "-") and not Path(PROMPTS.value).is_file():
        raise InputError(
            f"--prompts={PROMPTS.value} is no file: give one with a prompt a line, or - for stdin"
        )


def strip(line: str) -> str:
    """A line without its line feed."""
    return line.removesuffix("\n")


def main() -> None:
    """Writes on from every prompt."""
    import adaptive_jax  # after the flags: --help and their errors should not wait for jax
    from adaptive_jax.text.generate import Options, Writer

    workdir, _ = commands.workdir()
    options = Options(**{flag.name: flag.value for flag in OPTIONS})
    options = options._replace(avoid=[word for word in options.avoid if word])
    options.check()
    check_prompts()
    model = adaptive_jax.load(workdir, CHECKPOINT.value)
    drafts, words = [], 0
    for prompt in prompts(model):
        writer = Writer(model.decoder, model.lines, prompt, options)
        show(writer, prompt, options.samples, model.decoder.tails)
        drafts, words = [*drafts, writer.draft], words + writer.words
    if not drafts:
        raise InputError("there is no prompt: give --prompt=TEXT, or text on stdin")
    if sys.stderr.isatty():
        print(summary(drafts, words, model.decoder.tails), file=sys.stderr)


def summary(drafts: list, words: int, tails: int) -> str:
    """How many words were written, how fast after the first one, and the share of tails that it
    took.
    """
    steps, seconds = sum(draft.steps for draft in drafts), sum(draft.seconds for draft in drafts)
    speed = (steps - len(drafts)) / steps * words / seconds if seconds else 0
    line = f"{words:,} words" + (f", {speed:,.0f} words/s" if speed else "")
    return line + (
        f"; of {tails} tails of the softmax, {opened(drafts, tails):.1%} opened a step"
        if tails
        else ""
    )


def opened(drafts: list, tails: int) -> float:
    """The share of tails that a step opened in the mean; 0 where there are none."""
    return sum(draft.opened for draft in drafts) / max(
        1, sum(draft.steps for draft in drafts) * tails
    )


def show(writer, prompt: str, samples: int, tails: int) -> None:
    """Prints what is written after a prompt; a single text word by word."""
    if FORMAT.value == "jsonl":
        for one in writer.continuations():
            found = {
                "prompt": prompt,
                "text": one.text,
                "log_prob": one.log_prob,
                "tokens": len(one.tokens),
            }
            print(
                json.dumps(
                    found | {"tails_opened": opened([writer.draft], tails)}, ensure_ascii=False
                ),
                flush=True,
            )
    elif samples == 1:
        print(prompt, end="", flush=True)
        ends = "\n"
        for piece in writer.stream():
            print(piece, end="", flush=True)
            ends = "" if piece.endswith("\n") else "\n"
        print(ends, end="", flush=True)
    else:
        for one in writer.continuations():
            print(prompt + one.text.removesuffix("\n"), end="\n\n", flush=True)
