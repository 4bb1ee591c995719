"""Training text: the target's own responses to prompts, generated in batches and kept as JSONL that can be resumed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dspark_fast.generation import generate
from dspark_fast.training.prompts import Prompt, is_held_out, repeats_held_out
from dspark_fast.training.workers import Workers


@dataclass(frozen=True)
class Response:
    """One conversation that ends in the target's answer.

    Attributes:
        id: of the prompt, plus the turn for follow-ups.
        domain: of the prompt.
        input_ids: the whole conversation, answer included.
        start: index of the answer's first token; the loss is taken from here on.
        greedy: whether it was decoded at temperature 0.
        held_out: kept from training, for measuring the acceptance length.
    """

    id: str
    domain: str
    input_ids: list[int]
    start: int
    greedy: bool
    held_out: bool


def generate_responses(
    model: Any,
    tokenizer: Any,
    prompts: Iterable[Prompt],
    path: Path,
    *,
    tokens: int,
    batch_size: int = 64,
    max_new_tokens: int = 192,
    temperature: float = 0.7,
    top_p: float = 0.8,
    seed: int = 0,
    workers: Workers | None = None,
    on_progress: Callable[[int], None] = lambda tokens: None,
) -> int:
    """Answer prompts with the target until ``tokens`` answer tokens are on disk; continues an interrupted file.

    Three quarters of the prompts, chosen by hash, are answered greedily: that is how many users decode, and a small
    model's greedy text is unlike its sampled text. The rest is sampled as the paper does (T 0.7, top-p 0.8, top-k 20).

    Args:
        model, tokenizer: the target, any transformers causal LM with a chat template.
        prompts: a deterministic stream; those already answered in ``path`` are skipped.
        path: JSONL of :class:`Response`, appended to. A half-written last line is dropped.
        tokens: how many answer tokens to have in all.
        batch_size: conversations decoded together.
        max_new_tokens: per answer.
        temperature, top_p: of the sampled quarter.
        seed: of the sampling.
        workers: processes that answer a share of the prompts each, chosen by hash; each writes a part of its own beside
            ``path`` (see :func:`merge_parts`), until its part has its share of what is missing.
        on_progress: told the number of answer tokens on disk, of this worker's part if there are several.

    Returns:
        Answer tokens on disk.
    """
    workers = workers or Workers()
    done = _token_counts(path, repair=workers.count == 1)
    total = sum(done.values())
    if workers.count > 1:
        prompts = (prompt for prompt in prompts if _digest(prompt, "worker") % workers.count == workers.rank)
        tokens = total + -(-max(tokens - total, 0) // workers.count)
        path = path.with_name(f"{path.stem}.part-{workers.rank}{path.suffix}")
        part = _token_counts(path, repair=True)
        done, total = done | part, total + sum(part.values())
    on_progress(total)
    with path.open("a", encoding="utf-8") as file:
        for group in _batches(prompts, done, batch_size):
            if total >= tokens:
                break
            number = seed + total + workers.rank * 2**40
            for response in _answer(model, tokenizer, group, max_new_tokens, temperature, top_p, number):
                if response.id in done:  # a prompt given twice, or one whose follow-up an interruption cut off
                    continue
                done[response.id] = len(response.input_ids) - response.start
                file.write(_line(response))
                total += len(response.input_ids) - response.start
            file.flush()
            on_progress(total)
    return total


def merge_parts(folder: Path) -> None:
    """Append the workers' parts to ``responses.jsonl`` and remove them; done again after an interruption, once only."""
    path = folder / "responses.jsonl"
    done = _token_counts(path, repair=True)
    for part in sorted(folder.glob("responses.part-*.jsonl")):
        with path.open("a", encoding="utf-8") as file:
            for response in read_responses(part):
                if response.id not in done:
                    done[response.id] = 0
                    file.write(_line(response))
        part.unlink()


def _token_counts(path: Path, repair: bool) -> dict[str, int]:
    return {response.id: len(response.input_ids) - response.start for response in read_responses(path, repair=repair)}


def _line(response: Response) -> str:
    return json.dumps(asdict(response), separators=(",", ":")) + "\n"


