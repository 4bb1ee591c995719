"""What bench/README.md says of measurements and predictions in its sentences; ``claims.py`` has the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from claims import Results

Values = dict[str, str]
MIB = 2**20


def predicted(op: str, case: str, decimals: int = 0) -> Callable[[Results], Values]:
    """Microseconds of a case of the op, and without launches."""

    def values(results: Results) -> Values:
        (row,) = (row for row in results.predicted["kernels"] if (row["op"], row["case"]) == (op, case))
        return {"us": f"{row['us']:.{decimals}f}", "bare": f"{row['us_without_launches']:.{decimals}f}"}

    return values


def assumed(results: Results) -> Values:
    """Of every prediction."""
    found = results.predicted["assumed"]
    return {"rate": f"{found['copy_tb_s']:g}", "launch": f"{found['launch_us']:g}"}


def _beforehand(results: Results) -> Values:
    """Kernels at the shapes of Qwen3-4B."""

    def of(op: str, case: str, decimals: int = 0) -> Values:
        return predicted(op, f"Qwen3-4B {case}", decimals)(results)

    one = of("markov", "B=1 greedy")
    return {
        "one": one["us"],
        "bare": one["bare"],
        "many": of("markov", "B=64 greedy")["us"],
        "one_verified": of("verify", "B=1 rejection uncut", 1)["us"],
        "many_verified": of("verify", "B=64 rejection uncut", 1)["us"],
        "attention": of("block_attention", "B=1 S=32768 drafter")["us"],
        "context": of("context_kv", "B=1 N=8")["us"],
    }


def _floors(results: Results) -> Values:
    rows = [row for row in results.predicted["rounds"] if row["pair"] == "Qwen3-4B"]
    named = {512: "short", 4096: "middle", 32_768: "long"}
    return {named[row["context"]]: f"{row['floor_ms']:.2f}" for row in rows}


def _round(results: Results) -> Values:
    """Shares of a round alone."""
    profile = results.engine["profile"]
    whole = profile["round_milliseconds"]
    part = {row["part"]: 100 * row["milliseconds"] / whole for row in profile["rows"]}
    ops = sum(share for name, share in part.items() if name.startswith("op "))
    return {
        "round": f"{whole:.0f}",
        "target": f"{part['target']:.0f}",
        "drafter": f"{part['drafter']:.0f}",
        "ops": f"{ops:.0f}",
        "rest": f"{100 * profile['outside']:.1f}",
    }


def _passes(results: Results) -> Values:
    """What a pass over 64 tokens costs."""
    cost = {(row["rows"], row["tokens"]): row["milliseconds"] for row in results.engine["passes"]["rows"]}
    return {"alone": f"{cost[1, 64] / cost[1, 1]:.1f}", "batch": f"{cost[8, 64] / cost[8, 8]:.1f}"}


def round_parts(results: Results) -> str:
    """Where a round's time goes, largest first."""
    profile = results.engine["profile"]
    whole = profile["round_milliseconds"]
    lines = ["| part of a round | ms | share |", "|---|---:|---:|"]
    for row in sorted(profile["rows"], key=lambda row: -row["milliseconds"]):
        lines.append(f"| {row['part']} | {row['milliseconds']:.2f} | {100 * row['milliseconds'] / whole:.1f} % |")
    return "\n".join([*lines, f"| whole | {whole:.2f} | |"])


