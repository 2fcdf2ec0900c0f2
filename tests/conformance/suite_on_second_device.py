"""The whole conformance suite, with every torch module on the second device.

Run by hand, since it takes more than ten minutes: python -m pytest tests/conformance/suite_on_second_device.py
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.conformance import test_conformance
from tests.conformance.second_device_runs import Elsewhere, on_second_device
from tests.conformance.test_conformance import *  # noqa: F403

_make = test_conformance.federation.__wrapped__  # type: ignore[attr-defined]


@pytest.fixture
def time_limit() -> None:
    """None: every operation on this device takes as long as Python does."""


@pytest.fixture(scope="module")
def federation(digits: Any) -> Any:
    """The suite's federations, on the second device."""
    return Elsewhere(on_second_device(_make(digits))).federation
