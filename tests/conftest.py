"""Every test runs on one CPU thread: two workers share the cores, and sums keep their order.

With more threads a product may be cut up otherwise, so a process that forks (a forked child must
not use its parent's thread pool) would end with other bits than its parent.
"""

import torch

torch.set_num_threads(1)
