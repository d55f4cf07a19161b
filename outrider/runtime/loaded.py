"""What a process has loaded once it is ready, and the collector of garbage."""

import gc


def keep_what_is_loaded() -> None:
    """Looks through what is loaded for garbage once, and never again: beside a model and its libraries that
    stops all threads for some 200 ms, every time that enough has been made since."""
    gc.collect()
    gc.freeze()
