"""Can this drafter belong to this target? What a configuration can tell is told before any work."""

from __future__ import annotations

from transformers import PreTrainedModel

from dspark_fast.config import DSparkConfig


def check_pair(config: DSparkConfig, model: PreTrainedModel) -> None:
    """Refuse a drafter that was not made for a target of this shape.

    A fine-tuned sibling of the right target passes: only its acceptance length tells.

    Raises:
        ValueError: naming the mismatch with both values.
    """
    target = model.config.get_text_config(decoder=True)
    name = getattr(model, "name_or_path", "") or type(model).__name__
    for key, of_target in (
        ("hidden_size", target.hidden_size),
        ("vocab_size", target.vocab_size),
        ("num_target_layers", target.num_hidden_layers),
    ):
        of_draft = getattr(config, key)
        if of_draft is not None and of_draft != of_target:
            theirs = "num_hidden_layers" if key == "num_target_layers" else key
            raise ValueError(f"the drafter's {key} is {of_draft}, but the target {name} has {theirs} {of_target}")
    last = target.num_hidden_layers - 1
    for layer in config.target_layer_ids:
        if layer >= last:
            why = "is the last, whose output the final norm changes" if layer == last else "does not exist"
            raise ValueError(
                f"target_layer_ids is {config.target_layer_ids}, but layer {layer} {why}: "
                f"the target {name} has {target.num_hidden_layers} layers, of which -1 to {last - 1} can be tapped"
            )
    of_draft, of_target = config.target_model_type, target.model_type
    if of_draft is not None and of_draft != of_target:
        raise ValueError(f"the drafter's target_model_type is {of_draft!r}, but the target {name} is a {of_target!r}")
    head = model.get_output_embeddings()
    if head is None or getattr(head, "bias", None) is not None:
        raise ValueError(f"the target {name} needs an LM head without a bias to share with its drafter, it has {head}")
