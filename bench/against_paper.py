"""What the ablation says of the paper's figures, with every number from ``ablation.json`` and ``paper.json``.

``kernels_page.py`` writes it into bench/README.md. The words stand here and hold for these results only: where another
run would no longer support one of them, :class:`NoLongerTrue` says which, and the page is not written.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from scripted import SMOLLM2, floor_of, shape_of

from dspark_fast.analysis import expected_tokens

BEGIN, END = "<!-- paper:begin -->", "<!-- paper:end -->"
NEEDS = ("ablation", "acceptance")
SHIPPED = Path(__file__).parent.parent / "dspark_fast" / "drafts" / "SmolLM2-135M-Instruct"
MB = 1e6

TEXT = """### Read against the paper

The paper's figures 3 and 4 are of Qwen3-4B after full training; these runs are short, so only directions compare
([what is taken from the figures](results/paper.json)).

- **Depth (figure 3): agrees in direction.** Each layer helps, +{second:.2f} from one to two and +{third:.2f} to three,
  where the paper's second layer is worth {paper_least:.0f} to {paper_most:.0f} %. Neither step is beyond the noise of
  single runs, both together are: {one:.2f} against {three:.2f}.
- **The Markov head: agrees, and shows where.** Without it the first draft is kept {off[0]:.0f} % of the time against
  {on[0]:.0f} %, the next ones {off[1]:.0f} % and {off[2]:.0f} %; with it they stay at {on[1]:.0f} % and {on[2]:.0f} %.
  That is the paper's figure 2. Its rank hardly matters from 32 to 256, but 256 reads a W2 of {large:.0f} MB instead of
  {small:.0f} in every slot: {large_ms:.1f} ms to draft instead of {small_ms:.1f}, which leaves {slower:.0f} % of the
  speed on a CPU.
- **Block size (figure 4): does not show here.** The paper's gain from longer blocks, {shortest:.1f} to {longest:.1f}
  tokens for maths, needs drafts that are nearly all kept; here a fifth slot is reached in {fifth:.1f} % of the rounds.
  It is the paper's chat panel, which gains {chat:.1f} tokens from 8 on, drawn further.
- **Head type (figure 4): does not agree.** The paper's rnn head is better by up to {rnn_paper:.2f} tokens, most of all
  in long blocks; here it is {rnn:.2f} worse, inside the noise. It begins without the target's help and has had little
  training.
- **Loss: the part of TV cannot stand alone** ({tv:.2f}, beyond noise): far from the target its gradient is small. CE
  alone is as good as both when greedy, and worse where drafter and target are compared as distributions (teacher-forced
  {ce_forced:.2f} against {forced:.2f}), which is what TV is for.
- **First weights:** beginning as the target's last layers is worth {begun:.2f}, beyond noise.
- **What a CPU saves:** the loss over {some:,} tokens instead of all {every:,} costs {cost_some:.2f}, over {few:,}
  {cost_few:.2f}; the {top} largest probabilities and the rest as one mass cost {cost_top:.2f}. None is beyond noise for
  the greedy tau; the teacher-forced one, which is less noisy, falls from {forced_all:.2f} to {forced:.2f} and
  {forced_few:.2f} with the smaller vocabularies.

