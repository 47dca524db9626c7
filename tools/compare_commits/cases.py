"""The cases: every value of every choice at least once, in pairs, on tiny shapes and a small text.

cases.txt lists them. A case is commands that run one after the other in a directory, `{here}`, and
what is read after each: metrics and parameters of a run, results of an evaluation, and so on.
"""

import json
from pathlib import Path

import numpy as np

# What NEW calls otherwise than OLD: the old beginning of a flag, or of a part of a result's name,
# to the new one. cases.txt has the flags of OLD, NEW gets those that it knows; None: it has none,
# and needs none.
FLAGS: dict[str, str | None] = {}
NAMES: dict[str, str | None] = {}

# Small settings of each class. The rest is left to the defaults, so that these are compared, too.
# Unless a case says otherwise, updates are not clipped and the rate is constant, so that parameters
# move by the sum of 20 gradients.
FILTERS = ((1, 8), (2, 8), (3, 16))
LETTERS = {"width": 6, "filters": FILTERS, "length": 8}
TRANSFORMER = {"layers": 1, "features": 32, "heads": 2, "feed_forward": 64}
TRANSFORMER |= {"attention_dropout": 0.2}
GATED = {"features": 32, "blocks": ((1, 3, 32), (2, 1, 12, 3, 12, 1, 32)), "dropout": 0.1}
LSTM = {"features": 32, "widths": (24, 32)}
PARTS = {
    "input": {
        "lookup": {"width": 0},
        "adaptive": {"cutoffs": (20, 60)},
        "char_cnn": LETTERS,
        "ngrams": {"rows": 40, "row_width": 8, "hashed_rows": 20, "words.cutoffs": (20, 60)},
        "groc": LETTERS | {"strides": (1, 2, 1), "lexicon": "{lexicon}", "definition": 4},
    },
    "body": {
        "transformer": TRANSFORMER,
        "transformer_post_norm": TRANSFORMER,
        "gated_conv": GATED,
        "lstm": LSTM,
        "awd_lstm": LSTM,
    },
    "output": {"softmax": {}, "adaptive": {}, "hierarchical": {}, "differentiated": {}}
    | {"sampled": {"samples": 24}, "nce": {"samples": 24}},
    "output.table": {"own": {}, "tied": {}, "mapped": {}, "assembled": {}}
    | {"composed": {f"cnn.{key}": value for key, value in LETTERS.items()} | {"correction": 8}},
    "optimizer": {
        "sgd": {"learning_rate": 0.3, "clip_norm": 1e6},
        "nag": {"learning_rate": 0.5},
        "adam": {"learning_rate": 0.01},
        "nt_asgd": {"learning_rate": 20.0, "nonmono": 1},  # takes averages from update 4 on
        "asgd": {"learning_rate": 20.0},
    },
    "schedule": {
        "constant": {"warmup_steps": 0},
        "cosine_cycles": {"warmup_steps": 3, "cycle_steps": 6, "cycles": 2},
        "inverse_square_root": {"warmup_steps": 4},
        "plateau": {"warmup_steps": 0, "patience": 1, "threshold": 0.2},
    },
}
USUAL = {"input": "lookup", "body": "transformer", "output": "softmax", "output.table": "own"}
USUAL |= {"optimizer": "sgd", "schedule": "constant"}
RUN = {
    "steps": 20,
    "tokens_per_update": 128,
    "tokens_per_device": 128,
    "log_every": 1,
    "evaluate_every": 10,
    "checkpoint_every": 20,
    "keep": 9,
    "metrics.tensorboard": False,
    "data.corpus": "text_files",
    "data.path": "{text}",
    "data.threshold": 1,
    "data.tokeniser": "none",
    "data.lower": False,
    "data.vocabulary_size": 150,
    "batches.sequence_length": 16,
}
SHORT = {  # words of cases.txt
    "adp_t": "adaptive transformer adaptive tied",
    "awd": "awd_lstm tied batches.layout=streams",
    "streams": "batches.layout=streams",
    "often": "evaluate_every=2",
    "cut": "output.table.cutoffs=(20,60)",
    "bands": "output.table.factor=2 output.table.bias=True output.table.width=24",
    "narrow": "input.width=16 input.factor=2",
    "smooth": "output.label_smoothing=0.1 output.z_loss=0.01",
    "deep": "output.table.depth=2 output.table.layer_dropout=0.2 output.table.bias=own",
    "grounded": "output.table.depth=0 output.table.bias=predicted",
    "grid": "--split=validation --model_weight=0.8,0.9",
    "union": "--vocabulary=union --data_path={other}",
    "dynamic": "--method=dynamic --window=6 --rate=0.001",
    "exported": "export --output={here}/exported place=exported",
    "scorer": "export --output={here}/scorer place=scorer --format=stablehlo --rows=2 --window=12",
}
# What is read after a command that is not train.py, see worker.py
READ = {"evaluate": "evaluation", "score": "output", "generate": "output", "clusters": "file"}
READ |= {"export": "arrays", "examples/stablehlo_scorer.py": "output", "convert": "parameters"}
READ |= {"rows": "rows"}
HERE = Path(__file__).parent
FIXTURES = HERE.parents[1] / "tests" / "fixtures"


