"""Every test runs on 8 simulated CPU devices."""

import os
import warnings

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")
# The machine code of small programs is not worth optimizing: a third of the time. The partitioned programs are the same.
jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(autouse=True)
def _donation_warnings_fail():
    """A donated buffer that XLA could not use is memory held twice: an error, not a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*[Dd]onated.*")
        yield


@pytest.fixture(scope="session", autouse=True)
def audit_cache(tmp_path_factory):
    """Audited programs compile once a test session, in whichever worker comes first; the user's cache is left alone."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "audits"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZJAX_CACHE_DIR", str(folder))
        yield folder
