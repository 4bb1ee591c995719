"""What the READMEs say of measurements, and where each number comes from; ``readme.py`` puts them in.

Tables of both, and the sentences of README.md; the sentences of bench/README.md are in ``claims_bench.py``, ways to
decode side by side in ``claims_providers.py``.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from claims_bench import BENCH_README, assumed, passes, predicted, round_parts
from claims_providers import OTHER_DRAFTER, over_all, prompts, providers, shapes
from claims_two_layer import page as two_layer_drafter
from trust import disturbed, other_drafter, refuse, refuse_other_drafter

DISTURBED = "Something else was using the machine: where it says so, the speedups are not to be trusted."
WORDS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]


class Results:
    """The JSON files of one folder of devices; those of no device stand beside the folders."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getattr__(self, name: str) -> Any:
        path, beside = (folder / f"{name}.json" for folder in (self.folder / "cpu", self.folder))
        path = beside if beside.is_file() else path
        if not path.is_file():
            raise AttributeError(f"{path} is missing: measure it first")
        value = json.loads(path.read_text(encoding="utf-8"))
        setattr(self, name, value)
        return value

    @cached_property
    def fast(self) -> list[dict[str, Any]]:
        """The five prompts in 16 bits, where speed is measured."""
        return [row for row in self.five_prompts["rows"] if row["dtype"] != "float32"]


def mean(rows: list[dict[str, Any]], key: str) -> float:
    return sum(row[key] for row in rows) / len(rows)


def five_prompts(results: Results) -> str:
    """The first screen's table. Speeds of a machine that was not left alone are no headline: they are not shown."""
    refuse_other_drafter(results.five_prompts, results.five_prompts["model"], "five_prompts.json")
    doubtful = disturbed(results.fast, "speedup_least", "speedup_most")
    exact = {(row["prompt"], row["mode"]): row for row in results.five_prompts["rows"] if row["dtype"] == "float32"}
    heads = (
        "prompt",
        "tokens",
        "acceptance length",
        "speedup (range)",
        "predicted",
        "same tokens: fp32",
        "fp32, coupled at T 0.8",
    )
    lines = [f"| {' | '.join(heads)} | bf16 |", "|---" * (len(heads) + 1) + "|"]
    for row in results.fast:
        same = [_same(one) for one in (exact[row["prompt"], "greedy"], exact[row["prompt"], "coupled"], row)]
        spread = f"({row['speedup_least']:.2f} to {row['speedup_most']:.2f})"
        speedup = f"not trusted {spread}" if row in doubtful else f"{row['speedup']:.2f} {spread}"
        lines.append(
            f"| {row['prompt']} | {row['new_tokens']} | {row['acceptance_length']:.2f} | {speedup} | "
            f"{row['predicted_speedup']:.2f} | {' | '.join(same)} |"
        )
    means = [f"{mean(results.fast, key):.2f}" for key in ("acceptance_length", "speedup", "predicted_speedup")]
    if doubtful:
        means[1] = ""
        return "\n".join([*lines, f"| mean | | {' | '.join(means)} | | | |", "", DISTURBED])
    return "\n".join([*lines, f"| mean | | {' | '.join(means)} | | | |"])


def _same(row: dict[str, Any]) -> str:
    if row["identical"]:
        return "yes"
    first = row["first_difference"]
    return f"{'near-tie' if first['near_tie'] else '**fault**'} at {first['index']}"


def mutants(results: Results) -> str:
    """Every planted fault, what finds it, and with how many draws."""
    lines = ["| fault | dies by | draws |", "|---|---|---|"]
    for one in results.mutants["mutants"]:
        fault = one["fault"].replace("|", "\\|")
        means = f"law: `{one['row']}`" if one["means"] == "law" else one["means"]
        lines.append(f"| {fault} | {means} | {one['draws']:,} |")
    return "\n".join(lines)


