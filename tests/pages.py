"""The pages that users read, and the commands and the code on them."""

import itertools
import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in FILES}


def commands(text):
    """The commands of a page as lists of words, from indented blocks and from code within
    lines; `a && b` and `a | b` are two.
    """
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL).replace("\\\n", " ")
    blocks = re.findall(r"^    (?! )(.*)$", text, re.MULTILINE)
    spans = re.findall(r"`([^`]+)`", re.sub(r"^    .*$", "", text, flags=re.MULTILINE))
    for line in (
        *blocks,
        *(
            " ".join(span.split())
            for span in spans
            if re.match(r"(python3? |make |pip |uv )", span)
        ),
    ):
        yield from words_of(line)


def words_of(line):
    """The commands of a line as lists of words, without variables in front."""
    words = shlex.split(line, comments=True)
    for between, part in itertools.groupby(words, lambda word: word in ("&&", "|")):
        named = list(
            itertools.dropwhile(lambda word: re.match(r"[A-Z_]+=|srun$|--kill", word), part)
        )
        if named and not between:
            yield named


def reads_quickstart(words):
    """True if tests/test_docs.py runs a command: it reads the run that the first steps train, and
    takes seconds. Ways to score take longer, and have tests of their own.
    """
    named = any(re.fullmatch(r"(--workdir=)?runs/quickstart", word) for word in words)
    slow = ("train.py", "--method=", "benchmarks.")
    return named and not any(each in " ".join(words) for each in slow)


def blocks(text):
    """The blocks of a page in order: ("python", code), and ("shell", command) for each indented
    command.
    """
    shell = r"^    (?! )((?:[^\n]*\\\n)*[^\n]*)$"
    for fence, code, line in re.findall(
        rf"^```(\w*)\n(.*?)^```$|{shell}", text, re.DOTALL | re.MULTILINE
    ):
        if line:
            yield "shell", line.replace("\\\n", " ")
        elif fence == "python":
            yield "python", code


def python_blocks(text):
    """The Python code of a page, block by block."""
    return [code for kind, code in blocks(text) if kind == "python"]


def measured(text):
    """Results with the whole commands for which they write `benchmarks.x` alone, and without those
    of earlier versions, `COMMIT:benchmarks.x`.
    """
    text = re.sub(r"^ *[0-9a-f]{7,8}:benchmarks.*$", "", text, flags=re.MULTILINE)
    return re.sub(r"`(benchmarks\.\w+(?: [^`]*)?)`", r"`python -m \1`", text)


RESULTS = "benchmarks/RESULTS.md"
READ = PAGES | {RESULTS: measured((ROOT / RESULTS).read_text())}  # what tests do not run
COMMANDS = [(page, words) for page, text in PAGES.items() for words in commands(text)]
PYTHON = [(page, words) for page, words in COMMANDS if words[0] == "python"]
PYTHON_READ = PYTHON + [(RESULTS, words) for words in commands(READ[RESULTS])]
PYTHON_READ = [(page, words) for page, words in PYTHON_READ if words[0] == "python"]
