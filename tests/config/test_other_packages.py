"""Layers and optimizers of other packages, named `package.module:Class` in a config."""

import json

import pytest

from adaptive_jax import load
from adaptive_jax.config import keys
from adaptive_jax.config.keys import check_allowed, complete, resolve
from adaptive_jax.runs.settings import read_config
from tests import refuses
from tests.conftest import ROOT

TOYS = '''
"""Layers that this project has never seen."""
import jax.numpy as jnp
import optax
from flax import linen as nn
from adaptive_jax.numerics.bands import Band
from adaptive_jax.outputs.softmax import Softmax

class Input(nn.Module):
    """Vectors, scaled.

    Attributes:
        scale: factor of every vector.
    """
    vocabulary_size: int
    features: int
    scale: float = 1.0

    def setup(self):
        shape = self.vocabulary_size, self.features
        self.table = self.param("table", nn.initializers.normal(0.1), shape)

    def __call__(self, tokens, batch=None, *, train=False):
        return self.scale * self.table[tokens]

    def bands(self):
        return [Band(self.table)]

class Body(nn.Module):
    """A gate on every vector; hidden states know only their own token."""
    features: int = 8
    gates: tuple[int, ...] = (1,)

    @nn.compact
    def __call__(self, vectors, carry=(), batch=None, *, train=False):
        for _ in self.gates:
            vectors = vectors * nn.sigmoid(nn.Dense(self.features)(vectors))
        return vectors, carry

    def initial_carry(self, rows):
        return ()

class Output(Softmax):
    """A softmax whose smoothing has another default."""
    label_smoothing: float = 0.1

def signs(learning_rate: float = 0.01, *, momentum: float | None = None):
    """Steps by the sign of every gradient."""
    return optax.chain(optax.scale_by_sign(), optax.scale_by_learning_rate(learning_rate))
'''
OPTIMIZERS = """
def steps(learning_rate: float, sizes: tuple[int, ...], betas=(0.9, 0.999), scale: float = 1):
    pass

def names(learning_rate: float, names: tuple[str, ...] = (), grid=((0.5, 1), (2, 3))):
    pass

def several(learning_rate: float, axis: int | str = 0, size: int | tuple[int, ...] = 3,
            scale: int | float = 1, pairs: tuple[tuple[int, int], ...] = ()):
    pass

class Outer:
    def odd(learning_rate: float, mix: tuple[str, float] = ("a", 0.5), eps=float("inf"),
            seed=2**40, flags=(None, 1), sizes=[]):
        pass
"""
NAMES = {
    "input.name": "my_toys.layers:Input",
    "input.scale": 2,
    "body.name": "my_toys.layers:Body",
    "body.gates": "1,1",
    "output.name": "my_toys.layers:Output",
    "optimizer.name": "my_toys.layers:signs",
    "optimizer.learning_rate": 0.001,
    "schedule.name": "constant",
}


@pytest.fixture(scope="module")
def run(quick_command, flags, tmp_path_factory):
    """A run of toys that lie outside of this repository, of three updates; and the variables by
    which Python finds them.
    """
    place = tmp_path_factory.mktemp("outside")
    (place / "my_toys").mkdir()
    (place / "my_toys" / "layers.py").write_text(TOYS)
    # The small run without what another class has no key for.
    gone = "input.cutoffs", "optimizer.clip_norm", "optimizer.momentum", "schedule.cycle_steps"
    line = [
        flag.replace("--config=", f"--config={ROOT}/")
        for flag in flags(place / "run", steps=3, evaluate_every=3, checkpoint_every=3)
        if not flag.startswith((*(f"--config.{key}=" for key in gone), "--config.body."))
    ]
    names = [f"--config.{key}={value}" for key, value in NAMES.items()]
    done = quick_command("-m", "adaptive_jax", "train", *line, *names, cwd=place)
    assert done.returncode == 0, done.stderr
    assert "drops" in done.stdout and "config.input.name=my_toys.layers:Input" in done.stdout
    assert f"evaluate --workdir={place}/run --allow=my_toys.layers --split=test" in done.stdout
    return place


def test_keys_come_from_the_fields(run):
    """Each with the default of its field, or the value of a flag in the field's type."""
    config = json.loads((run / "run" / "config.json").read_text())
    assert config["input"] == {"name": NAMES["input.name"], "scale": 2.0}
    assert config["body"] == {"name": NAMES["body.name"], "features": 192, "gates": [1, 1]}
    assert config["output"]["label_smoothing"] == 0.1
    assert (config["optimizer"]["learning_rate"], config["optimizer"]["momentum"]) == (0.001, None)