def engine(results: Results) -> str:
    """The engine against transformers' own ``generate``, whole calls."""
    found, lines = results.engine, ["| | speedup | goal |", "|---|---:|---|"]

    def line(what: str, value: float, spread: str, goal: float | None) -> None:
        said = "" if goal is None else f"{goal:g}" if value >= goal else f"{goal:g}, **not reached**"
        said = f"{goal:g}, not known" if goal is not None and NOT_TRUSTED in spread else said
        lines.append(f"| {what} | {value:.2f} ({spread}) | {said} |")

    for name, what, goal in (
        ("prompts", "ten prompts alone, 128 tokens each: mean of the medians of {pairs} pairs", 1.8),
        ("compiled", "the same with `compile_target=True`, transformers' own not compiled", 1.8),
    ):
        rows = found[name]["rows"]
        speeds = [row["speedup"] for row in rows]
        spread = f"{min(speeds):.2f} to {max(speeds):.2f} by prompt{_doubt(*rows)}"
        line(what.format(pairs=rows[0]["pairs"]), found[name]["mean_speedup"], spread, goal)
        without = [row["no_drafter"] for row in rows]
        speeds = [one["speedup"] for one in without]
        spread = f"{min(speeds):.2f} to {max(speeds):.2f} by prompt{_doubt(*without)}"
        line("ours without a drafter, in the same turns", statistics.mean(speeds), spread, None)
    worst = found["worst"]
    what = f"a drafter of random weights, 256 tokens of a long story, median of {worst['pairs']} pairs"
    line(what, worst["speedup"], f"{worst['least']:.2f} to {worst['most']:.2f}{_doubt(worst)}", 0.95)
    gain = worst["over_no_drafter"]
    spread = f"{gain['least']:.2f} to {gain['most']:.2f}{_doubt(gain)}"
    line("the same, over ours without a drafter", gain["speedup"], spread, 0.95)
    for row in found["batch"]["rows"]:
        if row["name"] == OFF_SWITCH:
            alone = row["no_drafter"]
            spread = f"{alone['least']:.2f} to {alone['most']:.2f}{_doubt(alone)}"
            line("eight prompts together, ours without a drafter", alone["speedup"], spread, None)
        spread = f"{row['least']:.2f} to {row['most']:.2f}{_doubt(row)}"
        line(
            f"eight prompts together, {row['name']}",
            row["speedup"],
            spread,
            0.95 if row["name"] == OFF_SWITCH else None,
        )
    earlier = [name for name in ENGINE_PARTS if other_drafter(found[name], found["model"])]
    return "\n".join([*lines, *(["", f"{OTHER_DRAFTER} ({', '.join(earlier)})"] if earlier else [])])


ENGINE_PARTS = ("prompts", "compiled", "batch", "worst", "profile")  # those of a drafter
OFF_SWITCH = "with the off-switch"
NOT_TRUSTED = "not trusted"
BLOCK = 7  # of the drafter whose loss was weighed


def _doubt(*rows: dict[str, Any]) -> str:
    return f", {NOT_TRUSTED}: the machine was not left alone" if disturbed(rows, "least", "most") else ""


def _alarms(results: Results) -> dict[str, str]:
    levels = results.false_alarms["levels"]
    return {name: str(levels[name]["runs_of_each"]) for name in ("op", "loop")}


def _settings(results: Results) -> dict[str, str]:
    """The suite shares its false alarms out among its rows."""
    return {"settings": f"{results.false_alarms['family_wise_level'] / results.mutants['level_of_a_row']:.0f}"}


def _planted(results: Results) -> dict[str, str]:
    return {"faults": str(len(results.mutants["mutants"]))}


def _training(results: Results) -> dict[str, str]:
    """Of the run whose times were kept."""
    run = results.training
    return {
        "tokens": f"{round(run['answers']['tokens'], -3):,}",
        "answering": f"{run['answers']['seconds'] / 60:.0f}",
        "steps": f"{sum(run['training']['steps']):,}",
        "minutes": f"{sum(run['training']['seconds']) / 60:.0f}",
    }


def _doctor(results: Results) -> dict[str, str]:
    faults = [row for row in results.doctor["rows"] if row["is"] is not None]
    assert all(row["right"] for row in results.doctor["rows"])
    return {"faults": WORDS[len(faults)]}


