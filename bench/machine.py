"""What a figure was measured on, and where it goes."""

from __future__ import annotations

from pathlib import Path

import torch

from dspark_fast.machine import describe

__all__ = ["describe", "results_folder"]


def results_folder(device: str = "cpu") -> Path:
    """``bench/results/<device>``, made if need be."""
    name = "cpu" if device == "cpu" else torch.cuda.get_device_name(device).lower().replace(" ", "-")
    folder = Path(__file__).parent / "results" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder
