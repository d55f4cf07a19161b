"""Embeddings of ids behind a model's vocabulary, which rows may have and which are never chosen."""

import torch
from transformers import PreTrainedModel


def grow_embeddings(model: PreTrainedModel, known_ids: int, rows: torch.Tensor) -> int:
    """Gives the ids from `known_ids` on to embeddings, ``[count, width]``; returns the number of ids then.

    The logits stay as wide as they are: an output layer that shares the table keeps the old one.
    """
    table = model.get_input_embeddings()
    weights = table.weight
    assert isinstance(weights, torch.Tensor)
    known = weights[:known_ids]  # a table may have rows that no logit stands for
    grown = torch.cat((known, rows.detach().to(known)))
    table.weight = torch.nn.Parameter(grown, requires_grad=False)
    return len(grown)