def read_responses(path: Path, *, repair: bool = False) -> Iterator[Response]:
    """The responses in a file; a last line cut by an interruption is ignored, and with ``repair`` removed.

    Raises:
        ValueError: for a line in the middle that is no response, with file and line number.
    """
    if not path.is_file():
        return
    data = path.read_bytes()
    if not data.endswith(b"\n"):
        data = data[: data.rfind(b"\n") + 1]
        if repair:
            path.write_bytes(data)
    for number, line in enumerate(data.splitlines(), 1):
        try:
            yield Response(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}, line {number} is not a response: {error}") from None


def _is_greedy(prompt: Prompt) -> bool:
    return _digest(prompt) % 4 != 0


def _digest(prompt: Prompt, salt: str = "") -> int:
    return hashlib.sha256((salt + prompt.id).encode()).digest()[0]


def _batches(prompts: Iterable[Prompt], done: dict[str, int], size: int) -> Iterator[list[Prompt]]:
    """Batches of one kind and of like length.

    A batch lasts as long as its longest answer, so short answers go together; and its prompts are padded to the
    longest, which cost two thirds of the time before they were sorted.
    """
    waiting: dict[tuple[bool, bool], list[Prompt]] = {}
    for prompt in prompts:
        if (f"{prompt.id}+{len(prompt.follow_ups)}" if prompt.follow_ups else prompt.id) in done:
            continue
        if repeats_held_out(prompt):
            continue
        group = waiting.setdefault((_is_greedy(prompt), prompt.domain == "short"), [])
        group.append(prompt)
        if len(group) == (size if prompt.domain == "short" else 8 * size):
            yield from _by_length(group, size)
            group.clear()
    for group in waiting.values():
        yield from _by_length(group, size)


def _by_length(prompts: list[Prompt], size: int) -> list[list[Prompt]]:
    ordered = sorted(prompts, key=lambda prompt: sum(len(message["content"]) for message in prompt.messages))
    batches = [ordered[i : i + size] for i in range(0, len(ordered), size)]
    return batches[::2] + batches[1::2]  # not all short ones first: an unfinished file should be a fair sample


@torch.no_grad()
def _answer(
    model: Any, tokenizer: Any, prompts: list[Prompt], max_new_tokens: int, temperature: float, top_p: float, seed: int
) -> list[Response]:
    """Answers to the prompts, and to the follow-up questions of those that have some."""
    greedy = _is_greedy(prompts[0])
    conversations = [list(prompt.messages) for prompt in prompts]
    responses: list[Response] = []
    active = list(range(len(prompts)))
    turn = 0
    while active:
        texts = [conversation_ids(tokenizer, conversations[i]) for i in active]
        width = max(map(len, texts))
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        ids = torch.tensor([[pad] * (width - len(text)) + text for text in texts], device=model.device)
        mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts], device=model.device)
        sampling = {} if greedy else {"temperature": temperature, "top_p": top_p, "top_k": 20}
        # Without a drafter: large batches are bound by arithmetic, which drafts only add to. Of 128 rows one core gives
        # 303 tokens a second so, and 217 with transformers' own generate.
        out = generate(
            model,
            None,
            ids,
            seed=seed + turn,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            do_sample=not greedy,
            pad_token_id=pad,
            **sampling,
        )
        stops = stop_tokens(model)
        for i, text, row in zip(active, texts, out[:, width:].tolist(), strict=True):
            answer = _until_stop(row, stops)
            name = prompts[i].id if turn == 0 else f"{prompts[i].id}+{turn}"
            held_out = is_held_out(prompts[i])
            responses.append(Response(name, prompts[i].domain, text + answer, len(text), greedy, held_out))
            reply = tokenizer.decode(answer, skip_special_tokens=True)
            conversations[i].append({"role": "assistant", "content": reply})
        turn += 1
        active = [i for i in active if len(prompts[i].follow_ups) >= turn]
        for i in active:
            conversations[i].append({"role": "user", "content": prompts[i].follow_ups[turn - 1]})
    return responses


def conversation_ids(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """Token ids of a conversation up to where the answer begins, thinking switched off where the template knows it."""
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, enable_thinking=False, tokenize=True)
    return list(ids if isinstance(ids, list) else ids["input_ids"])


def stop_tokens(model: Any) -> set[int]:
    """The ids that end an answer."""
    eos = model.generation_config.eos_token_id
    return set() if eos is None else {eos} if isinstance(eos, int) else set(eos)


def _until_stop(row: list[int], stops: set[int]) -> list[int]:
    """A generated row up to and including its first stop token."""
    for index, token in enumerate(row):
        if token in stops:
            return row[: index + 1]
    return row
