"""What Orbax 0.12 lacks for checkpoints in object storage."""

import functools

from adaptive_jax.files import kvstore


@functools.cache
def teach_orbax() -> None:
    """Has Orbax write arrays to s3:// as it does to gs://, and delete in both without the package
    google-cloud-storage, which would tell it of buckets with real folders.
    """
    # Here, because other versions of Orbax may have these private parts elsewhere, and runs on a
    # disk need none of them.
    from orbax.checkpoint._src.path import gcs_utils
    from orbax.checkpoint._src.serialization import tensorstore_utils

    build = tensorstore_utils.build_kvstore_tspec

    def build_for_any(directory, *arguments, **named):
        if not directory.startswith("s3:"):
            return build(directory, *arguments, **named)
        return _on_s3(build("gs:" + directory.removeprefix("s3:"), *arguments, **named))

    tensorstore_utils.build_kvstore_tspec = build_for_any
    gcs_utils.is_hierarchical_namespace_enabled = lambda _: False


def _on_s3(spec):
    """A specification for gs:// as one for s3://."""
    if not isinstance(spec, dict):
        return spec
    if str(spec.get("driver")).startswith("gcs"):
        return kvstore(f"s3://{spec['bucket']}/{spec['path']}")
    return {key: _on_s3(value) for key, value in spec.items()}
