"""Settings of the compiler, and programs on eight devices, which tests of losses and layers share
with all others. It needs no config, so it also runs beside an installed wheel.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

ROOT = Path(__file__).parents[1]

# Most programs of the tests run once, so all are compiled in haste, but for those that
# tests/test_as_users_compile.py runs again. Read when JAX first runs.
# In one part: to cut a program in parts and to join them takes a tenth of the time.
HASTY = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}
if jax.__version_info__ < (0, 11):
    # Later versions have no other way to compile fused loops; here it halves the time.
    HASTY["xla_cpu_use_fusion_emitters"] = False
HASTE = " ".join(f"--{name}={str(value).lower()}" for name, value in HASTY.items())
HASTE = os.environ.get("HASTE", HASTE)
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {HASTE}".strip()


def hasty_jit(function, **how):
    """`jax.jit` of a slow twin, which is compiled in haste even where tests compile as users do."""
    return jax.jit(function, compiler_options=None if HASTE else HASTY, **how)


@contextlib.contextmanager
def uncached():
    """Compiles anew: on CPUs a program from the cache on disk cannot be serialized (jax 0.10)."""
    compilation_cache.reset_cache()
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        compilation_cache.reset_cache()
        jax.config.update("jax_enable_compilation_cache", True)


def dtypes_of_products(program: str) -> set[tuple[str, ...]]:
    """Those of both factors and of the result of every product in the text of a lowered program:
    on a CPU XLA keeps float32 where it is asked to round.
    """
    shape = r"tensor<[0-9x]+x(\w+)>"
    return set(re.findall(rf"dot_general.*: \({shape}, {shape}\) -> {shape}", program))


@pytest.fixture(scope="session", autouse=True)
def compiled(pytestconfig):
    """A directory where programs once compiled are found again, by all processes that the tests
    start and by the next run of them. JAX_COMPILATION_CACHE_DIR names another.
    """
    directory = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    directory = directory or str(pytestconfig.rootpath / ".pytest_cache" / "compiled")
    jax.config.update("jax_compilation_cache_dir", directory)
    # A shape that is broadcast by accident is a mistake that no test would see.
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = directory
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"


@pytest.fixture(scope="session")
def eight(tmp_path_factory):
    """`eight(CODE, *arguments)`: the stdout of a program on eight devices, which must not fail.

    All run in one process; see tests/eight.py.
    """
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count=8 {HASTE}"}
    process = subprocess.Popen(
        [sys.executable, "tests/eight.py"],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | flags,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )

    def eight(code, *arguments):
        directory = tmp_path_factory.mktemp("eight")
        job = {"code": code, "argv": list(map(str, arguments)), "directory": str(directory)}
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        status = int(process.stdout.readline())
        assert status == 0, (directory / "err").read_text()[-3000:]
        return (directory / "out").read_text()

    with process:
        yield eight
        process.stdin.close()
