"""`python -m adaptive_jax.data.vocabulary CORPUS`; see `adaptive_jax.planning.report`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("adaptive_jax.planning.report", run_name="__main__", alter_sys=True)
