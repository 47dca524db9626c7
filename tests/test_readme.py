"""README and docs: commands that train make a plan; every path, module, flag and config key
exists, and those of RESULTS.md, too. test_docs.py runs the code.
"""

import importlib.util
import itertools
import re

import numpy as np
import pytest

from adaptive_jax.__main__ import COMMANDS as NAMES_OF_COMMANDS
from adaptive_jax.config.keys import ALL_GROUPS, NAMES, definition, keys_of, resolve
from adaptive_jax.runs.identity import FREE
from tests.pages import PAGES, PYTHON, PYTHON_READ, READ, ROOT, commands, reads_quickstart

# What commands make, and files of a user; metrics begin with train/.
MADE = "runs/", "eval/", "wandb/", "checkpoints/", "shards/", "train/", "clusters/", "docs/_build"
MADE += "train.txt", "valid.txt", "test.txt", "dict.txt", "vocabulary.txt", "clusters.txt"


def programs(words):
    """The part of a command that names its program: ["train.py"], ["-m", "benchmarks.tables"] or
    ["-m", "adaptive_jax", "score"].
    """
    return words[1 : 4 if words[2] == "adaptive_jax" else 3] if words[1] == "-m" else words[1:2]


def arguments_of(script):
    """The arguments that pages give to a script, each once, but for commands that
    tests/test_docs.py runs.
    """
    commands = [words for _, words in PYTHON if words[1] == script and not reads_quickstart(words)]
    lines = {tuple(words[2:]) for words in commands}
    return sorted(line for line in lines if "FILE" not in str(line))


def keys():
    """Every key of every config, such as "body.layers"."""
    groups = ALL_GROUPS
    names = {*groups, *(f"{group}.name" for group in NAMES)}
    for group in groups:
        for name in definition(group) if group in NAMES else [None]:
            names |= {f"{group}.{key}".lstrip(".") for key in keys_of(group, name)}
    return names


def test_the_first_lines_are_the_two_commands():
    """Everyone, and the continuous integration, begins with these."""
    assert [words for words in commands(PAGES["README.md"])][:2] == [
        ["make", "train"],
        ["make", "test"],
    ]


def test_the_first_steps_run_as_they_are_printed():
    """No command of the README has a placeholder, and what each prints stands below it."""
    page = PAGES["README.md"]
    steps = re.findall(r"^    ((?:python|echo) .*)\n\n?(.*)", page, re.MULTILINE)
    assert len(steps) == 9
    for command, below in steps:
        assert not re.search(r"=(DIR|FILE)\b", command) and below == "```text", command


def tokenizer_of(directory):
    """The file of a tokenizer of bytes."""
    tokenizers = pytest.importorskip("tokenizers")
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    names = "<|endoftext|>", *sorted(byte_level.alphabet())
    vocabulary = {name: number for number, name in enumerate(names)}
    program = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    program.pre_tokenizer = byte_level(add_prefix_space=False)
    program.decoder = tokenizers.decoders.ByteLevel()
    program.save(str(directory / "tokenizer.json"))
    return directory / "tokenizer.json"


@pytest.mark.parametrize("given", arguments_of("train.py"), ids=" ".join)
def test_commands_that_train(given, in_process, text, tmp_path):
    """Their configs, rows, keys and values are accepted; those that make a plan print it, and
    --explain its keys.
    """
    arguments = [word for word in given if not word.startswith("--workdir") and word != "..."]
    if "--config.data.corpus=ids" in given:
        for split in "train", "valid", "test":
            np.save(tmp_path / f"{split}.npy", np.arange(2_000) % 90)
        text = tmp_path
    if "--config.data.tokenizer=tokenizer.json" in given:
        file = tokenizer_of(tmp_path)
        arguments = [re.sub("=tokenizer.json$", f"={file}", word) for word in arguments]
        arguments = [re.sub(r"(?<=data\.eos)=.*", "=0", word) for word in arguments]
    arguments = [re.sub(r"=DIR$|(?<=data\.path)=.*", f"={text}", word) for word in arguments]
    if not any(word.startswith("--config=") for word in arguments):  # that of another run
        of_run = "--config.", "--init_from"
        arguments = [word for word in arguments if not word.startswith(of_run)]
    planned = "--dry_run" in arguments or "--config=configs/own_text.py" in given
    more = () if "--explain" in arguments else ("--dry_run",) if planned else ("--explain",)
    done = in_process(
        "train.py",
        *arguments,
        *more,
        f"--workdir={tmp_path / 'run'}",
    )
    assert (done.returncode, done.stderr) == (0, "")
    printed = "--config.steps=" if "--config" in " ".join(arguments) else "# Configuration"
    assert ("state        " if planned else printed) in done.stdout


