"""End to end: ways to decode the same prompts, side by side in one run, equality checked first.

    found = run(settings, load)              # see :mod:`dspark_fast.benchmark.runner`
    print_report(console, found)             # what ``dspark-fast bench`` prints; ``found`` is what it writes as JSON

Ways are :class:`~dspark_fast.benchmark.ways.Way` objects. A new one is a function that decodes a case and says when
its first token came; everything else (turns, equality, medians, prediction, table) is done for it.
"""

from dspark_fast.benchmark.runner import Settings, Unequal, run
from dspark_fast.benchmark.table import WIDTH, print_report
from dspark_fast.benchmark.ways import WAYS, Pair, Way

__all__ = ["run", "Settings", "Unequal", "print_report", "WIDTH", "WAYS", "Way", "Pair"]
