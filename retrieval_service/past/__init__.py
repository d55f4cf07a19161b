"""Past outputs of tenants' sessions, kept to draft from: bounded, current, and lasting over restarts."""

from retrieval_service.past.outputs import Limits, PastOutputs, Stats
from retrieval_service.past.records import PastError
from retrieval_service.past.writer import DiskPolicy

__all__ = ["DiskPolicy", "Limits", "PastError", "PastOutputs", "Stats"]