def passes(results: Results) -> str:
    """What a pass of the target costs by tokens, one row and in a batch."""
    rows = results.engine["passes"]["rows"]
    cost = {(row["rows"], row["tokens"]): row["milliseconds"] for row in rows}
    lengths, batches = sorted({row["tokens"] for row in rows}), sorted({row["rows"] for row in rows})
    lines = [f"| tokens in one pass | {' | '.join(map(str, lengths))} |", "|---" + "|---:" * len(lengths) + "|"]
    for batch in batches:
        cells = (f"{cost[batch, one]:.0f}" if (batch, one) in cost else "" for one in lengths)
        lines.append(f"| ms, {batch} row{'' if batch == 1 else 's'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _eight_bits(w2: str) -> Callable[[Results], Values]:
    def values(results: Results) -> Values:
        (row,) = (row for row in results.markov_tries["eight_bits"] if row["w2"] == w2)
        return {"error": f"{100 * row['relative_error']:.1f}", **{k: f"{tau:.3f}" for k, tau in row["tau"].items()}}

    return values


def _tiles(known: str) -> Callable[[Results], Values]:
    return lambda results: {
        mode: f"{100 * share[known]:.1f}" for mode, share in results.markov_tries["share_of_tiles_read"].items()
    }


def _peak(provider: str) -> Callable[[Results], Values]:
    """Of the fused and the unfused loss."""

    def values(results: Results) -> Values:
        memory = results.draft_loss["memory"]
        (row,) = (row for row in memory["rows"] if row["provider"] == provider)
        share = memory["of_unfused"].get(provider)
        return {"peak": f"{row['peak_bytes'] / MIB:,.0f}", "share": "1" if share is None else f"{share:.3f}"}

    return values


def _counted(results: Results) -> Values:
    """How far the count of the unfused loss is from what its process grew by."""
    check = results.draft_loss["memory"]["check"]
    off = abs(check["unfused_resident_bytes"] / check["real_bytes"]["unfused, eager"] - 1)
    return {"percent": f"{100 * off:.2f}"}


def _loss(results: Results) -> Values:
    """Times of the unfused loss, in those of the fused one of the same shape."""

    def cost(vocabulary: int, provider: str) -> str:
        rows: list[dict[str, Any]] = [row for row in results.draft_loss["rows"] if row["V"] == vocabulary]
        of = {row["provider"]: row["median_us"] for row in rows}
        return f"{of[provider] / of['reference, eager']:.{2 if 'compiled' in provider else 1}f}"

    eager, compiled = "unfused, eager", "unfused, compiled"
    return {"small": cost(6144, eager), "compiled": cost(6144, compiled), "large": cost(49_152, eager)}


def _step(results: Results) -> Values:
    """Of training."""
    rows = {row["way"]: row for row in results.training_step["rows"]}
    whole, unfused, compiled = (rows[f"two products{more}"] for more in ("", ", loss not fused", ", compiled"))
    said = {"seconds": f"{whole['median_ms'] / 1000:.2f}"}
    for name, row in (("unfused", unfused), ("compiled", compiled)):
        low, high = row["range"]
        said |= {name: f"{row['speedup_over_first']:.2f}", f"{name}_low": f"{low:.2f}", f"{name}_high": f"{high:.2f}"}
    return said


_TAUS = "{greedy} | {rejection} | {coupled} |"

#: sentences and rows of tables
BENCH_README: dict[str, Callable[[Results], Values]] = {
    f"| bfloat16 | 1 | 0 | {_TAUS}": _eight_bits("bfloat16"),
    "| float8_e4m3fn, one scale, carried by W1 | 0.5 | {error} % | " + _TAUS: _eight_bits("float8_e4m3fn"),
    "| int8, a scale per row (not in the kernel) | 0.5 | {error} % | " + _TAUS: _eight_bits("int8"),
    "the token with the largest U is known) | {greedy} % | {coupled} % |": _tiles("largest U known"),
    "| if the winner's score were known | {greedy} % | {coupled} % |": _tiles("winner known"),
    "bytes over this machine's measured copy rate, plus {launch} us a launch": assumed,
    "Predicted beforehand at {rate} TB/s": assumed,
    "the walk {one} us at B = 1 ({bare} without launches), {many} us at B = 64; rejection {one_verified} us at B = 1, "
    "{many_verified} us at B = 64; attention at 32k {attention} us at B = 1; the new context of a round {context} "
    "us": _beforehand,
    "{short} ms for a pair of Qwen3-4B's shape at batch 1 and 512 tokens of context, {middle} ms at 4,096, {long} ms "
    "at 32,768": _floors,
    "Of a round of {round} ms alone the target takes {target} %, the drafter {drafter} %, the ops {ops} %, and all "
    "else {rest} %": _round,
    "One pass over 64 tokens costs {alone} times one over a single token, and in a batch of 8 {batch} times one "
    "over 8": _passes,
    "| all logits held, autograd | {peak} MiB | {share} |": _peak("unfused, eager"),
    "| `draft_loss`, kernel | {peak} MiB | {share} |": _peak("dspark-fast"),
    "| `draft_loss`, reference on a CPU | {peak} MiB | {share} |": _peak("reference, eager"),
    "to what the process grew by within {percent} %": _counted,
    "the unfused loss takes {small} times as long, the unfused one under `torch.compile` {compiled} times; at V = "
    "49,152 the unfused one takes {large} times as long": _loss,
    "a step of 96 blocks takes {seconds} s; with the unfused loss it runs at {unfused} of that speed ({unfused_low} to "
    "{unfused_high}), compiled at {compiled} ({compiled_low} to {compiled_high})": _step,
}
