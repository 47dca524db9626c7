"""Devices that are not here: their names, what is said where they cannot be compiled for, and
which platform code is traced for.
"""

import importlib.util
import re
import sys

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, PartitionSpec

from adaptive_jax.numerics.devices import DEVICES, GPUS, description, find
from adaptive_jax.numerics.platforms import capability, platform, tracing_for
from adaptive_jax.parallel.sharding import device_mesh
from adaptive_jax.planning import targets
from tests import refuses

OLD = sys.version_info < (3, 12)


@pytest.mark.parametrize(
    "name", ["h1000", "H100", "h100:", "h100:8x", "", "cpu", "v5e:0x2", "v5e", "h100:2x2x8"]
)
def test_unknown_devices(name):
    """One line with the name and those that there are."""
    with refuses(f"--target={name}", "a100", "h100", "v5e:2x2"):
        targets.topology(name)


@pytest.mark.parametrize("name, lacks", [("h100", "nvidia and jax_plugins"), ("v5e:2x2", "libtpu")])
def test_missing_packages(monkeypatch, name, lacks):
    """One line with the packages, Python's version and the cure."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    with refuses(f"--target={name}", lacks, "Python 3.12", "'.[targets]'"):
        targets.topology(name)


def test_descriptions_are_whole():
    """Every GPU has every field that the compiler reads, as a number; a block's shared memory
    is less than a core's.
    """
    for name, chip in GPUS.items():
        lines = re.findall(r"^  +(\w+): ([\d.e+]+)$", description(name), re.MULTILINE)
        fields = {name: float(value) for name, value in lines}
        assert len(fields) == 17 and min(fields.values()) > 0
        assert (
            fields["shared_memory_per_block"]
            < fields["shared_memory_per_block_optin"]
            < fields["shared_memory_per_core"]
        )
        assert f'device_description_str: "{chip.kind}"' in description(name)
        assert find(chip.kind) is DEVICES[name]


def test_code_is_traced_for_the_devices_of_its_mesh(monkeypatch):
    """Under shard_map for the mesh, in `tracing_for` for a device; without both for JAX's
    default.
    """
    seen = []

    def look(x):
        seen.append((platform(), capability()))
        return x

    assert (platform(), capability()) == (jax.default_backend(), (0, 0))
    for kind, name, expected in [
        ("NVIDIA H100 80GB HBM3", "cuda", ("gpu", (9, 0))),
        ("TPU v5 lite", "tpu", ("tpu", (0, 0))),
        ("NVIDIA A100-SXM4-80GB", "gpu", ("gpu", (8, 0))),
    ]:
        device = AbstractDevice(kind, None, name)
        types = (AxisType.Auto,)
        mesh = AbstractMesh((1,), ("x",), axis_types=types, abstract_device=device)
        spec = PartitionSpec("x")
        jax.eval_shape(
            jax.shard_map(look, mesh=mesh, in_specs=spec, out_specs=spec),
            jax.ShapeDtypeStruct((4,), "float32"),
        )
        assert seen.pop() == expected
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    mesh, spec = device_mesh(1, jax.devices("cpu")[:1]), PartitionSpec()
    jax.eval_shape(
        jax.shard_map(look, mesh=mesh, in_specs=spec, out_specs=spec),
        jax.ShapeDtypeStruct((4,), "float32"),
    )
    assert seen.pop() == ("cpu", (0, 0)) and platform() == "tpu"
    with tracing_for("cpu", jax.devices()[0].device_kind):
        assert platform() == "cpu"
    with tracing_for("gpu", "NVIDIA H200"):
        assert capability() == (9, 0)


@pytest.mark.skipif(
    OLD or importlib.util.find_spec("libtpu") is None, reason="needs libtpu and Python 3.12"
)
def test_grids_that_a_tpu_cannot_have():
    """The error is one line with the flag as it was given; libtpu ends with several of its own."""
    with refuses("--target=v5e:3x5"):
        targets.topology("v5e:3x5")
