"""What the READMEs say of ways to decode side by side, from the files that ``dspark-fast bench`` wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trust import Untrusted, other_drafter

from dspark_fast.benchmark.table import left_out
from dspark_fast.benchmark.verdict import disturbed, sentences
from dspark_fast.benchmark.workload import place
from dspark_fast.evaluation import shipped_prompts

if TYPE_CHECKING:
    from claims import Results

OTHER_DRAFTER = "Measured with an earlier drafter than the one that ships now."
#: files of :func:`shapes`; the README's own table is the first shape of the first
FILES = "end_to_end*.json"

Row = dict[str, Any]


def providers(results: Results) -> str:
    """Ours beside every other way to decode, prompts alone and as they are, fastest first."""
    rows = _shapes(results.end_to_end)[1, None]
    return "\n".join([*_table(rows, whole=False), "", *_said(results.end_to_end, rows, whole=False)])


def shapes(results: Results) -> str:
    """The same in batches, behind long contexts and in fp32, with what the clock said; the machine first.

    Raises:
        Untrusted: if the files are of several machines.
    """
    machine = results.end_to_end["machine"]
    lines = [
        f"{results.end_to_end['model']} on {machine['device']}, {machine['threads']} thread"
        f"{'' if machine['threads'] == 1 else 's'}, torch {machine['torch']}, transformers {machine['transformers']}.",
    ]
    for name in sorted(path.stem for path in (results.folder / "cpu").glob(FILES)):
        found = getattr(results, name)
        if found["machine"] != machine:
            raise Untrusted(f"{name}.json is of {found['machine']}, end_to_end.json of {machine}: measure one again")
        for shape, rows in _shapes(found).items():
            prompts, repeats, tokens = rows[0]["prompts"], rows[0]["repeats"], found["settings"]["max_new_tokens"]
            together = "" if shape[0] == 1 else f" in {prompts // shape[0]} call{'' if prompts == shape[0] else 's'}"
            what = f"{prompts} prompts{together}, {tokens} new tokens each, {repeats} repeats"
            lines += ["", f"### {place(*shape).capitalize()}, {found['dtype']}", ""]
            lines += [f"{what} ([data](results/cpu/{name}.json)):", "", *_table(rows, whole=True), ""]
            lines += _said(found, rows, whole=True)
            lines += [f"- {line}" for line in left_out([one for one in found["left_out"] if _of(one, shape)])]
    return "\n".join(lines)


def prompts(results: Results) -> dict[str, str]:
    """What the README's table is of."""
    row, found = _shapes(results.end_to_end)[1, None][0], results.end_to_end
    said = {"prompts": row["prompts"], "tokens": found["settings"]["max_new_tokens"], "repeats": row["repeats"]}
    return {name: str(count) for name, count in {**said, "all": len(shipped_prompts())}.items()}


def over_all(results: Results) -> dict[str, str]:
    """The speedup over all of them, as users get it; refused where it is no headline."""
    found, rows = results.end_to_end, _shapes(results.end_to_end)[1, None]
    if other_drafter(found, found["model"]) or disturbed(rows):
        raise Untrusted("end_to_end.json is of another drafter, or of a machine that was not left alone: measure again")
    (row,) = (row for row in rows if (row["provider"], row["set"]) == ("ours", "all"))
    return {**prompts(results), "times": f"{row['speedup']['median']:.2f}"}


def _of(one: dict[str, Any], shape: tuple[int, int | None]) -> bool:
    """Whether a way was left out of a shape; those that nobody asked for in any are not spoken of."""
    return one["batch"] is not None and (one["batch"], one["context"]) == shape


def _shapes(found: dict[str, Any]) -> dict[tuple[int, int | None], list[Row]]:
    """Rows by batch and context."""
    by_shape: dict[tuple[int, int | None], list[Row]] = {}
    for row in found["rows"]:
        by_shape.setdefault((row["batch"], row["context"]), []).append(row)
    return by_shape


def _table(rows: list[Row], *, whole: bool) -> list[str]:
    """Of one shape.

    Args:
        whole: with what whole calls gain, prefill included; tokens per second; and the time that compiling took.
    """
    over_all = sorted((row for row in rows if row["set"] == "all"), key=lambda row: -row["speedup"]["median"])
    sets = [name for name in dict.fromkeys(row["set"] for row in rows) if name != "all"]
    by_set = {(row["provider"], row["set"]): row["speedup"]["median"] for row in rows}
    more = ["whole calls", "tokens/s (range)", "compiling, s"] if whole else []
    header = ["provider", "speedup (range)", *sets, "predicted", *more, "first token, ms"]
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for row in over_all:
        compiling = row["compile_seconds"]
        calls = [
            f"{row['call_speedup']['median']:.2f}",
            _spread(row["tokens_per_second"], 1),
            "" if compiling is None else f"{compiling:.0f}",
        ]
        predicted = row["predicted_speedup"]
        cells = [
            f"**{row['label']}**" if row["ours"] else row["label"],
            _spread(row["speedup"], 2),
            *(f"{by_set[row['provider'], one]:.2f}" for one in sets),
            "" if predicted is None else f"{predicted:.2f}",
            *(calls if whole else []),
            f"{row['first_token_ms']['median']:,.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _said(found: dict[str, Any], rows: list[Row], *, whole: bool) -> list[str]:
    """What the table does not show: where a prediction was off and why, who is ahead, whose tokens fell otherwise.

    Args:
        whole: of single sets too, and near-ties.
    """
    over_all = [row for row in rows if row["set"] == "all"]
    said = [OTHER_DRAFTER] if other_drafter(found, found["model"]) else []
    said += [
        f"{row['label']}{'' if row in over_all else ', ' + row['set']}: {row['why']}."
        for row in (rows if whole else over_all)
        if row["why"]
    ]
    said += [f"{row['label']} differs: {one}" for row in over_all for one in row["same_tokens"]["unexplained"]]
    tied = [f"{row['label']} {count}" for row in over_all if (count := row["same_tokens"]["near_ties"])]
    if tied and whole:
        said.append(f"In {found['dtype']} near-ties fell the other way in, of {rows[0]['prompts']}: {', '.join(tied)}.")
    return [f"- {one}" for one in (*said, *sentences(rows))]


def _spread(value: dict[str, Any], decimals: int) -> str:
    return f"{value['median']:.{decimals}f} ({value['least']:.{decimals}f} to {value['most']:.{decimals}f})"
