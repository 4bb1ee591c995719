"""What ``bench_round_ops.py`` has found, as tables of bench/README.md: the ops of the CPU path in whole rounds."""

from __future__ import annotations

from typing import Any

HEADS = ("op", "calls", "bytes", "predicted, us", "in a round, us", "of the copy rate", "of the round")
TORCH = ("torch's own", "equal")


def lines(result: dict[str, Any]) -> list[str]:
    """As Markdown, the greedy rounds first; ``kernels_page.py`` writes them."""
    rates = dict.fromkeys(f"{1000 * mode['copy_tb_s']['median']:.1f}" for mode in result["modes"])
    text = [
        f"**These are the CPU path's reference ops, not the kernels**: {result['model'].rsplit('/', 1)[-1]} in",
        f"{result['dtype']} with the drafter that ships, {result['context']} tokens of context, blocks of",
        f"{result['block_size']}, {result['drafted_tokens']:,} tokens that can be drafted. CPU time of one thread.",
        "Predicted: bytes over the rate at which the same run copied from memory to memory,",
        f"{' and '.join(rates)} GB/s. In a round: the median (quartiles) of every call in whole rounds; the share is",
        "of their mean. Torch's own: what the same takes in torch's own functions, eager, in times of the op (below 1",
        "torch's is faster), both by themselves in turn, on the inputs of one such call, with nothing in the caches.",
        f"The run had {100 * result['share_of_the_core']:.0f} % of its core; what others leave in the caches costs it "
        "time.",
        "",
    ]
    for mode in result["modes"]:
        whole = f"{mode['round_ms']['median']:.1f} ms ({_range(mode['round_ms'], '.1f')})"
        text += [f"{mode['mode'].capitalize()}, {mode['rounds']} rounds of {whole}:", ""]
        text += [f"| {' | '.join((*HEADS, *TORCH))} |", "|---" + "|---:" * (len(HEADS) - 1) + "|---:|---|"]
        for row in sorted(mode["rows"], key=lambda row: -row["percent_of_round"]):
            inside, over = row["in_round_us"], row["torch_over_ours"]
            cells = (
                row["what"],
                f"{row['calls']}",
                f"{row['bytes']:,}",
                f"{row['predicted_us']:.1f}",
                f"{inside['median']:,.0f} ({_range(inside, ',.0f')})",
                f"{row['percent_of_copy_rate']:.1f} %",
                f"{row['percent_of_round']:.1f} %",
                f"{over['median']:.2f} ({_range(over, '.2f')})",
                row["equality"].split(",")[0],
            )
            text.append(f"| {' | '.join(cells)} |")
        text.append("")
    return [*text, "`python bench/bench_round_ops.py` measures this again ([data](results/cpu/round_ops.json)).", ""]


def _range(spread: dict[str, Any], digits: str) -> str:
    low, high = spread["quartiles"]
    return f"{low:{digits}} to {high:{digits}}"
