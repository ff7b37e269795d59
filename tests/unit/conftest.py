"""Nothing that tests elsewhere have kept warm goes on at its own pace here, where some count what is open."""

import gc

import pytest

from cloche.backends.local.prefork import close_pools


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_kept_warm() -> None:
    """End it: about a minute after the last run, a timer would close some of it, while a test counts descriptors."""
    close_pools()
    gc.collect()
