"""Whatever a client sends by the OpenAPI description, the server does not fail."""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from live import LOOPBACK, Live

pytestmark = pytest.mark.enable_socket
few = settings(max_examples=6, phases=[Phase.generate], suppress_health_check=list(HealthCheck), database=None)


def test_no_request_makes_it_fail(server: Live) -> None:
    description = schemathesis.openapi.from_url(f"http://{LOOPBACK}:{server.port}/openapi.json")
    operations = [found.ok() for found in description.get_all_operations()]
    assert len(operations) > 10
    for operation in operations:

        @few
        @given(case=operation.as_strategy())
        def answered(case: schemathesis.Case) -> None:
            assert case.call(timeout=60).status_code < 500, f"{case.method} {case.path}"

        answered()
