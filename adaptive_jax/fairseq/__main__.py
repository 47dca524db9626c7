"""`python -m adaptive_jax.fairseq CHECKPOINT DICT OUT_WORKDIR`; see `adaptive_jax.fairseq.command`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("adaptive_jax.fairseq.command", run_name="__main__", alter_sys=True)
