"""`python -m adaptive_jax.export --workdir=RUN --output=DIR`; see
`adaptive_jax.interop.export_command`.
"""

import runpy

if __name__ == "__main__":
    runpy.run_module("adaptive_jax.interop.export_command", run_name="__main__", alter_sys=True)
