"""Where a request failed, for the operator: files and lines, but no message, which may quote what was asked."""

import json
import logging
import traceback
from pathlib import Path
from typing import Any

log = logging.getLogger("kvlink.server")

FRAMES = 8
"""Of a traceback, those next to the fault."""


def fault_of(error: BaseException) -> dict[str, Any]:
    """Return the kind of an error and where it came from."""
    frames = traceback.extract_tb(error.__traceback__)[-FRAMES:]
    return {"fault": type(error).__name__, "at": [f"{Path(one.filename).name}:{one.lineno}" for one in frames]}


def log_fault(request: str, error: BaseException) -> None:
    """Tell the operator where the request of this id failed."""
    log.error("%s", json.dumps({"id": request, **fault_of(error)}))