@pytest.mark.parametrize("given", arguments_of("evaluate.py"), ids=" ".join)
def test_commands_that_evaluate(given, in_process, tmp_path):
    """Their flags are accepted: all that is missing is the run."""
    arguments = [word for word in given if not word.startswith("--workdir")]
    done = in_process("evaluate.py", *arguments, f"--workdir={tmp_path}")
    assert done.returncode == 2
    assert (
        done.stderr
        == f"error: {tmp_path} holds no run (no config.json): use the --workdir of a run that"
        " train.py made\n"
    )


def test_flags(quick_command):
    """The help of every program has the flags that pages give to it, and those that they
    mention by themselves.
    """
    helps = {}
    for program in {tuple(programs(words)) for _, words in PYTHON_READ if words[1] != "-c"} - {
        ("-m", "venv")
    }:
        done = quick_command(*program, "--help")
        assert (done.returncode, done.stderr) == (0, ""), program
        helps[program] = done.stdout
        # Of absl; of a list of commands; of an example, which reads them by argparse
        assert re.search("flags:|python -m|^usage:", helps[program]), program
    for page, words in PYTHON_READ:
        for word in itertools.takewhile(lambda word: word != "--", words):  # then another's flags
            if word.startswith("--") and not word.startswith("--config."):
                flag = word[2:].split("=")[0]
                assert re.search(rf"--(\[no\])?{flag}\b", helps[tuple(programs(words))]), (
                    page,
                    word,
                )
    for page, content in PAGES.items():
        for flag in re.findall(r"`--(\w+)[=`]", content):
            if flag not in ("config", "help", "signal", "requeue"):  # the last two of SLURM
                assert any(re.search(rf"--(\[no\])?{flag}\b", text) for text in helps.values()), (
                    page,
                    flag,
                )


def slugs(path):
    """The headings of a page, as links name them."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]


def test_paths_modules_and_links():
    """Files that pages name exist, or are what a command makes; links lead to pages and
    headings.
    """
    for page, content in READ.items():
        here = (ROOT / page).parent
        files = re.findall(r"`((?:[\w.]+/)*[\w.-]+\.(?:py|md|txt|toml))`", content)
        for path in files + re.findall(r"`((?:\w+/)+\w*)`", content):
            places = ROOT / path, ROOT / "adaptive_jax" / path, here / path
            there = any(place.exists() for place in places)
            assert there or path.startswith(MADE), (page, path)
        for target, heading in re.findall(r"\]\(([^)#]+)(?:#([^)]*))?\)", content):
            if "://" not in target:
                assert (here / target).exists(), (page, target)
                assert not heading or heading in slugs(here / target), (page, heading)
    for page, words in PYTHON_READ:
        if words[1] == "-m":
            assert words[2] == "venv" or importlib.util.find_spec(words[2]), (page, words)
            assert words[2] != "adaptive_jax" or {*words[3:4]} <= {*NAMES_OF_COMMANDS}, page
        if words[1] == "-c":
            exec(words[2], {})


def test_config_keys():
    """Keys that pages name exist: those after --config or config, those in code such as
    `body.remat`, and whole groups.
    """
    known, groups = keys(), ALL_GROUPS
    for page, content in READ.items():
        named = re.findall(r"--config\.([a-z_.]+)=", content)
        named += re.findall(r"`config\.([a-z_.]+)`", content)
        dotted = re.findall(r"`([a-z_]+\.[a-z_.]+?)(?:=[^`]*)?`", content)
        named += [key for key in dotted if key.split(".")[0] in groups]
        wrong = {key for key in named if not key.endswith(("json", "jsonl"))} - known
        assert not wrong, page


def test_settings_that_may_change_when_a_run_is_resumed():
    """The page on runs names every one of them, and groups of which all keys may change."""
    page = " ".join(PAGES["docs/runs.md"].split())
    (named,) = re.findall(
        r"Settings that change no update may change: (.*?), and the groups? (.*?)\. ", page
    )
    settings, groups = ({*re.findall(r"`([^`]+)`", part)} for part in named)
    assert settings | {f"{group}.{key}" for group in groups for key in resolve({})[group]} == FREE


def test_every_page_is_listed():
    """docs/index.md, from which the site has its table of contents, leads to all of them."""
    assert all(
        f"]({page.removeprefix('docs/')})" in PAGES["docs/index.md"]
        for page in PAGES
        if page not in ("README.md", "docs/index.md")
    )