def _expected(results: Results) -> dict[str, str]:
    rows = results.engine["prompts"]["rows"]
    refuse_other_drafter(results.engine["prompts"], results.engine["model"], "engine.json, prompts")
    refuse(rows, "least", "most", "engine.json")
    refuse(results.fast, "speedup_least", "speedup_most", "five_prompts.json")
    speeds = [row["speedup"] for row in (*rows, *results.fast)]
    return {"least": f"{min(speeds):.1f}", "most": f"{max(speeds):.1f}"}


def _ten(results: Results) -> dict[str, str]:
    """The ten prompts: whole, before anything is drafted, and what drafts add to that."""
    rows = results.engine["prompts"]["rows"]
    refuse(rows, "least", "most", "engine.json")
    parts = {name: [row[name]["speedup"] for row in rows] for name in ("no_drafter", "over_no_drafter")}
    gains = parts["over_no_drafter"]
    assert "sky" in rows[gains.index(min(gains))]["prompt"], "the README calls the least gain chat"
    return {
        "times": f"{results.engine['prompts']['mean_speedup']:.2f}",
        "alone": f"{statistics.mean(parts['no_drafter']):.2f}",
        "gain": f"{statistics.mean(gains):.2f}",
        "least": f"{min(gains):.2f}",
        "most": f"{max(gains):.2f}",
    }


def _of_eight(results: Results) -> dict[str, str]:
    (row,) = (row for row in results.engine["batch"]["rows"] if row["name"] == OFF_SWITCH)
    return {"ours": f"{row['speedup']:.2f}", "alone": f"{row['no_drafter']['speedup']:.2f}"}


def _in_fp32(results: Results) -> dict[str, str]:
    rows = [row for row in results.five_prompts["rows"] if row["dtype"] == "float32"]
    said = {}
    for mode in ("greedy", "coupled"):
        speeds = [row["speedup"] for row in rows if row["mode"] == mode]
        said |= {f"{mode}_least": f"{min(speeds):.1f}", f"{mode}_most": f"{max(speeds):.1f}"}
    return said


def _soak(results: Results) -> dict[str, str]:
    found = results.soak
    kinds, memory = found["calls"]["kind"], found["memory_mib"]
    failed = sum(kinds[name] for name in ("NaN", "bad argument", "interrupt", "streamer raises"))
    return {
        "calls": f"{found['calls']['all']:,}",
        "failed": str(failed),
        "mib": f"{max(memory) - min(memory):.1f}",
        "hooks": str(found["hooks_left"]),
    }


