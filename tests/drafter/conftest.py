"""What these tests share; see support/fake_drafter.py."""

from collections.abc import Callable

import pytest

from drafter_service.draft_tree import Growth
from outrider.source.events import DecodingRequest
from tests.drafter.support.fake_drafter import FakeDrafter, make_request, run_pass


@pytest.fixture
def fake() -> FakeDrafter:
    """A fake drafter with room for everything."""
    return FakeDrafter()


@pytest.fixture(scope="session")
def fake_drafter() -> type[FakeDrafter]:
    """The class FakeDrafter, for tests that set its sizes."""
    return FakeDrafter


@pytest.fixture(scope="session")
def request_for() -> Callable[..., DecodingRequest]:
    """A factory of requests for decoding."""
    return make_request


@pytest.fixture(scope="session")
def one_pass() -> Callable[..., int]:
    """A function that runs one pass over sessions."""
    return run_pass


@pytest.fixture(scope="session")
def growth() -> Growth:
    """Small trees with siblings."""
    return Growth(children=2, scale=1.0, floor=0.05, depth=4)
