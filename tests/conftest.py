"""Run every test on one CPU thread, and share fixtures.

With more threads a product may be cut up otherwise, so a process that forks (a forked child must
not use its parent's thread pool) would end with other bits than its parent.
"""

import torch
from hypothesis import settings

pytest_plugins = ["tests.helpers.decoding", "tests.helpers.gpu", "tests.helpers.estimates"]

torch.set_num_threads(1)
settings.register_profile("shared machine", deadline=None)  # examples wait for other processes
settings.load_profile("shared machine")
