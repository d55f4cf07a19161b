"""Tensors go to compiled passes and come back by handles, which keep no memory."""

import pytest
import torch

from outrider.lm.compiled import container
from outrider.lm.compiled.container import delete, holders, new_handle, tensor_of


def test_a_tensor_comes_back_as_it_went() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    back = tensor_of(new_handle(tensor))
    assert torch.equal(back, tensor)
    assert back.data_ptr() == tensor.data_ptr()


def test_nothing_holds_the_memory_of_a_tensor_that_came_back() -> None:
    storage = torch.zeros(4).untyped_storage()
    before = holders(storage)
    back = tensor_of(new_handle(torch.empty(0).set_(storage)))
    assert holders(storage) == before + 1
    del back
    assert holders(storage) == before


def test_a_handle_holds_the_memory_until_it_is_deleted() -> None:
    storage = torch.zeros(4).untyped_storage()
    before = holders(storage)
    handle = new_handle(torch.empty(0).set_(storage))
    assert holders(storage) == before + 1
    delete(handle)
    assert holders(storage) == before


@pytest.mark.parametrize("stays", [True, False])
def test_a_handle_that_torch_deletes_itself_is_not_deleted_twice(
    stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    deleted: list[int | None] = []
    monkeypatch.setattr(container, "_taken", lambda handle: torch.zeros(1))
    monkeypatch.setattr(container, "_stays", lambda: stays)
    monkeypatch.setattr(container, "delete", deleted.append)
    tensor_of(1234)
    assert deleted == ([1234] if stays else [])
