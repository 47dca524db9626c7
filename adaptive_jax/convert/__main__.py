"""`python -m adaptive_jax.convert CHECKPOINT WORDS OUT_WORKDIR`; see
`adaptive_jax.convert.command`.
"""

import runpy

if __name__ == "__main__":
    runpy.run_module("adaptive_jax.convert.command", run_name="__main__", alter_sys=True)
