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

from absl import flags

from adaptive_jax.config import commands
from adaptive_jax.errors import InputError
from adaptive_jax.text.files import STDIN, TextFiles
from adaptive_jax.text.options import Options

PROMPT = flags.DEFINE_multi_string(
    "prompt", None, "Text to write on from; give the flag again for several."
)
PROMPTS = flags.DEFINE_string("prompts", None, "File with a prompt a line, or - for stdin.")
CHECKPOINT = commands.define_checkpoint()
FORMAT = flags.DEFINE_enum(
    "format", "text", ["text", "jsonl"], "text, or a JSON object for each text."
)
HELP = {
    "words": "Words to write at most; the end of a line is one.",
    "lines": "Stop after this many ends of lines; 0: do not.",
    "temperature": "Draw words in proportion to p^(1/temperature); 0: always the likeliest word.",
    "top_k": "Draw among the k most probable words; 0: among all.",
    "top_p": "Draw among the most probable words that hold this share of the probability.",
    "beams": "Search for the most probable text with this many hypotheses; 0: draw.",
    "samples": "Texts for each prompt; of a beam search the best ones.",
    "seed": "Of the draws.",
    "window": "Tokens that a transformer sees at most; 0: as many as it was trained with.",
    "avoid": "Words that are never written, separated by commas; --avoid= for none.",
}
DEFINE = {int: flags.DEFINE_integer, float: flags.DEFINE_float, tuple: flags.DEFINE_list}
OPTIONS = [
    DEFINE[type(default)](name, list(default) if name == "avoid" else default, HELP[name])
    for name, default in Options._field_defaults.items()
]
commands.define_workdir("Directory of a run that train.py made.", several_hosts=False)
flags.adopt_module_key_flags(commands)  # --help shows them


def typed() -> Iterator[str]:
    """Prompts that are typed on the terminal."""
    print("write the beginning of a text; Ctrl-D ends", file=sys.stderr)
    while True:
        try:
            if not sys.stdout.isatty():  # the prompt is no part of the output
                print("> ", end="", file=sys.stderr, flush=True)
            yield input("> " if sys.stdout.isatty() else "")
        except EOFError:
            print(file=sys.stderr)
            return


def main() -> None:
    """Writes on from every prompt."""
    import adaptive_jax  # after the flags: --help and their errors should not wait for jax
    from adaptive_jax.text.generate import Writer

    workdir, _ = commands.workdir()
    options = Options(**{flag.name: flag.value for flag in OPTIONS})
    avoid = [word for word in options.avoid if word]
    if options.avoid[1:] and len(avoid) < len(options.avoid):
        words = ",".join(options.avoid)
        raise InputError(f"--avoid={words} has an empty word: write a comma as '\",\"'")
    options = options._replace(avoid=avoid)
    options.check()
    if PROMPT.value and PROMPTS.value:
        raise InputError("--prompt and --prompts are both given: use one of them")
    prompts = PROMPT.value
    if not prompts:
        asks = not PROMPTS.value and sys.stdin is not None and sys.stdin.isatty()
        prompts = typed() if asks else TextFiles([PROMPTS.value or STDIN])
    model, prompt = adaptive_jax.load(workdir, CHECKPOINT.value), None
    for prompt in prompts:
        show(Writer(model.decoder, model.lines, prompt, options), prompt, options.samples)
    if prompt is None:
        raise InputError("there is no prompt: pass --prompt=TEXT, or text on stdin")


def show(writer, prompt: str, samples: int) -> None:
    """Prints what is written after a prompt; a single text word by word."""
    if FORMAT.value == "jsonl":
        for one in writer.continuations():
            columns = {
                "prompt": prompt,
                "text": one.text,
                "log_prob": one.log_prob,
                "tokens": len(one.tokens),
                "tails_computed": writer.state.tails_computed,
            }
            print(json.dumps(columns, ensure_ascii=False), flush=True)
    elif samples == 1:
        print(prompt, end="", flush=True)
        piece = ""
        for piece in writer.stream():
            print(piece, end="", flush=True)
        print("" if piece.endswith("\n") else "\n", end="", flush=True)
    else:
        for one in writer.continuations():
            print(prompt + one.text.removesuffix("\n"), end="\n\n", flush=True)
