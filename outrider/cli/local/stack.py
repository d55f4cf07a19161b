"""All services of one machine as child processes: started together, watched, stopped together.

Knows nothing of requests.
"""

import contextlib
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

import grpc

from outrider.cli.failures import CommandFailed
from outrider.cli.local.ports import GRPC_PORT, HTTP_PORT, free_address
from outrider.cli.local.up_settings import ALONE, AUTO, DRAFTER, ServiceOverrides, StackOptions, drafter_names
from outrider.cli.observe.scrape import reading_of
from outrider.client.endpoints import credentials_of
from outrider.runtime.backoff import Backoff
from outrider.runtime.children import ServiceFailed, ServiceProcess, reserved_address, stop_all
from outrider.v1 import draft_source_pb2, verifier_pb2
from outrider.v1.draft_source_pb2_grpc import DraftSourceStub
from outrider.v1.verifier_pb2_grpc import VerifierStub
from outrider.wire.channel import sync_channel
from outrider.wire.status import rpc_errors
from speculative.errors import Unavailable

SILENT_S = 900.0
"""Seconds in which a service that starts must make progress: load a part of its model, or get ready."""
LOOK_S = 0.05
"""Seconds to wait for the announcement of one service before the next service is looked at."""
JOIN_S = 30.0
"""Seconds in which the orchestrator must reach all workers."""
STOP_S = 5.0
"""Seconds that a service has to end before it is killed."""
RESTART_S = (0.5, 30.0)
"""First and longest wait before a worker is started again, in seconds."""
STEADY_S = 60.0
"""Seconds after which a worker that was started again counts as running steadily."""
MOST_RESTARTS = 5
"""Restarts in a row of a verifier that does not run steadily, after which `up` ends."""
SOURCES = ("drafter", "retrieval")
"""Roles whose end leaves requests running."""
SECOND_VERIFIER = "verifier-2"
"""The role of a second verifier, which answers requests with the drafter's weights."""
WORKERS = ("verifier", *SOURCES)
"""Roles that are started again when they end. The orchestrator moves the verifiers' requests."""
SERVING = ("torch", "transformers", "fastapi", "uvicorn")
"""Modules of the services that a client does without; one of each service's extra at least."""
RETRIEVAL = ("pydivsufsort",)
"""Modules that the retrieval worker needs besides."""
CALL_S = 10.0
"""Timeout of a call to a service, in seconds."""
POLL_S = 0.02
"""Seconds between two readings of the orchestrator's metrics."""


