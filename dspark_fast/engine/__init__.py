"""The decoding engine: what drives a target and a drafter from prompts to tokens.

To read it, begin with :mod:`~dspark_fast.engine.loop`, then ``round`` (what a round does), ``state`` and ``cache`` (the
tensors that it does it to), ``reader`` (the host's side), ``target`` and ``attention`` (how a transformers model is
driven). The rest stands beside that: ``graphs``, ``switch``, ``past``, ``processors``, ``stopping``, ``outputs``.
"""
