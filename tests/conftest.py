"""Every test runs on 8 simulated CPU devices."""

import warnings

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")


@pytest.fixture(autouse=True)
def _donation_warnings_fail():
    """A donated buffer that XLA could not use is memory held twice: an error, not a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*[Dd]onated.*")
        yield
