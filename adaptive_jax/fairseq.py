"""`python -m adaptive_jax.fairseq`: another name of `python -m adaptive_jax.convert`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("adaptive_jax.interop.convert", run_name="__main__", alter_sys=True)
