"""Plain PyTorch twins of the kernels: each function here is the definition of its op, and what runs without a GPU.

One file per op, under the names that :mod:`dspark_fast.kernels` uses. Imports torch and itself, nothing else.
"""

from .block_attention import block_attention
from .confidence import confidence_logits
from .context_kv import store_context_kv
from .draft_block import DraftedBlock, draft_block
from .draft_loss import DraftGradients, DraftLoss, draft_loss, draft_loss_gradients
from .markov import MarkovWalk, markov_bias, markov_norms, markov_walk
from .sampling import cut_logits, expand_seeds
from .verify import verify

__all__ = [
    "DraftGradients",
    "DraftLoss",
    "DraftedBlock",
    "MarkovWalk",
    "block_attention",
    "confidence_logits",
    "cut_logits",
    "draft_block",
    "draft_loss",
    "draft_loss_gradients",
    "expand_seeds",
    "markov_bias",
    "markov_norms",
    "markov_walk",
    "store_context_kv",
    "verify",
]