@dataclass(slots=True)
class _Role:
    """The command line and environment of one service."""

    name: str
    module: str
    flags: list[str]
    env: dict[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The service's role: `drafter` for the service `drafter-2`."""
        return _kind(self.name)

    @property
    def bind(self) -> str:
        """host:port at which the service serves."""
        return self.flags[1]

    def start(self) -> ServiceProcess:
        return ServiceProcess.start(self.name, self.module, self.flags, env=self.env)


def _kind(name: str) -> str:
    """The role of a service of this name: `drafter` of `drafter-2`."""
    return name.partition("-")[0]


class Restarts:
    """When to start one worker again, and when to give up. Pure: the caller passes the time in seconds.

    Args:
        most: the most restarts in a row of a worker that never ran steadily; None: no bound.
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._in_a_row = 0
        self._backoff = Backoff(*RESTART_S)
        self._started_s: float | None = None
        self.due_s = 0.0
        """Time of the next start."""

    def started(self, now_s: float) -> None:
        """The worker was started again."""
        self._started_s = now_s

    def ended(self, now_s: float) -> float | None:
        """Seconds until the worker is started again; None: it ended too often."""
        if self._started_s is not None and now_s - self._started_s >= STEADY_S:
            self._backoff.reset()
            self._in_a_row = 0
        if self._in_a_row == self._most:
            return None
        self._in_a_row += 1
        wait_s = self._backoff.next_s()
        self.due_s = now_s + wait_s
        return wait_s


def check_installed(*, retrieval: bool) -> None:
    """Raises CommandFailed where a library is missing that the services need beyond the client's.

    `retrieval` says whether a retrieval worker is among them.
    """
    needed = (*SERVING, *RETRIEVAL) if retrieval else SERVING
    if missing := [name for name in needed if find_spec(name) is None]:
        raise CommandFailed(f"not installed: {', '.join(missing)}; run: pip install 'outrider[serve]'")


def check_pair(
    target: verifier_pb2.VerifierDescription,
    source: draft_source_pb2.SourceDescription,
    role: str = "drafter",
) -> None:
    """Raises CommandFailed where target and source have different tokenizers; drafts would be useless."""
    if source.tokenizer_digest not in ("", target.tokenizer_digest):
        raise CommandFailed(
            f"{role}: the tokenizer of {source.model} ({source.tokenizer_digest[:12]}) is not that of "
            f"{target.model} ({target.tokenizer_digest[:12] or 'none'}); give one that shares it, or none"
        )


def wait_until_joined(metrics: str, workers: Collection[str], within_s: float) -> None:
    """Waits until the orchestrator whose /metrics are at host:port reaches all workers (host:port).

    Asks the metrics, not the front, which may want a key and certificates. Raises Unavailable after
    `within_s` seconds, naming the workers that are out of reach.
    """
    deadline = time.monotonic() + within_s
    while missing := set(workers) - _workers_in_reach(metrics):
        if time.monotonic() > deadline:
            raise Unavailable(
                f"the orchestrator did not reach {', '.join(sorted(missing))} within {within_s:g} s: where "
                "these have certificates (tls_cert), it needs one of their authority; its log says more"
            )
        time.sleep(POLL_S)


def _workers_in_reach(metrics: str) -> set[str]:
    """Addresses of the workers that the orchestrator reaches; empty where its metrics cannot be read now."""
    reading = reading_of(metrics)
    return {peer for peer, up in reading.by("orchestrator_peer_up", "peer").items() if up}


GPU_SHARES = {"verifier": 0.72, "drafter": 0.2}
"""Shares of a GPU's memory that the verifier and all drafters may take where both compute on it."""
SECOND_SHARE = 0.15
"""The share of a second verifier, which the first then does without."""


class Stack:
    """All services of one machine. Call `start`, `wait_ready`, then `check` repeatedly; always `close`."""

    def __init__(self, options: StackOptions) -> None:
        """Decides every service's flags. Raises CommandFailed if a model is missing."""
        target, drafters = options.models()
        drafters = () if drafters == (AUTO,) else drafters
        self._held = contextlib.ExitStack()
        self.notes: list[str] = []
        """Notes for the user about choices that `up` made, a line each."""
        self.compiles = options.passes == "compiled"
        """Whether models' passes are compiled before they serve."""
        self._overrides = options.overrides
        verifier_threads, drafter_threads = options.thread_counts(len(drafters))
        self._roles = [self._model_role("verifier", target, verifier_threads, options)]
        names = drafter_names(len(drafters), options.overrides.text(DRAFTER, "name") or DRAFTER)
        for role, name, drafter in zip(drafter_names(len(drafters)), names, drafters, strict=True):
            made = self._model_role(DRAFTER, drafter, drafter_threads, options, role)
            made.flags += ["--name", name] if len(drafters) > 1 else []
            self._roles.append(made)
        if options.serve_drafter and drafters:
            self._roles.append(self._second_verifier_role(target, drafters[0], drafter_threads, options))
        if options.retrieval:
            self._roles.append(self._retrieval_role(target, options))
        self._roles.append(self._orchestrator_role(options))
        self._children: dict[str, ServiceProcess] = {}
        self.target = verifier_pb2.VerifierDescription()
        """The verifier's description of the target, once all services are ready."""
        self._restarts = {
            role.name: Restarts(MOST_RESTARTS if role.name == "verifier" else None)
            for role in self._roles
            if role.kind in WORKERS
        }

    @property
    def address(self) -> str:
        """host:port of the orchestrator, for clients."""
        return self._children["orchestrator"].address

    @property
    def http(self) -> str:
        """URL of the orchestrator's HTTP API."""
        return self._children["orchestrator"].http

    @property
    def has_page(self) -> bool:
        """Whether the HTTP API has a page for browsers."""
        return self._overrides.text("orchestrator", "page") != "False"

    @property
    def asks_for_keys(self) -> bool:
        """Whether requests need an API key."""
        keys = ("api_keys_file", "jwt_keys_file", "jwt_keys_url")
        return any(self._overrides.text("orchestrator", name) for name in keys)

    @property
    def children(self) -> list[ServiceProcess]:
        """Processes that run, the orchestrator last."""
        return [self._children[role.name] for role in self._roles if role.name in self._children]

    def start(self) -> None:
        """Starts all services and returns at once. Raises CommandFailed where a library is missing."""
        check_installed(retrieval=any(role.kind == "retrieval" for role in self._roles))
        for role in self._roles:
            self._children[role.name] = role.start()

    def wait_ready(self, show: Callable[[list[ServiceProcess]], None]) -> Iterator[ServiceProcess]:
        """Yields services as they get ready; afterwards requests are answered, with drafts.

        Calls `show` with all services a few times a second. Raises ServiceFailed, or CommandFailed where the
        drafter cannot draft for the target.
        """
        heard_s = {child.role: time.monotonic() for child in self.children}
        waiting = self.children[::-1]  # the orchestrator starts fastest, and so fails first
        while waiting:
            show(self.children)
            for child in list(waiting):
                try:
                    if child.hear(LOOK_S):
                        heard_s[child.role] = time.monotonic()
                    elif time.monotonic() - heard_s[child.role] > SILENT_S:
                        raise ServiceFailed(f"no progress for {SILENT_S:g} s; its log says more", child.role)
                except ServiceFailed as error:
                    raise ServiceFailed(f"{child.role}: {error}", child.role, error.code) from error
                if child.ready:
                    waiting.remove(child)
                    yield child
        show(self.children)
        self._check_pair()
        self._join()

    def check(self) -> Iterator[str]:
        """Restarts workers that ended; yields each event as text.

        Raises CommandFailed where the orchestrator ended, or the verifier ends again and again.
        """
        for role in self._roles:
            child, now_s = self._children.get(role.name), time.monotonic()
            if child is None:
                restarts = self._restarts[role.name]
                if now_s >= restarts.due_s:
                    child = self._children[role.name] = role.start()
                    restarts.started(now_s)
                    yield f"{role.name} was started again as process {child.pid}"
            elif (status := child.catch_up()) is not None:
                if role.kind not in WORKERS:
                    raise CommandFailed(f"{role.name} ended with exit status {status}", "UNAVAILABLE")
                yield self._lost_worker(child, status, now_s)

    def close(self) -> None:
        """Stops all services and waits until they have ended."""
        stop_all(self._children.values(), STOP_S)
        self._held.close()

    def _lost_worker(self, child: ServiceProcess, status: int, now_s: float) -> str:
        child.stop(0.0)
        del self._children[child.role]
        wait_s = self._restarts[child.role].ended(now_s)
        if wait_s is None:
            raise CommandFailed(
                f"{child.role} ended with exit status {status}, after {MOST_RESTARTS} restarts that each ran "
                f"for less than {STEADY_S:g} s; its log says why",
                "UNAVAILABLE",
            )
        waiting = "requests to it wait" if child.role == SECOND_VERIFIER else "requests wait for it"
        requests = "requests go on" if _kind(child.role) in SOURCES else waiting
        return (
            f"{child.role} ended with exit status {status}; {requests}, it is started again in {wait_s:g} s"
        )

    def _orchestrator_role(self, options: StackOptions) -> _Role:
        """The orchestrator's flags: its ports, and its sources, including those of its own settings."""
        overrides = options.overrides
        decided = {"edge_bind": "127.0.0.1:0", "log_level": options.log_level}
        for name, asked, first in (
            ("bind", options.bind, GRPC_PORT),
            ("http_bind", options.http_bind, HTTP_PORT),
        ):
            decided[name] = asked
            if not asked and not overrides.text("orchestrator", name):
                decided[name] = free_address(first)
                if not decided[name].endswith(f":{first}"):
                    what = "HTTP" if name == "http_bind" else "gRPC"
                    self.notes.append(f"port {first} is in use: {what} is served on {decided[name]}")
        flags = overrides.flags("orchestrator", {name: value for name, value in decided.items() if value})
        binds: dict[str, list[str]] = {}
        for role in self._roles:
            binds.setdefault(role.kind, []).append(role.bind)
        for name in WORKERS:
            also = overrides.listed("orchestrator", name)
            if also and name in SOURCES:
                self.notes.append(
                    f"the orchestrator's own settings name {also}: drafts come from there as well"
                )
            elif also:
                self.notes.append(f"the orchestrator's setting {name} = {also} is ignored: `up` starts one")
                also = ""
            if peers := [*binds.get(name, ()), *([also] if also else ())]:
                flags += [f"--{name}", ",".join(peers)]
        return _Role("orchestrator", "orchestrator", flags, overrides.environment())

    def _model_role(
        self, name: str, model: str, threads: int, options: StackOptions, called: str = ""
    ) -> _Role:
        """The service of a model; `called` is the service's name where several have the role `name`."""
        overrides, called = options.overrides, called or name
        decided = {
            "dtype": options.dtype,
            "weight_dtype": options.weight_dtype,
            "device": options.device,
            "passes": options.passes,
        }
        if options.threads is not None:
            decided["threads"] = str(threads)
        if name == "verifier" and options.heads:
            decided["heads"] = ",".join(options.heads)
        if name == "verifier" and options.amateur:
            decided["amateur"] = options.amateur
        if share := _gpu_share(called, options):
            decided["gpu_memory_utilization"] = f"{share:g}"
        flags = [*self._addresses(name, overrides, fixed=called == name), "--model", model]
        flags += overrides.flags(name, decided | {"log_level": options.log_level})
        if "threads" not in overrides.by_flag and overrides.text(name, "threads").isdecimal():
            threads = int(overrides.text(name, "threads"))
        # A service that measures how many threads to use takes this variable as a bound.
        env = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", **overrides.environment()}
        beside = [head.rpartition("=")[2] for head in options.heads]
        beside += [options.amateur] if options.amateur else []
        here = options.target_folder or Path(model).is_dir()
        if here and (name != "verifier" or all(Path(other).is_dir() for other in beside)):
            env["HF_HUB_OFFLINE"] = "1"
        return _Role(called, f"{name}_service", flags, env)

    def _second_verifier_role(self, target: str, drafter: str, threads: int, options: StackOptions) -> _Role:
        """A verifier of the drafter's weights, with the settings of the first save its model's own."""
        by_role = options.overrides.by_role
        own = dict(by_role.get("verifier", {}))
        own.pop("gpu_memory_utilization", None)  # sized for the first verifier, which keeps it
        overrides = replace(options.overrides, by_role={**by_role, "verifier": own})
        alone = replace(options, heads=(), amateur="", overrides=overrides)
        made = self._model_role("verifier", drafter, threads, alone, SECOND_VERIFIER)
        name = overrides.text("verifier", "model_name") or _name(target)
        made.flags += ["--model-name", f"{name}:drafter", *ALONE]
        if overrides.text("verifier", "advertise"):
            made.flags += ["--advertise", made.bind]
        return made

    def _retrieval_role(self, target: str, options: StackOptions) -> _Role:
        """Passes the target's tokenizer on, and its embeddings where the target is a folder that has them."""
        decided = {"log_level": options.log_level}
        folder = Path(target)
        if options.target_folder and not folder.is_dir():
            decided["tokenizer"] = options.target_folder
        elif not folder.is_dir() or (folder / "tokenizer.json").is_file():
            decided["tokenizer"] = target
        if any(folder.glob("model.safetensors*")):
            decided["embeddings"] = target
        if options.corpora:
            decided["corpus"] = ",".join(options.corpora)
        if options.folder:
            decided["folder"] = options.folder
        overrides = options.overrides
        flags = [*self._addresses("retrieval", overrides), *overrides.flags("retrieval", decided)]
        env = {"OMP_NUM_THREADS": "1", **overrides.environment()}
        return _Role("retrieval", "retrieval_service", flags, env)

    def _addresses(self, role: str, overrides: ServiceOverrides, *, fixed: bool = True) -> list[str]:
        """Flags of the addresses to serve on: the service's own with their ports, else reserved ports.

        Not `fixed`: the service is the second of its role or a later one, and gets reserved ports.
        """
        flags = []
        for name in ("bind", "metrics_bind"):
            address = overrides.text(role, name)
            free = not fixed or not address or address.endswith(":0")
            flags += [f"--{name.replace('_', '-')}", self._reserve() if free else address]
        return flags

    def _reserve(self) -> str:
        return self._held.enter_context(reserved_address())

    def _check_pair(self) -> None:
        """Raises CommandFailed where a source cannot draft for the target."""
        with rpc_errors(), self._channel("verifier", "verifier") as channel:
            request = verifier_pb2.VerifierDescribeRequest()
            self.target = VerifierStub(channel).Describe(request, timeout=CALL_S)
        for role in [name for name in self._children if _kind(name) in SOURCES]:
            with rpc_errors(), self._channel(role, "source") as channel:
                source = DraftSourceStub(channel).Describe(
                    draft_source_pb2.SourceDescribeRequest(), timeout=CALL_S
                )
            check_pair(self.target, source, role)

    def _join(self) -> None:
        """Waits until the orchestrator reaches all workers."""
        workers = [child.address for role, child in self._children.items() if role != "orchestrator"]
        wait_until_joined(self._children["orchestrator"].metrics, workers, JOIN_S)

    def _channel(self, child: str, named: str) -> contextlib.AbstractContextManager[grpc.Channel]:
        """A channel to a service, with the orchestrator's certificate where it has one."""
        files = (self._overrides.text("orchestrator", name) for name in ("tls_ca", "tls_cert", "tls_key"))
        certificates = credentials_of(None, *(file or None for file in files)).certificates
        return sync_channel(self._children[child].address, certificates=certificates, role=named)


def _gpu_share(role: str, options: StackOptions) -> float | None:
    """The share of a GPU's memory for the service of this name; None: the service's own default."""
    if role == SECOND_VERIFIER:
        return SECOND_SHARE
    drafters = options.models()[1]
    beside = drafters not in ((), (AUTO,)) and options.device_of("verifier") == options.device_of(DRAFTER)
    if _kind(role) == DRAFTER:
        return GPU_SHARES[DRAFTER] / len(drafters) if beside else None
    if options.serve_drafter:
        return GPU_SHARES["verifier"] - SECOND_SHARE + (0.0 if beside else GPU_SHARES[DRAFTER])
    return GPU_SHARES["verifier"] if beside else None


def _name(model: str) -> str:
    """The name that a verifier gives its model: the folder's, or the id."""
    return Path(model).name if Path(model).is_dir() else model
