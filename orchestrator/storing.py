"""Which store an orchestrator records its sessions in, as its settings say."""

from orchestrator.settings import OrchestratorSettings
from orchestrator.stores import SessionStore, open_store
from speculative.errors import InvalidRequest


def chosen_store(settings: OrchestratorSettings) -> SessionStore:
    """As the settings name it. Raises InvalidRequest where they contradict each other."""
    url = _redis_url(settings)
    if settings.store == "memory":
        if url:
            raise InvalidRequest("a Redis URL is given, but store is memory; give --store redis, too")
        return open_store("memory")
    if not url:
        raise InvalidRequest("store is redis, but nobody says where: give --redis-url-file or --redis-url")
    try:
        return open_store("redis", url)
    except ImportError as error:
        raise InvalidRequest("store is redis, but redis-py is not installed here: install it") from error
    except ValueError as error:  # its text may quote the URL, hence a password
        raise InvalidRequest("the Redis URL is none: redis://, rediss:// and unix:// are possible") from error


def _redis_url(settings: OrchestratorSettings) -> str:
    """Empty where there is none."""
    given, file = settings.redis_url, settings.redis_url_file
    if given is not None and file is not None:
        raise InvalidRequest("give redis_url or redis_url_file, not both")
    if file is None:
        return "" if given is None else given.get_secret_value()
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(
            f"redis_url_file {str(file)!r} cannot be read: {type(error).__name__}"
        ) from error
