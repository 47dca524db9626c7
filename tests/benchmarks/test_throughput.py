"""The benchmarks of whole updates: that they run, need no more than they say, compare equal
models, and end when time is up.
"""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from adaptive_jax.config.keys import resolve
from adaptive_jax.errors import InputError
from adaptive_jax.planning.plan import make_plan
from benchmarks import gpu, scaling, throughput
from configs import billion_word, wikitext103

# What training on prepared ids does not need, made impossible to import.
BARRED = """
import runpy, sys
for name in ("tensorflow_datasets", "tensorflow", "tensorboardX", "filelock", "sentencepiece", "sacremoses", "pythonbible",
             "array_record", "matplotlib"):
    sys.modules[name] = None
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def tiny():
    """A config of a few thousand parameters, with the layers that torch has."""
    config = throughput.laptop() | {
        "dtype": "bfloat16",
        "tokens_per_update": 32,
        "tokens_per_device": 32,
    }
    config["body"] |= {"layers": 2, "features": 32, "heads": 4, "feed_forward": 48}
    for group in (config["input"], config["output"]["table"]):
        group["cutoffs"] = (100, 300)
    config["data"]["vocabulary_size"], config["batches"]["sequence_length"] = 700, 16
    return config


def test_the_gpu_parts_need_few_packages(command, tmp_path):
    """The first update of benchmarks.gpu, at tiny size, with nothing but what its docstring
    names and what that needs.
    """
    variant = gpu.steps(tmp_path, tiny=True)[1].variants[0]
    assert variant.name == "adp_t"
    done = command("-c", BARRED, *variant.command, f"--json={tmp_path / 'out.json'}")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    assert [row["peer"] for row in result["rows"]] == ["adaptive_jax"]
    assert all(row["seconds"] >= row["fastest"] > 0 for row in result["rows"])
    assert result["rows"][0]["times_ours"] == 1 and result["flops_per_update"] > 0
    assert list((tmp_path / "profile").rglob("perfetto_trace.json.gz"))


def test_a_profile_that_fails_loses_no_number(monkeypatch, tmp_path, capsys):
    """Times are printed and written before it."""

    def profile(*_):
        raise RuntimeError("no tool for profiles")

    row = {
        "peer": throughput.OURS,
        "seconds": 0.5,
        "fastest": 0.4,
        "tokens_per_second": 64.0,
        "utilisation": 0.1,
        "times_ours": 1,
    }
    told = {
        "device": "GPU",
        "python": "3",
        "jax": "0",
        "model": "small",
        "matrix_flops_per_second": 1e12,
        "flops_per_update": 1e9,
    }
    monkeypatch.setattr(
        throughput,
        "measure",
        lambda *_: (told | {"bytes": None, "rows": [row]}, {throughput.OURS: None}),
    )
    monkeypatch.setattr(throughput, "profile", profile)
    flags = SimpleNamespace(
        rows=1, repeats=1, updates=1, config=None, json=tmp_path / "out.json", profile=str(tmp_path)
    )
    with pytest.raises(RuntimeError, match="no tool"):
        throughput.main(flags)
    assert "500.0" in capsys.readouterr().out and json.loads((tmp_path / "out.json").read_text())[
        "rows"
    ] == [row]


def test_parts_of_an_update(tiny, monkeypatch):
    """The output runs alone; the other parts are updates of the config with one change, of
    those that run here.
    """

    def update(config, rows):
        if config["body"]["attention"] in ("cudnn", "triton", "splash"):
            raise InputError("needs a GPU")
        return config["body"], 0

    monkeypatch.setattr(throughput, "our_update", update)
    tiny["body"]["dropout"] = 0.1
    parts = throughput.our_parts(tiny, 2)
    loss, (params, hidden) = parts.pop("its output alone")()
    assert float(loss) == pytest.approx(2 * 16 * np.log(700), rel=0.5)
    assert hidden.shape == (2, 16, 32) and params["output"]["clusters"].any()
    assert parts == {
        "without dropout": tiny["body"] | {"dropout": 0.0},
        "attention plain": tiny["body"] | {"attention": "plain"},
        "attention chunked": tiny["body"] | {"attention": "chunked"},
    }


def test_torch_is_given_an_equal_model(tiny):
    """As many parameters but for the biases and the like that each has, and the loss of a
    uniform guess.
    """
    torch = pytest.importorskip("torch")
    from benchmarks import torch_model

    model = torch_model.TorchModel(tiny)
    theirs = sum(p.numel() for p in model.parameters())
    assert (
        make_plan(tiny, 700, 1).parameters["total"] - theirs == 2 * 32
    )  # the last norm, which theirs does without
    ids = throughput.zipf(tiny, 2)
    update = torch_model.torch_update(tiny, ids, "cpu")
    losses = [update() for _ in range(3)]
    assert np.isfinite(losses).all() and abs(losses[0] / np.log(700) - 1) < 0.5
    with torch.no_grad():
        inputs, targets = torch.tensor(ids[:, :-1]), torch.tensor(ids[:, 1:]).long()
        moved = inputs.clone()
        moved[:, -1] = 5
        assert model(moved, targets) != model(inputs, targets)


def test_what_the_paper_counts():
    """Arithmetic halves with twice the devices, sums of gradients do not, and sharding
    parameters costs three more passes.
    """
    config = resolve(wikitext103.get_config("adp_t"))
    eight, sixteen = (scaling.costs(config, "H200", devices, 1) for devices in (8, 16))
    assert eight["arithmetic"] == pytest.approx(2 * sixteen["arithmetic"])
    assert eight["communication"] == pytest.approx(2 * 4 * 246.9e6 * 7 / 8 / 450e9, rel=1e-3)
    config = resolve(billion_word.get_config("very_large")) | {"tokens_per_device": 16_384}
    assert scaling.costs(config, "H200", 8, 8)["communication"] == pytest.approx(
        3 * 4 * 1026.2e6 * 7 / 8 / 450e9, rel=1e-3
    )