def cases(places: dict[str, str]) -> dict[str, list[dict]]:
    """The commands of every case, by its name. `places` by name, see `write_texts`; cases whose
    places are not all there are left out.
    """
    known = {"here", *places}
    steps = {}
    lines = (HERE / "cases.txt").read_text().replace("\n    ", " ").splitlines()
    for line in lines:
        if not line or line.startswith("#"):
            continue
        name, commands = line.split(": ", 1)
        for kind in "fairseq", "gcnn":
            commands = commands.replace(f"{{convert {kind}}}", conversions(kind, places))
        if all(place.split("}")[0] in known for place in commands.split("{")[1:]):
            steps[name] = [step(command) for command in commands.split("; ")]
    return steps


def step(command: str) -> dict:
    """A command of cases.txt: its label, arguments, hosts and devices; where and how its results
    are read.
    """
    words = " ".join(SHORT.get(word, word) for word in command.split()).split()
    about = {"label": command, "devices": 1, "hosts": 1, "place": "run"}
    for word in list(words):
        key, _, value = word.partition("=")
        if key in about:
            about[key] = value if key == "place" else int(value)
            words.remove(word)
    about["place"] = f"{{here}}/{about['place']}"
    name = words[0] if words else ""
    if name not in READ:
        more = [word for word in words if word.startswith("--")]
        rest = [word for word in words if word not in more]
        argv = ["train.py", "--config=configs/quickstart.py", f"--workdir={about['place']}", *more]
        return about | {"argv": argv + flags(rest), "read": "run"}
    argv = [f"{name}.py" if name == "evaluate" else name, *words[1:]]
    if name in ("evaluate", "score", "generate", "export"):
        argv += [f"--workdir={about['place'] if name == 'evaluate' else '{here}/run'}"]
    return about | {"argv": argv, "read": READ[name]}


def flags(words: list[str]) -> list[str]:
    """The flags of a run with these classes and settings: `["lstm", "tied", "steps=3"]`."""
    names, given = dict(USUAL), [word for word in words if "=" not in word]
    if given[:1] == ["adaptive"]:  # the input; the output of this name stands behind the body's
        names["input"] = given.pop(0)
    for name in given:
        names[next(group for group in reversed(PARTS) if name in PARTS[group])] = name
    settings = dict(RUN)
    for group, name in names.items():
        settings[f"{group}.name"] = name
        settings |= {f"{group}.{key}": value for key, value in PARTS[group][name].items()}
    settings |= dict(word.split("=", 1) for word in words if "=" in word)
    return [f"--config.{key}={value}" for key, value in settings.items()]


def conversions(kind: str, places: dict[str, str]) -> str:
    """Commands that convert the checkpoints of a kind among the tests' fixtures and beside the
    project.
    """
    files = {
        file.stem: f"{{{name}}}/{kind}/{file.name}"
        for name in ("reference", "fixtures")
        for file in sorted(Path(places.get(name, "none"), kind).glob("*.pt"))
    }
    return "; ".join(
        f"convert {file} {{fixtures}}/{kind}/dict.txt {{here}}/{name} place={name}"
        for name, file in files.items()
    )


def write_texts(here: Path) -> dict[str, str]:
    """Writes what the cases read into a directory; its places by name, as cases.txt calls them."""
    bits = np.random.Generator(np.random.Philox(1))
    syllables = ["ba", "de", "fi", "lo", "mu", "na", "pe", "ri", "so", "tu"]
    words = ["the", "cat", "dog", "house", "tree", "king", "water", "bread", "Stone", "river"]
    words += ["".join(syllables[int(digit)] for digit in f"{n * 37 % 1000}") for n in range(110)]
    places = {"fixtures": str(FIXTURES)}
    for name, own in ("text", words), ("other", [*words[30:], "snow", "moon", "Fire", "lamp"]):
        places[name] = str(here / name)
        (here / name).mkdir()
        share = 1 / np.arange(1, len(own) + 1)
        for split, lines in ("train", 300), ("valid", 24), ("test", 26):
            text = [" ".join(own), "the <unk> fell ."] if split == "train" else ["Hapax , <unk>"]
            for n in range(lines):  # an empty line ends a document
                line = bits.choice(len(own), int(bits.integers(2, 14)), p=share / share.sum())
                text.append(" ".join(own[word] for word in line) if n % 7 else "")
            (here / name / f"{split}.txt").write_text("\n".join(text) + "\n")
    places["awd"] = str(here / "awd")  # 37 words, in the order of their ids in the fixture
    (here / "awd").mkdir()
    order = " ".join(f"w{n}" for n in range(35))
    for split, text in ("train", order), ("valid", "w3 <unk>"), ("test", "w4 w9\n\nw1 <unk> w20"):
        (here / "awd" / f"{split}.txt").write_text(f"{text}\n")
    places["lexicon"] = str(here / "lexicon.jsonl")
    with open(places["lexicon"], "w") as file:
        for n, word in enumerate(words[::2]):
            related = [words[n // 3], words[-n], "nowhere"][: n % 4]
            defined = [words[(n * k) % len(words)] for k in range(n % 6)]
            line = {"word": word, "relations": related, "definition": defined}
            file.write(json.dumps(line) + "\n")
    places["given"] = str(here / "given.txt")
    Path(places["given"]).write_text("the cat dog\nking bread the tree\n")
    return places
