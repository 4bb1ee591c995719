"""One case of ``bench_rounds.py``: its ways warmed up, compared, and timed in alternation."""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from scripted import (
    QWEN3_4B,
    QWEN3_4B_DRAFT,
    TINY,
    TINY_DRAFT,
    ScriptedDSpark,
    floor_of,
    kv_bytes,
    random_pair,
    script,
)
from table import Slow, time_limit

import dspark_fast
from dspark_fast import pairs
from dspark_fast.benchmark.notebook import by_reference
from dspark_fast.engine.capacity import bucket
from dspark_fast.first_token import FirstToken
from dspark_fast.targets import TargetError

GRAPH, NO_GRAPH, PLAIN = "graph", "no graph", "ours, plain"
EAGER, STATIC = "transformers, eager", "transformers, static cache"
NOTEBOOK, REFERENCE = "notebook's loop", "reference, no cache"
OURS = (GRAPH, NO_GRAPH, PLAIN)
DECODING = (GRAPH, NO_GRAPH, PLAIN, EAGER)
EVERY = (*DECODING, NOTEBOOK, REFERENCE)
LARGE, SMALL, SMALLEST = "Qwen3-4B shape", "SmolLM2-135M", "tiny"
SMALL_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
SCRIPTED = "scripted acceptance, random weights"
COMPILE_SECONDS = 90.0
MOST_REPEATS = 15


class Case(NamedTuple):
    """What is decoded, and how: ``context`` tokens of prompt in each of ``batch`` rows."""

    pair: str
    batch: int
    context: int
    ways: tuple[str, ...] = DECODING

    @property
    def name(self) -> str:
        return f"{self.pair}, B = {self.batch}, {self.context} tokens" + (", compiled" if STATIC in self.ways else "")


class Run(NamedTuple):
    """One call: new tokens ``[B, n]``, rounds (steps where nothing drafts), seconds after the first token, tau."""

    tokens: torch.Tensor
    rounds: int
    seconds: float
    tau: float | None = None


class Pair(NamedTuple):
    """Target and drafter; ``prompts(batch, context)`` gives ids; ``right`` is the script's, None without one."""

    model: Any
    draft: Any
    prompts: Callable[[int, int], torch.Tensor]
    label: str
    right: float | None = None


