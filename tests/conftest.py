"""Run every test on one CPU thread, and share fixtures.

With more threads a product may be cut up otherwise, so a process that forks (a forked child must
not use its parent's thread pool) would end with other bits than its parent.
"""

import atexit
import gc

import pytest
import torch
from hypothesis import settings

pytest_plugins = ["tests.helpers.decoding", "tests.helpers.gpu", "tests.helpers.estimates"]

torch.set_num_threads(1)
settings.register_profile("shared machine", deadline=None)  # examples wait for other processes
settings.load_profile("shared machine")
atexit.register(gc.unfreeze)  # else compiled modules report leaks at the end


@pytest.fixture(autouse=True, scope="module")
def imported_modules_are_no_garbage() -> None:
    """Leave what is imported by now out of collections of garbage, which would search it each time.

    A run collects after every stage: 40% of its seconds in a process with torch and transformers.
    Each module does this again, since tests import more, and timing unfreezes at its end.
    """
    gc.collect()
    gc.freeze()