**Predicted fastest on a CPU**: 2 layers, rank 64, block 4 or 5. In this table block 4 leads ({leads:.2f}); with the
acceptance of the drafter that ships ({kept:.0f} % of the drafts that are reached) this one would be at {four:.2f} with
blocks of 4 and at {five:.2f} with blocks of 5, whose time is taken between those of 4 and {block}. The package ships
3 layers and block 5, with the LM head read for a part of the vocabulary alone. **On a GPU** it would be 3 layers and
block {block}: a third layer is {more:.0f} MB more to read, {share:.0f} % of a round that reads {round:.0f} MB, for
{gain:.0f} % in tau, and slots are nearly free. That is a prediction from bytes; no GPU was at hand."""


class NoLongerTrue(LookupError):
    """The results no longer support a sentence of :data:`TEXT`: it has to be written anew."""


def section(results: Path) -> str | None:
    """The section as Markdown; None where the results that it is about are missing.

    Raises:
        NoLongerTrue: naming what does not hold any more.
    """
    files = {name: results / "cpu" / f"{name}.json" for name in NEEDS} | {"paper": results / "paper.json"}
    if not all(path.is_file() for path in files.values()):
        return None
    return TEXT.format(**values(**{name: json.loads(path.read_text()) for name, path in files.items()}))


def values(ablation: dict[str, Any], acceptance: dict[str, Any], paper: dict[str, Any]) -> dict[str, Any]:
    """Every number of the text.

    Raises:
        NoLongerTrue: see :func:`section`.
    """
    rows, limit = {row["name"]: row for row in ablation["rows"]}, ablation["noise"]["difference"]
    base = rows["baseline"]
    tau = {name: row["tau"]["mean"] for name, row in rows.items()}
    forced = {name: row["teacher_forced"]["tau"] for name, row in rows.items()}
    speed = {name: row["predicted_speedup"] for name, row in rows.items()}
    on, off = ([100 * kept for kept in rows[name]["by_position"]["all"][:3]] for name in ("baseline", "rank-0"))
    depth = [100 * (two / one - 1) for one, two in zip(paper["depth"]["1"], paper["depth"]["2"], strict=True)]
    better = [
        rnn - vanilla
        for domain in ("math", "chat")
        for rnn, vanilla in zip(paper["rnn"][domain], paper["block"][domain], strict=True)
    ]
    chosen, every = base["choices"], SMOLLM2["vocab_size"]
    w2 = {rank: every * rank * 2 / MB for rank in (chosen["rank"], rows["rank-256"]["choices"]["rank"])}
    cost = {
        "some": tau["vocabulary-all"] - tau["baseline"],
        "few": tau["baseline"] - tau["vocabulary-2048"],
        "top": tau["baseline"] - tau["top-64"],
    }
    kept = acceptance["results"][0]["pooled"]
    blocks = {size: _predicted(ablation, kept["conditional"], size) for size in (4, 5)}
    target, draft = shape_of(SMOLLM2, str(SHIPPED))
    # W2 stands once in the drafter's bytes and is read in every slot; W1, as large, is there and not read.
    reads = floor_of(target, draft, 1, 0).target / MB + every * SMOLLM2["hidden_size"] * 2 / MB
    reads += base["megabytes"] + (chosen["block"] - 2) * w2[chosen["rank"]]
    more = rows["depth-3"]["megabytes"] - base["megabytes"]
    found = {
        "one": tau["depth-1"],
        "three": tau["depth-3"],
        "second": tau["baseline"] - tau["depth-1"],
        "third": tau["depth-3"] - tau["baseline"],
        "paper_least": min(depth),
        "paper_most": max(depth),
        "on": on,
        "off": off,
        "small": w2[chosen["rank"]],
        "large": max(w2.values()),
        "small_ms": base["ms"]["draft"],
        "large_ms": rows["rank-256"]["ms"]["draft"],
        "slower": 100 * speed["rank-256"] / speed["baseline"],
        "shortest": paper["block"]["math"][0],
        "longest": paper["block"]["math"][-1],
        "chat": paper["block"]["chat"][-1] - paper["block"]["chat"][1],
        "fifth": 100 * math.prod(base["by_position"]["all"][:4]),
        "rnn_paper": max(better),
        "rnn": tau["baseline"] - tau["head-rnn"],
        "tv": tau["loss-tv"],
        "forced": forced["baseline"],
        "ce_forced": forced["loss-ce"],
        "begun": tau["baseline"] - tau["init-random"],
        "some": chosen["vocabulary"],
        "few": rows["vocabulary-2048"]["choices"]["vocabulary"],
        "every": every,
        "top": rows["top-64"]["choices"]["top_tokens"],
        **{f"cost_{name}": value for name, value in cost.items()},
        "forced_all": forced["vocabulary-all"],
        "forced_few": forced["vocabulary-2048"],
        "leads": speed["block-4"],
        "kept": 100 * sum(kept["accepted"]) / sum(_reached(kept)),
        "four": blocks[4],
        "five": blocks[5],
        "block": chosen["block"],
        "more": more,
        "share": 100 * more / reads,
        "round": reads,
        "gain": 100 * (tau["depth-3"] / tau["baseline"] - 1),
    }
    holds = {
        "each layer helps": found["second"] > 0 < found["third"],
        "neither layer beyond noise, both together are": max(found["second"], found["third"])
        <= limit
        < found["three"] - found["one"],
        "without the Markov head later drafts fall": off[2] < off[1] < off[0] and min(on[:3]) > off[1],
        "its rank hardly matters": max(abs(tau[name] - tau["baseline"]) for name in ("rank-32", "rank-256")) <= limit,
        "rank 256 is slower": speed["rank-256"] < speed["baseline"],
        "the paper's rnn is better, most in long blocks": min(better) > 0 and max(better) == better[3],
        "the rnn head is worse here, inside the noise": 0 < found["rnn"] <= limit,
        "TV alone is worse, beyond noise": tau["baseline"] - tau["loss-tv"] > limit,
        "CE alone is as good greedily and worse teacher-forced": abs(tau["loss-ce"] - tau["baseline"]) <= limit
        and forced["loss-ce"] < forced["baseline"],
        "the target's last layers are worth more than noise": found["begun"] > limit,
        "what a CPU saves costs less than noise": max(cost.values()) <= limit,
        "teacher-forced tau falls with the vocabulary": forced["vocabulary-all"]
        > forced["baseline"]
        > forced["vocabulary-2048"],
        "block 4 leads": speed["block-4"] == max(speed.values()),
    }
    broken = [words for words, true in holds.items() if not true]
    if broken:
        raise NoLongerTrue(f"ablation.json no longer says: {'; '.join(broken)}: write TEXT in against_paper.py anew")
    return found


def _reached(counts: dict[str, Any]) -> list[int]:
    """How many rounds got to each slot with all drafts before it kept."""
    return [counts["rounds"], *counts["accepted"][:-1]]


def _predicted(ablation: dict[str, Any], acceptance: list[float], block: int) -> float:
    """Speedup of the baseline with blocks of that size; its round's time lies on the line through the two timed."""
    rows = {row["name"]: row for row in ablation["rows"]}
    ends = [(rows[name]["choices"]["block"], sum(rows[name]["ms"].values())) for name in ("block-4", "baseline")]
    (low, cheap), (high, dear) = ends
    cost = cheap + (block - low) / (high - low) * (dear - cheap)
    return expected_tokens(acceptance[:block], block) * ablation["times"]["plain_ms"]["median"] / cost
