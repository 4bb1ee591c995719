"""Triton kernels, the twins of `dspark_fast.reference`: the same file and function names, the same signatures.

Installed as `dspark_fast.kernels`, never as a top-level package. A file here imports torch, triton and its neighbours
only, the neighbours by relative import. Arguments are checked at the door, `dspark_fast.ops`, and not again here; what
may be a number there is a tensor of one value a row here.
"""

from importlib.util import find_spec

__all__ = [
    "DraftGradients",
    "DraftLoss",
    "MarkovWalk",
    "block_attention",
    "cut_logits",
    "draft_loss",
    "draft_loss_gradients",
    "markov_walk",
    "store_context_kv",
    "verify",
]

# In a checkout transformers finds this folder as the library `kernels` and imports it: that must work without Triton.
if find_spec("triton"):
    from .block_attention import block_attention
    from .context_kv import store_context_kv
    from .draft_loss import DraftGradients, DraftLoss, draft_loss, draft_loss_gradients
    from .markov import MarkovWalk, markov_walk
    from .sampling import cut_logits
    from .verify import verify
