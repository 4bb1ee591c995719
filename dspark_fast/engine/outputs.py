"""What a caller may ask for besides the tokens: scores, logits and log-probabilities of what was committed."""

from __future__ import annotations

import torch

from dspark_fast import ops
from dspark_fast.engine.state import RUN, TAKEN

NAMES = ("scores", "logits", "log_probs")


class Outputs:
    """Collects rows of logits while a call runs. Rows advance at their own pace, so each token's row is kept apart.

    Args:
        batch: B.
        wanted: of :data:`NAMES`. ``logits`` are the target's own; ``scores`` what processors, temperature and cuts
            made of them; ``log_probs`` the log-softmax of the logits at the committed token.
    """

    def __init__(self, batch: int, wanted: list[str]) -> None:
        self._kept: dict[str, list[list[torch.Tensor]]] = {name: [[] for _ in range(batch)] for name in wanted}

    def keep(self, logits: torch.Tensor, processed: torch.Tensor, report: torch.Tensor, cuts: dict | None) -> None:
        """Take the rows of one round's committed tokens.

        Args:
            logits: ``[B, N, V]`` of the target.
            processed: the same after the processors.
            report: of the round, :attr:`~dspark_fast.engine.state.DecodingState.report`.
            cuts: what :func:`dspark_fast.ops.cut_logits` takes besides the logits; None for greedy decoding.
        """
        for row, taken in enumerate(report[:, TAKEN].tolist()):
            if not taken:
                continue
            # Copies of what was taken: views would keep all of the round's logits.
            if "logits" in self._kept:
                self._kept["logits"][row].extend(logits[row, :taken].to(torch.float32, copy=True))
            if "scores" in self._kept:
                scores = processed[row, :taken].to(torch.float32, copy=True)
                if cuts is not None:
                    own = {
                        name: value[row] if isinstance(value, torch.Tensor) else value for name, value in cuts.items()
                    }
                    scores = ops.cut_logits(scores[None], **own)[0]
                self._kept["scores"][row].extend(scores)
            if "log_probs" in self._kept:
                tokens = report[row, RUN : RUN + taken, None].clamp(min=0)
                self._kept["log_probs"][row].extend(
                    logits[row, :taken].float().log_softmax(-1).gather(-1, tokens)[:, 0]
                )

    def stacked(self, counts: list[int]) -> dict[str, tuple[torch.Tensor, ...] | torch.Tensor]:
        """What was wanted, by name, of the first ``counts`` tokens of each row.

        ``scores`` and ``logits`` are a tuple, one ``[B, V]`` per new token, as transformers has it; ``log_probs`` is
        ``[B, n]``. Rows that ended earlier are zero from there on (transformers has there what it computed on padding).
        """
        longest = max(counts)
        found: dict[str, tuple[torch.Tensor, ...] | torch.Tensor] = {}
        for name, rows in self._kept.items():
            blank = torch.zeros_like(next(row[0] for row in rows if row))
            rows = [row[:count] + [blank] * (longest - min(count, len(row))) for row, count in zip(rows, counts)]
            columns = tuple(torch.stack([row[at] for row in rows]) for at in range(longest))
            found[name] = torch.stack(columns, dim=1) if name == "log_probs" else columns
        return found
