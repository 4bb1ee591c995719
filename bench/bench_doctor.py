"""Every fault planted in SmolLM2's pair, and what the doctor calls it.

    python bench/bench_doctor.py

The target answers the package's held-out prompts once, by its chat template; the good pair and every broken one are
then examined on these answers. Writes ``doctor.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import describe, results_folder
from rich.console import Console
from rich.table import Table

from dspark_fast.doctor import Examination, PairRefused, load_pair
from dspark_fast.doctor.examine import examine_texts
from dspark_fast.doctor.faults import Fault, planted
from dspark_fast.doctor.texts import Format, conversations, write_texts


def row(name: str, fault: Fault | None, named: str | None, found: Examination | None, seconds: float) -> dict[str, Any]:
    """What is kept of one examination."""
    expected = None if fault is None else fault.name
    finding = found.findings[0] if found is not None and found.findings else None
    return {
        "planted": name,
        "is": expected,
        "named": named,
        "right": named == expected,
        "agreement": None if found is None else found.outcome.by_slot,
        "agreement_all": None if found is None else found.outcome.agreement,
        "with": None if finding is None else finding.change,
        "agreement_all_with": None if finding is None else finding.numbers.after,
        "z": None if finding is None else finding.numbers.z,
        "p_value": None if finding is None else finding.numbers.p_value,
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--draft", help="a drafter other than the one that is shipped")
    parser.add_argument("--per-domain", type=int, default=6)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    arguments = parser.parse_args()

    good = load_pair(arguments.model, draft=arguments.draft)
    model, tokenizer = good.model, good.tokenizer
    start = time.perf_counter()
    prompts = [Format().ids(tokenizer, one) for one in conversations(arguments.per_domain)]
    texts = write_texts(model, prompts, arguments.max_new_tokens)
    writing = time.perf_counter() - start

    rows = []

    def examined(name: str, fault: Fault | None, target: Any, draft: Any) -> Examination:
        begin = time.perf_counter()
        found = examine_texts(target, draft, tokenizer, texts)
        rows.append(row(name, fault, found.fault, found, time.perf_counter() - begin))
        return found

    base = examined("nothing", None, model, good.draft)
    with tempfile.TemporaryDirectory() as scratch:
        for name, fault in planted(good.draft.config).items():
            print(f"planted: {name}", file=sys.stderr)
            try:
                pair = fault.plant(model, tokenizer, good.folder, Path(scratch) / name)
            except PairRefused as refused:
                # It cannot be run as it is; after the repair that the doctor tries it can.
                rows.append({**row(name, fault, refused.fault, None, 0.0), "refused": str(refused)})
                if refused.repaired is not None:
                    after = examine_texts(model, refused.repaired.draft, tokenizer, texts).outcome.agreement
                    rows[-1] |= {"with": refused.repair, "agreement_all_with": after}
                continue
            examined(name, fault, pair.model, pair.draft)
    result = {
        "machine": describe(str(model.device)),
        "model": arguments.model,
        "dtype": str(model.dtype).removeprefix("torch."),
        "texts": len(texts),
        "blocks": len(base.outcome.right),
        "seconds_writing": writing,
        "rows": rows,
    }
    (results_folder(model.device.type) / "doctor.json").write_text(json.dumps(result, indent=2) + "\n")

    table = Table(title=f"{arguments.model}, {result['dtype']}, {result['blocks']} blocks")
    for heading in ("planted", "is", "named", "right", "agreement", "with the change", "z", "seconds"):
        table.add_column(heading)
    for one in rows:
        numbers = ("agreement_all", "agreement_all_with", "z", "seconds")
        cells = ["" if one[key] is None else f"{one[key]:.2f}" for key in numbers]
        table.add_row(one["planted"], str(one["is"]), str(one["named"]), "yes" if one["right"] else "NO", *cells)
    Console(width=150).print(table)
    if not all(one["right"] for one in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
