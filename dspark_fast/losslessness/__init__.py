"""Is decoding lossless? Exact laws of tiny pairs against thousands of seeded draws from the real code.

    from dspark_fast.losslessness import run
    assert all(row.passed for row in run())

The tables, the law by enumeration and the G-test share no line with sampling or verification. Needs scipy.
"""

from dspark_fast.losslessness.rows import ROWS, Row
from dspark_fast.losslessness.run import Result, run, run_row

__all__ = ["ROWS", "Result", "Row", "run", "run_row"]
