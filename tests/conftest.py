"""What all tests share: no hub, quiet threads, reproducible properties, and shapes checked at run time."""

import gc
import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:  # the cores are shared with the other workers
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.pop("COLUMNS", None)  # those of a terminal that a worker has not

from hypothesis import HealthCheck, settings

settings.register_profile(
    "suite", max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("torture", settings.get_profile("suite"), derandomize=False, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))


def pytest_collection_finish() -> None:
    """Keep what imports have made out of later collections: one that walks all of torch stops every thread."""
    gc.collect()
    gc.freeze()