@pytest.mark.parametrize("line", [["evaluate", "--workdir=run"], ["score", "--workdir=run"]])
def test_code_of_a_workdir_runs_only_if_allowed(run, quick_command, line):
    """A workdir may be anybody's: without --allow none of its code is imported, and one line says
    how to; with it the run is read.
    """
    (run / "my_toys" / "__init__.py").write_text("print('imported')\n")
    done = quick_command("-m", "adaptive_jax", *line, cwd=run, given="the t0w0\n")
    assert done.returncode == 2 and "imported" not in done.stdout
    assert done.stderr.endswith(
        "pass --allow=my_toys.layers to import and run it, if you trust it\n"
    )
    line = [*line, "--allow=my_toys.layers"]
    done = quick_command("-m", "adaptive_jax", *line, cwd=run, given="the t0w0\n")
    assert done.returncode == 0 and "imported" in done.stdout, done.stderr


def test_the_command_that_an_export_prints(run, quick_command):
    """It opens the exported model, whose layers need the flag as the run's do."""
    line = "export", "--workdir=run", "--output=model", "--allow=my_toys.layers"
    done = quick_command("-m", "adaptive_jax", *line, cwd=run)
    assert f"evaluate --workdir={run}/model --allow=my_toys.layers --split=test" in done.stdout


def test_tuples_have_the_items_of_their_default_or_annotation(tmp_path, monkeypatch):
    """Tuples of numbers or texts were refused at their own default, a tuple without default was a
    TypeError, and a number whose default is written as 1 could not be 0.5. A default of no one
    type was refused too, and so were the other types of an annotation with several.
    """
    (tmp_path / "toy_steps.py").write_text(OPTIMIZERS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(keys, "_allowed", set())

    def settings(name, **changes):
        changes = {"name": f"toy_steps:{name}", "learning_rate": 0.1} | changes
        return complete({f"optimizer.{key}": value for key, value in changes.items()})["optimizer"]

    values = settings("steps", sizes="3,4")
    assert (values["sizes"], values["betas"], values["scale"]) == ((3, 4), (0.9, 0.999), 1.0)
    values = settings("steps", sizes=[3], betas=(1, 0.5), scale=0.5)
    assert (values["sizes"], values["betas"], values["scale"]) == ((3,), (1.0, 0.5), 0.5)
    values = settings("names", names=["a"])
    assert (values["names"], values["grid"]) == (("a",), ((0.5, 1.0), (2.0, 3.0)))
    values = settings("several", axis="auto", size=[3, 3], scale=0.5, pairs="(1,2),(3,4)")
    assert (values["axis"], values["size"], values["scale"]) == ("auto", (3, 3), 0.5)
    assert values["pairs"] == ((1, 2), (3, 4))
    values = settings("several", axis="5", size="5")
    assert (values["axis"], values["size"]) == (5, 5)
    defaults = (("a", 0.5), float("inf"), 2**40, (None, 1), ())
    assert tuple(settings("Outer.odd").values())[2:7] == defaults
    for name, changes, parts in (
        ("Nope", {}, ("toy_steps:Nope", "no attribute 'Nope'")),
        ("steps", {}, ("sizes", "missing")),
        ("steps", {"sizes": (0.5,)}, ("sizes=(0.5,)", "a tuple of whole numbers")),
        ("steps", {"sizes": 3, "betas": "x"}, ("betas='x'", "numbers, such as (0.9, 0.999)")),
        ("names", {"names": (1,)}, ("names=(1,)", "a tuple of texts")),
        ("names", {"grid": (1, 2)}, ("grid=(1, 2)", "a tuple of tuples of finite numbers")),
        ("names", {"grid": ((1, float("inf")),)}, ("grid", "finite")),
        ("several", {"pairs": (1, 2)}, ("pairs=(1, 2)", "a tuple of tuples of whole numbers")),
    ):
        with refuses(*parts):
            settings(name, **changes)
    muon = {"optimizer.name": "optax.contrib:muon", "optimizer.learning_rate": 0.1}
    assert set(map(type, complete(muon)["optimizer"]["ns_coeffs"])) == {float}


def test_resuming_needs_no_flag_more(run, monkeypatch):
    """The command that began the run names its classes, so it may read them in the workdir; no
    other command may.
    """
    with refuses("--allow=my_toys.layers"):
        read_config(run / "run")
    monkeypatch.setattr(keys, "_allowed", {"my_toys.layers"})
    with refuses("config.input.name", "PYTHONPATH"):
        read_config(run / "run")
    monkeypatch.setattr(keys, "_allowed", set())
    monkeypatch.syspath_prepend(run)
    with refuses("--allow=my_toys.layers"):
        load(run / "run")
    assert load(run / "run", allow=["my_toys.layers"]).run.config["input"]["scale"] == 2
    monkeypatch.setattr(keys, "_allowed", set())
    config = complete(NAMES | {"body.gates": (1, 1)})
    assert read_config(run / "run")["input"] == config["input"]


def test_a_config_that_is_no_config():
    """One line, not a traceback, for a config.json in which a group is something else."""
    check_allowed({"output": 5, "input": {"name": 3}}, "config.json")
    with refuses("config.output=5"):
        resolve({"output": 5})
