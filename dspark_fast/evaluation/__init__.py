"""Acceptance measured as the authors of DSpark measure it: by domain, temperature and block position.

The interface, which keeps its names::

    prompts = shipped_prompts()                      # a list of Prompt; or read_prompt_file("mine.jsonl"), or
    prompts = held_out_prompts(tokenizer, 16)        # what no training run sees; cards' mean is over MEAN_OF
    result = evaluate(model, drafter, tokenizer, prompts, temperature=1.0, max_new_tokens=128, batch_size=8, seed=0)
    result.domains["maths"].tau                      # Counts: tau, proposals, verify_rate, survival, conditional
    result.pooled.conditional[0]                     # all domains' rounds together
    result.mean_tau                                  # plain mean over domains, the paper's macro average
    result.interval("maths")                         # 95 % of tau, prompts drawn anew
    Evaluation.from_dict(result.to_dict()) == result
    plot_tau([greedy, sampled], "tau.png"); plot_positions([greedy, sampled], "positions.png")

``drafter`` is what :func:`dspark_fast.generate` takes: a :class:`~dspark_fast.draft.DSparkDraft`, a smaller causal
model, an :class:`~dspark_fast.autoregressive.AutoregressiveDrafter`, or any other
:class:`~dspark_fast.drafters.Drafter`.
With ``rows="run.rows.jsonl"`` what is done is kept on disk, and a second call goes on from there.
"""

from dspark_fast.evaluation.counts import Counts
from dspark_fast.evaluation.held_out import MEAN_OF, held_out_prompts
from dspark_fast.evaluation.pair import Pair, load_pair
from dspark_fast.evaluation.plots import plot_positions, plot_tau
from dspark_fast.evaluation.prompts import read_prompt_file, shipped_prompts
from dspark_fast.evaluation.result import Evaluation, PromptResult
from dspark_fast.evaluation.run import evaluate
from dspark_fast.training.prompts import Prompt

__all__ = [
    "evaluate",
    "Evaluation",
    "Counts",
    "PromptResult",
    "Prompt",
    "shipped_prompts",
    "read_prompt_file",
    "held_out_prompts",
    "MEAN_OF",
    "plot_tau",
    "plot_positions",
    "Pair",
    "load_pair",
]
