"""Which store an orchestrator records its sessions in, as its settings say."""

from orchestrator.settings import FOR_NOTHING, NOWHERE, OrchestratorSettings
from orchestrator.store import SessionStore, open_store
from speculative.errors import InvalidRequest


def chosen_store(settings: OrchestratorSettings) -> SessionStore:
    """As the settings name it. Raises InvalidRequest where they contradict each other."""
    url = "" if settings.redis_url is None else settings.redis_url.get_secret_value()
    if settings.store == "memory":
        if url:
            raise InvalidRequest(FOR_NOTHING)
        return open_store("memory")
    if not url:
        raise InvalidRequest(NOWHERE)
    try:
        return open_store("redis", url)
    except ImportError as error:
        raise InvalidRequest("store is redis, but redis-py is not installed here: install it") from error
    except ValueError as error:  # its text may quote the URL, hence a password
        raise InvalidRequest("the Redis URL is none: redis://, rediss:// and unix:// are possible") from error
