"""Puts the drafter together from its settings."""

from collections.abc import Callable
from functools import partial

from drafter_service.drafters import Drafter, load
from drafter_service.learning.service import Learning, learning_of
from drafter_service.settings import DrafterSettings
from drafter_service.worker import COUNTERS, GAUGES, DrafterWorker
from outrider.announcing import announced
from outrider.lm.load.progress import follow_loading
from outrider.runtime.serve import Service, ServiceContext
from outrider.source.followed import SourceProfile
from outrider.source.server import SourceServer
from outrider.source.worker import Publish


def drafter_server(
    context: ServiceContext[DrafterSettings],
    load_drafter: Callable[[], Drafter],
    learning: Learning | None = None,
) -> SourceServer[DrafterWorker]:
    """A source server; its worker's thread calls `load_drafter` and runs the drafter, which may learn."""
    return SourceServer(
        partial(_make_worker, context.settings, load_drafter, learning),
        loading="the drafter is loading its model",
        metrics=context.metrics,
        counters=COUNTERS,
        gauges=GAUGES,
        fail=context.fail,
        tracing=context.tracing,
    )


def _make_worker(
    settings: DrafterSettings,
    load_drafter: Callable[[], Drafter],
    learning: Learning | None,
    publish: Publish,
) -> DrafterWorker:
    drafter = load_drafter()
    profile = SourceProfile(
        name=settings.name,
        model=drafter.model,
        tokenizer_digest=drafter.tokenizer_digest,
        vocabulary_size=drafter.abilities.bound,
        readable_ids=drafter.abilities.width,
        max_length=drafter.abilities.max_length,
        max_sessions=settings.max_sessions,
        grace_s=settings.keep_s,
        numerics=drafter.numerics,
        learns=False,
        noun="drafter",
    )
    if learning is not None:
        return learning.worker(drafter, profile, publish)
    return DrafterWorker(
        drafter,
        profile,
        publish,
        growth=settings.growth,
        nodes_per_pass=settings.nodes_per_pass,
        chunk=settings.prefill_chunk,
        policy=settings.policy,
    )


async def build(context: ServiceContext[DrafterSettings]) -> Service:
    """The drafter service of these settings, not yet loaded."""
    follow_loading(context.loaded)
    settings = context.settings
    learning = learning_of(settings, context.metrics)
    load_drafter = partial(load, settings) if learning is None else learning.load
    return announced(drafter_server(context, load_drafter, learning), context, waits=True)
