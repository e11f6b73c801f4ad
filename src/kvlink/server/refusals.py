"""What a client is told when a request cannot be carried out: a status, and a body in the shape of OpenAI's errors."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import Response

from kvlink.core.errors import (
    Cancelled,
    ContextOverflow,
    DeadlineExceeded,
    DeviceBusy,
    InputError,
    KVLinkError,
    ModelRefused,
    QueueFull,
)

RETRY_AFTER_S = 1
"""When a client that found the queue full may ask again."""

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class Refused(Exception):
    """A request that is not carried out.

    Attributes:
        status: HTTP status.
        code: What programs read, such as `context_length_exceeded`.
        param: The field that is to blame, or None.
        retry_after_s: When the client may ask again, where it may.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float = RETRY_AFTER_S,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        """The error as OpenAI's clients read it."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> Response:
        """The whole response."""
        headers = {"retry-after": str(math.ceil(self.retry_after_s))} if self.status in (429, 503) else {}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return answer(self.body, status=self.status, headers=headers)


def refusal_of(error: KVLinkError) -> Refused:
    """Return how an error of the engine is told."""
    match error:
        case ContextOverflow():
            return Refused(400, str(error), code="context_length_exceeded", param="messages")
        case InputError() | ModelRefused():
            return Refused(400, str(error), code="invalid_request")
        case QueueFull() | DeviceBusy():
            return Refused(429, str(error), code="queue_full")
        case DeadlineExceeded():
            return Refused(504, str(error), code="deadline_exceeded")
        case Cancelled():
            return Refused(503, str(error), code="closing")
        case _:
            return failed(error)


def failed(error: Exception) -> Refused:
    """Return how a fault is told: by its kind, since its message may hold anything."""
    return Refused(500, f"the request failed: {type(error).__name__}", code="failed")


def invalid(errors: Sequence[Mapping[str, Any]]) -> Refused:
    """Return how a body that does not fit its description is told; what it held is not repeated."""
    first = errors[0]
    path = [str(part) for part in first["loc"] if part != "body" and not str(part).endswith(")")]
    param = ".".join(path) or None
    if first["type"] == "extra_forbidden":
        return Refused(400, f"{param} is not supported: leave it out", code="unsupported", param=param)
    return Refused(400, f"{param or 'the body'}: {first['msg']}", code="invalid_value", param=param)


def answer(body: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return JSON in ASCII: half a surrogate pair of a client's text has no place in UTF-8."""
    return Response(json.dumps(body), status_code=status, headers=headers, media_type="application/json")
