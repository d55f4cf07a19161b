"""What a tenant's sessions produced, kept to draft from: online, bounded, surviving a restart."""

from retrieval_service.past.outputs import Limits, PastOutputs, Stats
from retrieval_service.past.records import PastError
from retrieval_service.past.writer import DiskPolicy

__all__ = ["DiskPolicy", "Limits", "PastError", "PastOutputs", "Stats"]
