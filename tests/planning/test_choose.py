"""Settings that are chosen for a text and a time: the rules, the split of a single file, and a
run from one line.
"""

import gzip
import json
import math
import re
import shutil

import numpy as np
import pytest

from adaptive_jax.config import explain
from adaptive_jax.config.keys import resolve
from adaptive_jax.data.corpora.split import single_file, split_lines
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.errors import InputError
from adaptive_jax.evaluation.evaluate import Request, evaluate
from adaptive_jax.model.language_model import build
from adaptive_jax.optimizers import optim
from adaptive_jax.parallel.speed import product_speed
from adaptive_jax.planning import choose as rules
from adaptive_jax.planning import traced
from adaptive_jax.planning.choose import (
    READINGS,
    SIZES,
    choose,
    choose_vocabulary,
    predicted_loss,
    training_flops,
)
from adaptive_jax.planning.plan import divide_update
from adaptive_jax.training.dry_run import dry_run
from adaptive_jax.training.loop import train
from configs import own_text, quickstart

CPU, GPU = 1e11, 8e14


def request(hours=1.0, **changes):
    """The config as the command line gives it."""
    config = resolve(own_text.get_config())
    config["choose"]["hours"] = hours
    for key, value in changes.items():
        *groups, last = key.split(".")
        group = config
        for name in groups:
            group = group[name]
        group[last] = value
    return config


