"""What cannot work with drafts is refused by name, before any work, through both doors."""

from __future__ import annotations

import pytest
from transformers import (
    SynthIDTextWatermarkingConfig,
)
from transformers.generation.logits_process import ClassifierFreeGuidanceLogitsProcessor
from transformers.generation.stopping_criteria import ConfidenceCriteria

# Through generate() these are in test_requests.py.
REFUSED = {
    "beams": ({"num_beams": 2}, r"num_beams is 2"),
    "contrastive": ({"penalty_alpha": 0.6, "top_k": 4}, r"penalty_alpha is 0\.6.*contrastive search"),
    "guidance": ({"guidance_scale": 1.5}, r"guidance_scale is 1\.5"),
    "guidance-by-hand": (
        {"logits_processor": [ClassifierFreeGuidanceLogitsProcessor(1.5)]},
        r"classifier-free guidance",
    ),
    "constraints": ({"constraints": [object()]}, r"constrained beam search"),
    "dola": ({"dola_layers": "low"}, r"dola_layers is 'low'"),
    "prompt-lookup": ({"prompt_lookup_num_tokens": 3}, r"prompt_lookup_num_tokens is 3"),
    "synth-id": (
        {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2], ngram_len=2)},
        r"SynthIDTextWatermarkLogitsProcessor remembers",
    ),
    "scores-of-each-step": ({"stopping_criteria": [ConfidenceCriteria(0.5)]}, r"ConfidenceCriteria"),
    "hidden-states": ({"output_hidden_states": True, "return_dict_in_generate": True}, r"output_hidden_states"),
}


@pytest.mark.floor
@pytest.mark.parametrize(("settings", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_through_transformers_door(settings, message, said, through):
    runs = []
    handles = [part.register_forward_pre_hook(lambda *_: runs.append(1)) for part in (said.model, said.draft)]
    with pytest.raises(ValueError, match=message):
        through("transformers", said.model, said.draft, said.ids, max_new_tokens=5, **{"do_sample": False, **settings})
    for handle in handles:
        handle.remove()
    assert not runs
