"""How long to fuzz: a short version in the suite, the long one with KV_FUZZ=long (`make fuzz`)."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

LONG = os.environ.get("KV_FUZZ") == "long"


def examples(short: int, long: int) -> Any:
    """Settings of one property: how many examples, no deadline of hypothesis's own."""
    return settings(
        max_examples=long if LONG else short,
        deadline=None,
        derandomize=not LONG,
        suppress_health_check=list(HealthCheck),
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long version may take its time."""
    if LONG:
        for item in items:
            item.add_marker(pytest.mark.timeout(3600))
