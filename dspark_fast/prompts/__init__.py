"""The prompts that ship for evaluation: a file of JSON lines for each domain, ``turns`` and an ``id`` in every line."""
