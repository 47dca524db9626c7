"""`python -m adaptive_jax.data.clusters`; see `adaptive_jax.evaluation.clusters`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("adaptive_jax.evaluation.clusters", run_name="__main__", alter_sys=True)
