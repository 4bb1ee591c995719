"""What the JSON files of one folder say about the goals: the end of a long run, on one screen.

python bench/summary.py bench/results/<device>
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def lines(folder: Path) -> list[str]:
    """A line per goal, and per case in which another provider was faster than our kernel."""
    found = []
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text())
        if path.name == "roofline.json":
            found.append(f"copy rate {result['copy']['copy_tb_s']:.3f} TB/s, launches {result['launches']}")
        elif path.name == "compile_time.json":
            found.append(f"compile time: {result['cold_s']:.1f} s, {result['warm_s']:.1f} s cached; {result['goal']}")
        elif "goals" in result:
            stopped = f", {result['stopped']}" if result["stopped"] else ""
            found.append(f"{result['op']}: {len(result['rows'])} rows{stopped}")
            for goal in result["goals"]:
                value = "" if goal["value"] is None else f": {goal['value']:g} {goal['unit']}"
                found.append(f"  {goal['goal']}{value}: {goal['verdict']}")
            found += [f"  slower than another: {line}" for line in result["slower_than_another"]]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    print("\n".join(lines(parser.parse_args().folder)))


if __name__ == "__main__":
    main()