class Rounds:
    """Measures one case after the other.

    Args:
        rate: bytes per microsecond.
        options: of the command line.

    Attributes:
        rows, left_out: what is reported.
        refused: where ours failed, or where a graph and the loop without differ; nothing of such a case is in ``rows``.
    """

    def __init__(self, device: torch.device, rate: float, options: argparse.Namespace) -> None:
        self.device, self.rate, self.options = device, rate, options
        self.gpu = device.type == "cuda"
        self.end = time.monotonic() + options.budget
        self.rows: list[dict[str, Any]] = []
        self.left_out: list[dict[str, str]] = []
        self.refused: list[str] = []
        self._pairs: dict[str, Pair | str] = {}

    def run(self, case: Case) -> None:
        """Add the rows of a case, or the reason why there are none.

        Raises:
            SystemExit: if tokens differ in fp32, where no rounding explains it.
        """
        reason: str | None = f"the time budget of {self.options.budget:.0f} s was over"
        if time.monotonic() < self.end:
            pair = self.pair(case.pair)
            reason = pair if isinstance(pair, str) else self.does_not_fit(case, pair)
        if reason or isinstance(pair, str):
            self.leave_out(case, case.ways, str(reason))
            return
        ids, table = pair.prompts(case.batch, case.context), None
        found: dict[str, tuple[Run, int | None]] = {}
        refused = len(self.refused)
        # Plain first: the script is what it says. The graph last, so that its workspace is there when it is timed.
        for way in sorted(case.ways, key=lambda way: {PLAIN: 0, GRAPH: 2}.get(way, 1)):
            if pair.right is not None and table is None and way != PLAIN:
                table = self.script(pair, ids, found[PLAIN][0] if PLAIN in found else self.call(PLAIN, pair, ids, None))
            made = self.why_not(way) or self.warm_up(case, way, pair, ids, table)
            if isinstance(made, str):
                self.leave_out(case, [way], made)
            else:
                found[way] = made
                print(f"  {case.name} | {way} | warm", flush=True)
        if GRAPH in found and NO_GRAPH not in found:
            del found[GRAPH]
            self.leave_out(case, [GRAPH], "there is nothing to compare it with")
        ours = next((way for way in OURS if way in found), None)
        same = {} if ours is None else {way: self.same(case, way, pair, found[way][0], found[ours][0]) for way in found}
        if same.get(NO_GRAPH, 0) < self.options.new_tokens and GRAPH in found:
            self.refused.append(f"{case.name}: a graph and no graph agree on the first {same[NO_GRAPH]} tokens only")
        times: dict[str, list[float]] = {}
        if found and len(self.refused) == refused:
            try:
                times = self.alternate(case, pair, ids, table, found)
            except torch.OutOfMemoryError as error:
                self.leave_out(case, list(found), f"while timed: {first_line(error)}")
                found = {}
        if len(self.refused) > refused:
            self.leave_out(case, list(found), "nothing is reported of this case: ours failed, or differs from itself")
        else:
            for way in [way for way in case.ways if way in found]:
                self.rows.append(self.row(case, way, pair, found[way], times[way], same.get(way)))
                print("  " + line(self.rows[-1]), flush=True)
        if STATIC in case.ways:
            torch._dynamo.reset()  # what was compiled holds memory
            # transformers makes its next static cache as long as the longest so far.
            pair.model.__dict__.pop("_previous_max_cache_length", None)
        self.tidy()

    # --- pairs ---

    def pair(self, name: str) -> Pair | str:
        """Made or loaded at the first asking; a reason where it cannot be."""
        if name not in self._pairs:
            self._pairs[name] = self._small() if name == SMALL else self._random(name == LARGE)
        return self._pairs[name]

    def _random(self, large: bool) -> Pair:
        shapes = (QWEN3_4B, QWEN3_4B_DRAFT) if large else (TINY, TINY_DRAFT)
        model, draft = random_pair(*shapes, self.device, torch.bfloat16 if large else torch.float32)

        def prompts(batch: int, context: int) -> torch.Tensor:
            generator = torch.Generator().manual_seed(batch)
            return torch.randint(model.config.vocab_size, (batch, context), generator=generator).to(self.device)

        return Pair(model, draft, prompts, SCRIPTED, self.options.right)

    def _small(self) -> Pair | str:
        """SmolLM2, after its tokens in fp32 were those of transformers in every way of ours."""
        settings = {"device": self.device, "progress": False}
        try:
            with time_limit(60):  # where no network is, a package manager may wait for it
                exact, exact_draft, tokenizer = pairs.load(SMALL_NAME, dtype=torch.float32, **settings)
                model, draft, _ = pairs.load(SMALL_NAME, **settings)
        except (TargetError, ValueError, OSError, ImportError, Slow) as error:
            return f"{SMALL_NAME} cannot be had: {first_line(error)}"
        text = (Path(__file__).parent.parent / "README.md").read_text()

        def prompts(batch: int, context: int) -> torch.Tensor:
            rows = []
            for start in (row * 997 for row in range(batch)):  # any text will do that differs from row to row
                turned = (text[start:] + text[:start]) * (1 + 8 * context // len(text))
                chat = [{"role": "user", "content": f"{turned}\n\nWhat is this text about?"}]
                rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
                rows.append(tokenizer(rendered, add_special_tokens=False)["input_ids"][-context:])
            return torch.tensor(rows, device=self.device)

        found, ids = Pair(exact, exact_draft, prompts, "its own drafter"), prompts(1, 512)
        truth = self.call(EAGER, found, ids, None)
        for way in OURS:
            if self.why_not(way) is None:
                self.same(Case(f"{SMALL} in fp32", 1, 512), way, found, self.call(way, found, ids, None), truth)
        self.tidy()
        return found._replace(model=model, draft=draft)

    def script(self, pair: Pair, ids: torch.Tensor, truth: Run) -> torch.Tensor:
        config = pair.draft.config
        whole = torch.cat([ids, truth.tokens], dim=1)
        return script(whole, ids.shape[1], config.block_size, config.vocab_size, pair.right)

    # --- ways ---

    def call(self, way: str, pair: Pair, ids: torch.Tensor, table: torch.Tensor | None) -> Run:
        """Decode ``ids`` once."""
        model, new, start = pair.model, self.options.new_tokens, ids.shape[1]
        if way in (NOTEBOOK, REFERENCE):
            found = by_reference(model, pair.draft, ids, new, table, cached=way == NOTEBOOK)
            return Run(found.tokens, found.rounds, found.seconds, (new - 1) / found.rounds)
        common = {"attention_mask": torch.ones_like(ids), "max_new_tokens": new, "do_sample": False}
        common |= {"eos_token_id": None, "pad_token_id": 0}
        if way in OURS:
            drafter = None if way == PLAIN else pair.draft
            if drafter is not None and table is not None:
                # A new one for every call: what a graph has recorded belongs to the one that it was recorded with.
                drafter = ScriptedDSpark(drafter, table, start)
            out = dspark_fast.generate(model, drafter, ids, off_switch=False, use_graph=way == GRAPH, **common)
            tau = None if way == PLAIN else out.stats.acceptance_length
            return Run(out[:, start:], out.stats.rounds, out.stats.seconds.after_prefill, tau)
        clock = FirstToken()
        cache = {"cache_implementation": "static"} if way == STATIC else {}
        out = model.generate(ids, streamer=clock, **common, **cache)
        self.wait()
        return Run(out[:, start:], new - 1, time.perf_counter() - clock.at)

    def why_not(self, way: str) -> str | None:
        """Why this way is not tried."""
        if not self.gpu and way == GRAPH:
            return "a graph needs a GPU"
        if not self.gpu and way == STATIC:
            return "it compiles by itself on a GPU only"
        if time.monotonic() > self.end and way in (STATIC, NOTEBOOK, REFERENCE):
            return "the time budget was over"
        return None

    def warm_up(
        self, case: Case, way: str, pair: Pair, ids: torch.Tensor, table: torch.Tensor | None
    ) -> tuple[Run, int | None] | str:
        """What it says, and its peak memory without the graphs of other ways; or why there is nothing."""
        self.tidy()
        if self.gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        limit = min(COMPILE_SECONDS, max(self.end - time.monotonic(), 10)) if way == STATIC else 120.0
        try:
            with time_limit(limit):
                for _ in range(2 if way in (GRAPH, STATIC) else 1):  # the first call records, or compiles
                    run = self.call(way, pair, ids, table)
                self.wait()
        except (Slow, torch.OutOfMemoryError) as error:
            return f"in its warm-up: {first_line(error)}"
        except Exception as error:
            note = f"failed: {type(error).__name__}: {first_line(error)}"
            if way in OURS:
                self.refused.append(f"{case.name}: {way} {note}")
            return note
        return run, torch.cuda.max_memory_allocated(self.device) if self.gpu else None

    def same(self, case: Case, way: str, pair: Pair, run: Run, ours: Run) -> int:
        """How many new tokens are ours before the first that is not, in the row where they are fewest."""
        same, new = int((run.tokens == ours.tokens).long().cumprod(1).sum(1).min()), self.options.new_tokens
        if same < new and pair.model.dtype == torch.float32:
            raise SystemExit(
                f"nothing is reported: in fp32 {way} differs from what it is compared with after {same} of {new} "
                f"tokens ({case.name})"
            )
        return same

    def alternate(
        self,
        case: Case,
        pair: Pair,
        ids: torch.Tensor,
        table: torch.Tensor | None,
        found: dict[str, tuple[Run, int | None]],
    ) -> dict[str, list[float]]:
        """Seconds of each call, by way; ours must say again what it said."""
        times: dict[str, list[float]] = {way: [] for way in found}
        begun, repeat = time.monotonic(), 0
        while repeat < self.options.repeats or (
            time.monotonic() - begun < self.options.seconds and repeat < MOST_REPEATS
        ):
            for way in list(found)[:: 1 if repeat % 2 == 0 else -1]:  # so that a drift favours none
                run = self.call(way, pair, ids, table)
                times[way].append(run.seconds)
                if way in OURS and not torch.equal(run.tokens, found[way][0].tokens):
                    self.refused.append(f"{case.name}: {way} says something else in its timed call {repeat + 1}")
                    return times
            repeat += 1
        return times

    # --- rows ---

    def row(
        self, case: Case, way: str, pair: Pair, warm: tuple[Run, int | None], times: list[float], same: int | None
    ) -> dict[str, Any]:
        """Figures of one way; ``same`` as :meth:`same` counts them."""
        (run, peak), new = warm, self.options.new_tokens
        floor = floor_of(pair.model, pair.draft, case.batch, case.context + new // 2)
        least = (floor.round if run.tau is not None else floor.plain) / self.rate / 1e3
        rounds = [1e3 * seconds / run.rounds for seconds in times]
        middle = statistics.median(rounds)
        return {
            "case": case.name,
            "pair": case.pair,
            "acceptance": pair.label,
            "dtype": str(pair.model.dtype).removeprefix("torch."),
            "batch": case.batch,
            "context": case.context,
            "new_tokens": new,
            "provider": way,
            "rounds": run.rounds,
            "acceptance_length": None if run.tau is None else round(run.tau, 3),
            "round_ms": round(middle, 4),
            "least_ms": round(min(rounds), 4),
            "most_ms": round(max(rounds), 4),
            "repeats": len(rounds),
            "tokens_per_second": round(1e3 * case.batch * (new - 1) / run.rounds / middle, 1),
            "floor_ms": round(least, 4),
            "of_floor": round(middle / least, 3),
            "peak_gib": None if peak is None else round(peak / 2**30, 3),
            "same_tokens": same,
        }

    def does_not_fit(self, case: Case, pair: Pair) -> str | None:
        """Why the case is left out: positions, or memory."""
        config = pair.model.config
        total = case.context + self.options.new_tokens + pair.draft.config.block_size + 1
        if total > config.max_position_embeddings:
            return f"it reaches {total} positions, the target has {config.max_position_embeddings}"
        if not self.gpu:
            return None
        self.tidy()
        kept = kv_bytes(config, pair.model.dtype) + kv_bytes(pair.draft.config, pair.draft.dtype)
        # The graph's caches stay while another way has its own, and transformers reads the prompt in one pass.
        wide = (3 * config.intermediate_size + 8 * config.hidden_size) * pair.model.dtype.itemsize
        needed = case.batch * (2 * kept * bucket(total) + case.context * wide) + 2**31
        free = torch.cuda.mem_get_info(self.device)[0]
        free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        if needed < free:
            return None
        return f"it needs about {needed / 2**30:.0f} GiB of memory, {free / 2**30:.0f} GiB are free"

    def leave_out(self, case: Case, ways: Iterable[str], why: str) -> None:
        """Say so, and keep it for the file."""
        self.left_out += [{"case": case.name, "provider": way, "why": why} for way in ways]
        print(f"  {case.name} | {', '.join(ways)} | left out: {why}", flush=True)

    def tidy(self) -> None:
        """Give back the memory that nothing holds, that of graphs too."""
        dspark_fast.clear_graphs()
        gc.collect()
        if self.gpu:
            # cuBLAS' workspaces may lie in a dropped graph's memory: the next graph shall have one of its own.
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()

    def wait(self) -> None:
        """Until all that was queued is done."""
        if self.gpu:
            torch.cuda.synchronize(self.device)


def line(row: dict[str, Any]) -> str:
    """A row as a line."""
    tau = "" if row["acceptance_length"] is None else f"tau {row['acceptance_length']:.2f}, "
    peak = "" if row["peak_gib"] is None else f"peak {row['peak_gib']:.1f} GiB, "
    return (
        f"{row['case']} | {row['provider']} | {row['rounds']} x {row['round_ms']:.3f} ms ({row['least_ms']:.3f} to "
        f"{row['most_ms']:.3f}), {row['of_floor']:.2f} of the floor | {tau}{row['tokens_per_second']:.0f} tokens/s | "
        f"{peak}{row['same_tokens']} of {row['new_tokens']} tokens the same"
    )


def first_line(error: BaseException) -> str:
    """What an exception says, short."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