def chosen(config, words, tokens, speed, devices=1):
    """What `choose` makes of a text of `words` words that follow Zipf's law and `tokens` tokens."""
    counts = np.maximum(1, tokens / np.arange(1, words + 1) / np.log(words)).astype(np.int64)
    splits = {"train": tokens, "validation": max(tokens // 18, 40), "test": max(tokens // 18, 40)}
    config["data"] |= {"threshold": 2, "limit": 0, "codes": 0}
    config["dtype"] = "float32"
    return choose(config, counts, splits, {size.features: speed for size in SIZES}, devices)


TEXTS = {
    "10 kB": (600, 3_000),
    "1 MB": (9_000, 180_000),
    "5 MB": (10_000, 930_000),
    "100 MB": (90_000, 18_000_000),
    "5 GB": (800_000, 900_000_000),
}  # words, tokens
FEATURES = {
    ("10 kB", 0.01, CPU): 64,
    ("10 kB", 10, GPU): 64,
    ("1 MB", 0.03, CPU): 128,
    ("1 MB", 1, CPU): 192,
    ("5 MB", 0.05, CPU): 128,
    ("5 MB", 3, CPU): 256,
    ("100 MB", 0.05, CPU): 64,
    ("100 MB", 24, CPU): 256,
    ("100 MB", 1, GPU): 1024,
    ("5 GB", 24, CPU): 384,
    ("5 GB", 24, GPU): 1536,
}


@pytest.mark.parametrize("text, hours, speed", FEATURES)
def test_settings_for_a_text_and_a_time(text, hours, speed):
    """All are chosen and fit together; longer texts and times get larger models; training takes
    no longer than asked.
    """
    words, tokens = TEXTS[text]
    config, lines = chosen(request(hours), words, tokens, speed)
    resolve({key: value for key, value in config.items() if key != "choose"})  # nothing is None
    assert config["body"]["features"] == FEATURES[text, hours, speed]
    assert bool(config["input"]["cutoffs"]) == (words > 4_000)
    assert config["batches"]["sequence_length"] <= tokens // 18 + 40
    batch, steps = config["tokens_per_update"], config["steps"]
    read = steps * batch
    assert read <= (READINGS + 1) * tokens
    assert (config["body"]["dropout"] > 0) == (read > 1.5 * tokens)
    divide_update(config, 1)
    optim.from_config(config)
    assert config["schedule"]["warmup_steps"] + config["schedule"]["cycle_steps"] == steps
    assert 1 <= config["log_every"] <= config["evaluate_every"] <= steps
    model = build(config, words)
    flops = 3 * traced.forward_flops(model, config["batches"]["sequence_length"])
    assert (
        0.3 * hours < flops * read / (0.4 * speed) / 3600 < hours or read > (READINGS - 1) * tokens
    )
    assert len(lines) == 5
    assert f"{steps:,} updates of {batch:,} tokens" in lines[2]


@pytest.mark.parametrize("size", SIZES[:5])
def test_work_of_a_size_is_that_of_its_model(size):
    """Blocks and softmax by formula, against the traced forward pass, times three."""
    config, _ = chosen(
        request(
            **{
                "body.layers": size.layers,
                "body.features": size.features,
                "body.heads": size.heads,
                "input.cutoffs": (),
            }
        ),
        500,
        900_000,
        CPU,
    )
    length = config["batches"]["sequence_length"]
    softmax = 6 * 500 * size.features
    assert training_flops(size._replace(length=length), softmax) == pytest.approx(
        3 * traced.forward_flops(build(config, 500), length), rel=0.1
    )


def test_tokens_read_again_count_less():
    """Four readings are almost as good as four times the text, forty hardly better than thirty;
    larger models are better.
    """
    small, large = SIZES[2], SIZES[4]
    new, four = (predicted_loss(small, unique, 4e6) for unique in (4e6, 1e6))
    assert 0 < four - new < 0.1 * (predicted_loss(small, 1e6, 1e6) - new)
    assert (
        0
        < predicted_loss(small, 1e6, 30e6) - predicted_loss(small, 1e6, 40e6)
        < 0.05 * predicted_loss(small, 1e6, 1e6)
    )
    assert predicted_loss(large, 1e6, 4e6) < four


def test_given_settings_stay():
    """And the others are chosen around them."""
    given = {
        "body.features": 96,
        "body.heads": 3,
        "steps": 77,
        "batches.sequence_length": 32,
        "input.cutoffs": (100, 900),
        "body.dropout": 0.15,
        "tokens_per_update": 640,
    }
    config, lines = chosen(request(2, **given), 9_000, 180_000, CPU, devices=4)
    flat = {"steps": config["steps"], "tokens_per_update": config["tokens_per_update"]} | {
        f"{group}.{key}": value
        for group in ("body", "batches", "input")
        for key, value in config[group].items()
    }
    assert {key: flat[key] for key in given} == given
    assert config["body"]["feed_forward"] == 4 * 96
    assert config["schedule"]["warmup_steps"] + config["schedule"]["cycle_steps"] == 77
    assert "cutoffs 100, 900" in lines[0]
    assert "about 0:00:13 of updates, of 2:00:00" in lines[-1]


@pytest.mark.parametrize("devices", [1, 6, 64])
def test_an_update_is_shared_evenly_by_the_devices(devices):
    """Also by a number that is no power of two."""
    config, _ = chosen(request(0.05), 9_000, 180_000, CPU, devices)
    divide_update(config, devices)


@pytest.mark.parametrize(
    "key, value",
    [
        ("steps", 0),
        ("tokens_per_update", -1),
        ("body.features", 0),
        ("body.heads", 0),
        ("body.layers", 1.5),
        ("batches.sequence_length", 0),
        ("choose.hours", 0.0),
        ("choose.hours", -1.0),
        ("choose.hours", math.inf),
        ("choose.hours", math.nan),
        ("input.cutoffs", (5, 5)),
    ],
)
def test_wrong_requests(key, value):
    """One line with the value."""
    with pytest.raises(
        InputError, match=re.escape(f"{value}") if key != "input.cutoffs" else "cutoffs"
    ):
        chosen(request(**{key: value}), 9_000, 180_000, CPU)


COMMON = {f"word{n}": 1 + 2_000 // (n + 1) for n in range(900)}
ONCE = {f"rare{n}": 1 for n in range(400)}


@pytest.mark.parametrize(
    "counts, read, expected",
    [
        (
            COMMON | ONCE | {"<eos>": 900},
            1e6,
            {"threshold": 2, "limit": 0, "codes": 0},
        ),  # 2.6 % occur once
        (
            COMMON | {"<unk>": 5_000, "<eos>": 900},
            1e6,
            {"threshold": 4, "limit": 0, "codes": 0},
        ),  # something must become <unk>
        (
            COMMON | ONCE | {"<eos>": 900},
            13_000,
            {"threshold": 3, "limit": 0, "codes": 0},
        ),  # the text is not read to its end
        (
            COMMON | ONCE | {"<eos>": 900},
            2_000,
            {"threshold": 1, "limit": 0, "codes": 1_318},
        ),  # nor a quarter of it
        (ONCE | {"<eos>": 3}, 1e6, {"threshold": 1, "limit": 0, "codes": 222}),
        ({"字": 3, "<eos>": 3}, 1e6, {"threshold": 1, "limit": 0, "codes": 200}),
        (
            {"a": 40_000_000, "b": 20_000_000, "c": 2, "<eos>": 5},
            1e9,
            {"threshold": 3, "limit": 0, "codes": 0},
        ),
    ],
)
def test_vocabulary_for_a_text(counts, read, expected):
    """Words while few of them become <unk>, otherwise sub-words; the line gives the numbers."""
    words = Vocabulary.build(counts)
    data, line = choose_vocabulary(request()["data"], words, read)
    assert {key: data[key] for key in expected} == expected
    if data["codes"]:
        assert line.startswith(f"sub-words, {data['codes']:,} merges: of whole words, ")
    else:
        kept = len(words.cut(data["threshold"], data["limit"]))
        assert 0 <= kept - int(re.search(r"([\d,]+) of", line)[1].replace(",", "")) <= 2


def test_the_largest_vocabulary(monkeypatch):
    """The rarest words beyond it become <unk>."""
    monkeypatch.setattr(rules, "MOST_WORDS", 800)
    data, line = choose_vocabulary(
        request()["data"], Vocabulary.build(COMMON | ONCE | {"<eos>": 900}), 1e6
    )
    assert (data["threshold"], data["limit"], data["codes"]) == (2, 800, 0)
    assert "800 of 1,300" in line


def test_a_vocabulary_that_is_asked_for():
    """What is not given takes its ordinary default."""
    data, line = choose_vocabulary(
        request(**{"data.codes": 300})["data"], Vocabulary.build(COMMON | {"<eos>": 1}), 1e6
    )
    assert (data["threshold"], data["limit"], data["codes"]) == (1, 0, 300)
    assert line == "as asked: data.codes=300"


@pytest.mark.parametrize(
    "lines, expected", [(3, (1, 1, 1)), (40, (36, 2, 2)), (250_001, (230_001, 10_000, 10_000))]
)
@pytest.mark.parametrize("compress", [None, gzip])
def test_a_file_is_split_in_order(lines, expected, compress, tmp_path):
    """The last tenth is for validation and test; together the copies are the text, and the
    user's folder stays as it is.
    """
    text = "\n".join(f"line {n}" for n in range(lines)).encode()
    folder, cache = tmp_path / "mine", tmp_path / "cache"
    folder.mkdir()
    file = folder / ("book.md.gz" if compress else "book.md")
    file.write_bytes(compress.compress(text) if compress else text)
    (folder / ".hidden").touch()
    assert single_file(str(folder)) == single_file(str(file)) == file
    directory, counts = split_lines(single_file(str(folder)), cache)
    parts = [(directory / f"{name}.txt").read_bytes() for name in ("train", "valid", "test")]
    assert counts == expected == tuple(part.count(b"\n") for part in parts)
    assert b"".join(parts) == text + b"\n"
    assert directory.parent.parent == cache
    assert {path.name for path in folder.iterdir()} == {".hidden", file.name}
    assert split_lines(file, cache) == (directory, counts)
    file.write_bytes(compress.compress(text + b" x") if compress else text + b" x")
    assert split_lines(file, cache).directory != directory


def test_what_is_no_single_file(text, tmp_path):
    """A folder of splits, of nothing, of two files; an archive; nothing at all."""
    (tmp_path / "two").mkdir()
    for name in "a", "b":
        (tmp_path / "two" / name).touch()
    (tmp_path / "text.tar.gz").touch()
    (tmp_path / "empty").mkdir()
    for place in (
        text,
        tmp_path / "two",
        tmp_path / "text.tar.gz",
        tmp_path / "empty",
        tmp_path / "nowhere",
    ):
        assert single_file(str(place)) is None
    (tmp_path / "two" / "a").write_text("one line only\nand another")
    with pytest.raises(InputError, match=r"has 2 line\(s\), too few to split"):
        split_lines(tmp_path / "two" / "a", tmp_path)


def test_products_are_measured():
    """Some gigaflops for each width, or the maker's figure."""
    speed = product_speed([64, 256])
    assert set(speed) == {64, 256}
    assert all(1e8 < rate < 1e17 for rate in speed.values())


@pytest.fixture
def book(text, tmp_path):
    """A folder with one file."""
    folder = tmp_path / "book"
    folder.mkdir()
    (folder / "book.txt").write_bytes(
        b"".join((text / f"{name}.txt").read_bytes() for name in ("train", "valid", "test"))
    )
    return folder


def test_own_text_in_one_line(book, tmp_path, capsys):
    """A dry run says what would be chosen; the run trains with that, resumes with it, refuses
    another time, and is evaluated.
    """
    workdir, cache = tmp_path / "run", str(tmp_path / "cache")
    asked = {
        "data.path": str(book),
        "data.cache": cache,
        "body.layers": 1,
        "tokens_per_update": 512,
        "log_every": 1,
    }
    dry_run(request(0.01, **asked), workdir, int(80e9))
    said = capsys.readouterr().out
    for line in (
        "text  ",
        "words  ",
        "bands  ",
        "model  ",
        "training  ",
        "dropout  ",
        "time  ",
        "parameters  ",
        "on 8  ",
    ):
        assert f"\n{line}" in f"\n{said}", line
    assert (
        "book.txt is split: its first 372 lines train, the next 20 validate, the last 20 test"
        in said
    )

    train(request(0.01, **asked, steps=3), workdir)
    config = json.loads((workdir / "config.json").read_text())
    first = (workdir / "metrics.jsonl").read_text()
    assert config["choose"] == {"hours": 0.01}
    assert config["data"]["codes"] > 0 or config["data"]["threshold"] > 1
    assert all(
        value is not None
        for group in config.values()
        if isinstance(group, dict)
        for value in group.values()
    )
    capsys.readouterr()

    shutil.rmtree(cache)  # what was prepared, the copies of the split among it, may be deleted
    train(request(0.01, **asked, steps=5), workdir)
    out = capsys.readouterr().out
    assert "after 3 of 5 updates" in out
    assert "\ntime  " not in out  # nothing is chosen again
    assert json.loads((workdir / "config.json").read_text()) == config | {"steps": 5}
    assert (workdir / "metrics.jsonl").read_text().startswith(first)
    with pytest.raises(InputError, match=r"choose.hours was 0.01 and is now 0.02"):
        train(request(0.02, **asked), workdir)
    assert evaluate(workdir, Request())["step"] in (3, 5)
    with pytest.raises(InputError, match="--config.data.path=DIR"):
        train(request(), tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_explain_says_what_is_chosen():
    """Of this config, and of no other."""
    assert "  --config.steps=None" in explain.config(request())
    assert "  --config.choose.hours=2.5  (default 1.0)" in explain.config(request(2.5))
    assert "choose.hours" not in explain.config(resolve(quickstart.get_config()))


@pytest.mark.parametrize("config, key", [("own_text", "choose.hours"), ("quickstart", "hours")])
def test_hours_is_a_flag(quick_command, config, key):
    """It plans a run of one's own text, and limits any other."""
    done = quick_command("train.py", f"--config=configs/{config}.py", "--hours=2", "--explain")
    assert done.returncode == 0 and f"  --config.{key}=2.0" in done.stdout
