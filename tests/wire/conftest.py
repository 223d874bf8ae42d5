"""Both ways to encode what no signature expresses."""

import pytest

from gradwire._wire.codec import Manner
from tests.wire.round_trip import PICKLE, PLAIN


@pytest.fixture(params=[PICKLE, PLAIN], ids=["pickle", "plain"])
def manner(request: pytest.FixtureRequest) -> Manner:
    return request.param
