"""Loss rows of a server, by brute force, and the reach under published mask bugs."""

from __future__ import annotations

from torch import Tensor


def server_rows(spans: Tensor, k: int) -> set[tuple[int, int]]:
    """Return every (t, step) that a server may draft, by trying all acceptances.

    The target writes the first answer token x_a, so the first chain starts at t = a − 1; it drafts
    x_{t+2} … x_{t+1+k}, of which those up to the span's end are real predictions of answer tokens;
    after accepting n of them the next chain starts at t + n + 1.
    """
    values, rows = spans.tolist(), set()
    starts = [a for a in range(1, len(values)) if values[a] and values[a] != values[a - 1]]
    for a in starts:
        end = a
        while end + 1 < len(values) and values[end + 1] == values[a]:
            end += 1
        seen, todo = set(), [a - 1]
        while todo:
            t = todo.pop()
            if t in seen or t + 1 > end:
                continue
            seen.add(t)
            steps = [step for step in range(k) if t + 2 + step <= end]
            rows |= {(t, step) for step in steps}
            todo += [t + accepted + 1 for accepted in range(len(steps) + 1)]
    return rows