def _memory(results: Results) -> dict[str, str]:
    """The fused loss's share of the memory of the unfused one, as a bound."""
    memory = results.draft_loss["memory"]
    shape = memory["rows"][0]
    share = 100 * max(memory["of_unfused"].values())
    return {"percent": f"{int(share) + 1}", "tokens": f"{shape['V']:,}", "anchors": str(shape["rows"] // BLOCK)}


def _drafters(results: Results) -> dict[str, str]:
    return {"drafters": str(len(results.ablation["rows"]))}


def _of_a_block(results: Results) -> dict[str, str]:
    """What the target's pass over a block costs in fp32, in plain steps."""
    rows = [row for row in results.five_prompts["rows"] if (row["dtype"], row["mode"]) == ("float32", "greedy")]
    costs = [row["seconds_per_round"]["verify"] / row["seconds_per_plain_step"] for row in rows]
    return {"times": f"{sum(costs) / len(costs):.1f}"}


def _features(results: Results) -> dict[str, str]:
    return {"kilobytes": f"{results.predicted['features']['bytes'] / 1000:.0f}"}


def _saved(results: Results) -> dict[str, str]:
    """What the cheaper losses cost in acceptance, against the whole vocabulary's and the baseline's."""
    tau = {row["name"]: row["tau"]["mean"] for row in results.ablation["rows"]}
    costs = [
        tau["vocabulary-all"] - tau["baseline"],
        tau["baseline"] - tau["vocabulary-2048"],
        tau["baseline"] - tau["top-64"],
    ]
    return {"least": f"{min(costs):.2f}", "most": f"{max(costs):.2f}"}


def _shipped(results: Results) -> dict[str, str]:
    """tau on the shipped prompts, by temperature."""
    refuse_other_drafter(results.eval, results.eval["model"], "eval.json")
    taus = {one["temperature"]: one["mean_tau"] for one in results.eval["results"]}
    return {"greedy": f"{taus[0.0]:.2f}", "sampled": f"{taus[1.0]:.2f}"}


def _tau(results: Results) -> dict[str, str]:
    refuse_other_drafter(results.acceptance, results.acceptance["model"], "acceptance.json")
    return {"tau": f"{results.acceptance['results'][0]['mean_tau']:.2f}"}


#: tables between markers, by file
TABLES: dict[str, dict[str, Callable[[Results], str]]] = {
    "README.md": {"five-prompts": five_prompts, "mutants": mutants, "providers": providers},
    "bench/README.md": {
        "engine": engine,
        "round": round_parts,
        "passes": passes,
        "shapes": shapes,
        "two-layer-drafter": two_layer_drafter,
    },
}

#: sentences with numbers in them, by file
SENTENCES: dict[str, dict[str, Callable[[Results], dict[str, str]]]] = {
    "README.md": {
        "expect {least} to {most} times greedily in bf16": _expected,
        "Over ten prompts of 128 tokens each the mean is {times} ([data](bench/results/cpu/engine.json)). Of that, "
        "{alone} comes without a drafter": _ten,
        "Drafts multiply it by {gain} on average, {least} (chat) to {most}": _ten,
        "with the off-switch {ours} times `generate`'s speed, without a drafter {alone}": _of_eight,
        "a speedup of {greedy_least} to {greedy_most} greedily and {coupled_least} to {coupled_most} in coupled "
        "mode": _in_fp32,
        "by a suite that rejects {faults} planted faults": _planted,
        "against seeded runs of the real loop and of its ops in {settings} settings": _settings,
        "{faults} faults are planted in the code": _planted,
        "The {faults} faults, what finds each": _planted,
        "{op} reseeded runs of every op row and {loop} of every loop row": _alarms,
        "in {calls} calls of every kind, {failed} of them made to fail, memory kept within {mib} MiB and left "
        "{hooks} hooks": _soak,
        "Each of {faults} faults planted in SmolLM2's pair is named": _doctor,
        "One core gave {tokens} answer tokens in {answering} minutes and made {steps} steps of a two-layer drafter in "
        "{minutes}": _training,
        "less than {percent} % of the memory of the unfused one at V = {tokens} with {anchors} anchors x 7": _memory,
        "The first gives {greedy} greedily and {sampled} at temperature 1": _shipped,
        "--batch-size 16`) it is {tau} (": _tau,
        "{drafters} drafters with one thing changed at a time": _drafters,
        "Over {prompts} of the {all} prompts that ship with the package, {tokens} tokens each, the speedup is "
        "{times}": over_all,
        "in bf16 on one thread, {prompts} of the {all} shipped prompts, {tokens} new tokens each, {repeats} "
        "repeats": prompts,
        "a pass over six tokens then costs {times} times one over one": _of_a_block,
        "(with five taps {kilobytes} kB a token for SmolLM2)": _features,
        "bytes over a copy rate of {rate} TB/s, plus {launch} us a launch": assumed,
        "| K and V once | {us} us at 32k of context |": predicted("block_attention", "Qwen3-4B B=1 S=32768 drafter"),
        "| the new rows | {us} us |": predicted("context_kv", "Qwen3-4B B=1 N=8"),
        "whatever the batch | {us} us, 7 slots |": predicted("markov", "Qwen3-4B B=1 greedy"),
        "each target row once | {us} us, rejection of 7 drafts, no cuts |": predicted(
            "verify", "Qwen3-4B B=1 rejection uncut"
        ),
        "[what both cost in acceptance](bench/README.md#what-each-choice-of-the-recipe-is-worth), {least} to "
        "{most}": _saved,
    },
    "bench/README.md": BENCH_README,
}
