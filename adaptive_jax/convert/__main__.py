"""`python -m adaptive_jax.convert CHECKPOINT WORDS OUT_WORKDIR`; see
`adaptive_jax.interop.convert`.
"""

import runpy

if __name__ == "__main__":
    runpy.run_module("adaptive_jax.interop.convert", run_name="__main__", alter_sys=True)
