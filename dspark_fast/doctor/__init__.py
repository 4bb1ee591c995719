"""What is wrong with a pair: agreement by block position, and the likely fault by re-running the drafter without it."""

from __future__ import annotations

from dspark_fast.doctor.examine import Examination, examine
from dspark_fast.doctor.loading import Loaded, PairRefused, load_pair

__all__ = ["Examination", "Loaded", "PairRefused", "examine", "load_pair"]
