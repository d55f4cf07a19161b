"""Tells how many of a model's weights transformers has read, while it loads them."""

import time
from collections.abc import Callable, Iterator, Sized
from functools import partial
from typing import Any

from transformers.utils.logging import set_tqdm_hook

EVERY_S = 0.2
"""Seconds between two reports, apart from the first and the last."""
_BAR = "Loading weights"
"""Transformers' name of the progress bar whose steps are tensors of the checkpoint."""
Loaded = Callable[[int, int], None]
"""Takes the number of tensors that are loaded, and the number of all tensors."""


def follow_loading(loaded: Loaded) -> None:
    """Makes later loads in this process call `loaded`, in the thread that loads the model."""
    set_tqdm_hook(partial(_bar, loaded))


def _bar(loaded: Loaded, factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The bar that transformers asks for; a counting bar replaces the bar of weights."""
    if kwargs.get("desc") != _BAR or not args or not isinstance(args[0], Sized):
        return factory(*args, **kwargs)
    return _counted(args[0], loaded)


def _counted(items: Any, loaded: Loaded) -> Iterator[Any]:
    of, told_s = len(items), time.monotonic()
    loaded(0, of)
    for done, item in enumerate(items):
        if time.monotonic() - told_s >= EVERY_S:
            told_s = time.monotonic()
            loaded(done, of)
        yield item
    loaded(of, of)
