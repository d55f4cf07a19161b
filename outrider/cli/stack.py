"""All services of one machine as child processes: started together on free ports, watched, stopped together.

Knows nothing of requests.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from outrider.cli.failures import CommandFailed
from outrider.cli.joining import wait_until_joined
from outrider.cli.said import Said
from outrider.client.endpoints import credentials_of
from outrider.runtime.backoff import Backoff
from outrider.runtime.children import ROOT, ServiceFailed, ServiceProcess, reserved_address, stop_all
from outrider.runtime.threads import cpu_limit
from outrider.v1 import draft_source_pb2, verifier_pb2
from outrider.v1.draft_source_pb2_grpc import DraftSourceStub
from outrider.v1.verifier_pb2_grpc import VerifierStub
from outrider.wire.channel import open_sync_channel
from outrider.wire.status import rpc_errors

EMBEDDED = ROOT / "models"
START_S = 900.0
JOIN_S = 30.0
STOP_S = 5.0
RESTART_S = (0.5, 30.0)
"""First and longest wait before a source is started again."""
SOURCES = ("drafter", "retrieval")
"""Roles that requests go on without."""
CALL_S = 10.0


@dataclass(frozen=True, slots=True)
class StackOptions:
    """What `outrider up` was told; an empty target is the embedded pair's."""

    target: str = ""
    drafter: str = ""
    bind: str = "127.0.0.1:0"
    http_bind: str = "127.0.0.1:0"
    threads: int | None = None
    dtype: str = "float32"
    device: str = "cpu"
    log_level: str = "warning"
    retrieval: bool = True
    corpora: tuple[str, ...] = ()
    """Folders of corpora to draft from."""
    folder: str = ""
    """Where the retrieval worker keeps what it learns; empty: nowhere."""
    said: Said = field(default_factory=Said)
    """What is said to the services themselves, which goes before most of the above."""

    def models(self) -> tuple[str, str]:
        """Target and drafter; an empty drafter is none. Raises CommandFailed where the pair is not there."""
        if self.target:
            return _folder_or_id(self.target), _folder_or_id("" if self.drafter == "none" else self.drafter)
        target = str(embedded("target"))
        if self.drafter:
            return target, _folder_or_id("" if self.drafter == "none" else self.drafter)
        return target, str(embedded("drafter"))

    def thread_counts(self, with_drafter: bool) -> tuple[int, int]:
        """Compute threads of verifier and drafter: one core is left to all else, where there are more."""
        if self.threads is not None:
            return self.threads, self.threads
        cores = int(cpu_limit())
        drafter = max(1, (cores - 1) // 4) if with_drafter else 0
        return max(1, cores - 1 - drafter), max(1, drafter)


def _folder_or_id(model: str) -> str:
    """What plainly is a path must be there: found out now, not after the libraries are loaded."""
    path = Path(model).expanduser()
    if model.startswith(("/", ".", "~")) and not (path / "config.json").is_file():
        raise CommandFailed(f"there is no model at {path}: it has no config.json", "NOT_FOUND")
    return str(path) if path.is_dir() and model else model


def embedded(which: str) -> Path:
    """A model of the embedded pair. Raises CommandFailed where it is not there."""
    path = EMBEDDED / which
    if not (path / "config.json").is_file():
        raise CommandFailed(
            f"there is no embedded model at {path}: it comes with a clone, not with an installed wheel; "
            "give --target PATH|ID",
            "NOT_FOUND",
        )
    return path


@dataclass(slots=True)
class _Role:
    """How one service is started, again if need be."""

    name: str
    module: str
    flags: list[str]
    env: dict[str, str] = field(default_factory=dict)

    @property
    def bind(self) -> str:
        """Where it serves."""
        return self.flags[1]

    def start(self) -> ServiceProcess:
        return ServiceProcess.start(self.name, self.module, self.flags, env=self.env)


@dataclass(slots=True)
class _Lost:
    """A source whose process ended, and when the next one is due."""

    backoff: Backoff = field(default_factory=lambda: Backoff(*RESTART_S))
    due_s: float = 0.0


def check_pair(
    target: verifier_pb2.VerifierDescription,
    source: draft_source_pb2.SourceDescription,
    role: str = "drafter",
) -> None:
    """Raises CommandFailed, naming both, where the tokenizers differ, so that nothing could be drafted."""
    if source.tokenizer_digest not in ("", target.tokenizer_digest):
        raise CommandFailed(
            f"{role}: the tokenizer of {source.model} ({source.tokenizer_digest[:12]}) is not that of "
            f"{target.model} ({target.tokenizer_digest[:12] or 'none'}); give one that shares it, or none"
        )


class Stack:
    """The services. `start`, then `wait_ready`, then `check` now and then; `close` in any case."""

    def __init__(self, options: StackOptions) -> None:
        """Raises CommandFailed where a model that is named by default is missing."""
        target, drafter = options.models()
        self._held = contextlib.ExitStack()
        self._said = options.said
        verifier_threads, drafter_threads = options.thread_counts(bool(drafter))
        self._roles = [self._model_role("verifier", target, verifier_threads, options)]
        if drafter:
            self._roles.append(self._model_role("drafter", drafter, drafter_threads, options))
        if options.retrieval:
            self._roles.append(self._retrieval_role(target, options))
        decided = {"bind": options.bind, "http_bind": options.http_bind, "log_level": options.log_level}
        flags = options.said.flags("orchestrator", decided)
        for role in self._roles:
            flags += [f"--{role.name}", role.bind]
        self._roles.append(_Role("orchestrator", "orchestrator", flags, options.said.environment()))
        self._children: dict[str, ServiceProcess] = {}
        self._lost = {role: _Lost() for role in SOURCES}

    @property
    def address(self) -> str:
        """host:port of the front door."""
        return self._children["orchestrator"].address

    @property
    def http(self) -> str:
        """URL of the front door over HTTP."""
        return self._children["orchestrator"].http

    @property
    def children(self) -> list[ServiceProcess]:
        """Those that run, the orchestrator last."""
        return [self._children[role.name] for role in self._roles if role.name in self._children]

    def start(self) -> None:
        """Start all of them; returns at once."""
        for role in self._roles:
            self._children[role.name] = role.start()

    def wait_ready(self) -> Iterator[ServiceProcess]:
        """Yields services as they get ready; at its end a request is answered with drafts.

        Raises ServiceFailed, or CommandFailed where the drafter cannot draft for the target.
        """
        deadline = time.monotonic() + START_S
        for child in reversed(self.children):  # the orchestrator is quick, and so are its faults
            try:
                child.wait_ready(max(0.0, deadline - time.monotonic()))
            except ServiceFailed as error:
                raise ServiceFailed(f"{child.role}: {error}", child.role, error.code) from error
            yield child
        self._check_pair()
        self._join()

    def check(self) -> Iterator[str]:
        """Looks after the children; yields what has happened. Raises CommandFailed where it cannot go on."""
        for role in self._roles:
            child = self._children.get(role.name)
            if child is None:
                if time.monotonic() >= self._lost[role.name].due_s:
                    child = self._children[role.name] = role.start()
                    yield f"{role.name} was started again as process {child.pid}"
            elif (status := child.poll()) is not None:
                if role.name not in SOURCES:
                    raise CommandFailed(f"{role.name} ended with exit status {status}", "UNAVAILABLE")
                yield self._lost_source(child, status)

    def close(self) -> None:
        """None is left when this returns."""
        stop_all(self._children.values(), STOP_S)
        self._held.close()

    def _lost_source(self, child: ServiceProcess, status: int) -> str:
        child.stop(0.0)
        del self._children[child.role]
        lost = self._lost[child.role]
        wait = lost.backoff.next_s()
        lost.due_s = time.monotonic() + wait
        return (
            f"{child.role} ended with exit status {status}; requests go on, it is started again in {wait:g} s"
        )

    def _model_role(self, name: str, model: str, threads: int, options: StackOptions) -> _Role:
        said = options.said
        decided = {"threads": str(threads), "dtype": options.dtype, "device": options.device}
        flags = [*self._addresses(name, said), "--model", model]
        flags += said.flags(name, decided | {"log_level": options.log_level})
        if "threads" not in said.by_flag and said.text(name, "threads").isdecimal():
            threads = int(said.text(name, "threads"))
        env = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", **said.environment()}
        if Path(model).is_dir():
            env["HF_HUB_OFFLINE"] = "1"
        return _Role(name, f"{name}_service", flags, env)

    def _retrieval_role(self, target: str, options: StackOptions) -> _Role:
        """Of a folder it takes the tokenizer and the embeddings that are there; of an id the tokenizer."""
        decided = {"log_level": options.log_level}
        folder = Path(target)
        if not folder.is_dir() or (folder / "tokenizer.json").is_file():
            decided["tokenizer"] = target
        if any(folder.glob("model.safetensors*")):
            decided["embeddings"] = target
        if options.corpora:
            decided["corpus"] = ",".join(options.corpora)
        if options.folder:
            decided["folder"] = options.folder
        flags = [*self._addresses("retrieval", options.said), *options.said.flags("retrieval", decided)]
        env = {"OMP_NUM_THREADS": "1", **options.said.environment()}
        return _Role("retrieval", "retrieval_service", flags, env)

    def _addresses(self, role: str, said: Said) -> list[str]:
        """Where it was said to serve, where a port was; else on ports that are held for it."""
        flags = []
        for name in ("bind", "metrics_bind"):
            address = said.text(role, name)
            free = not address or address.endswith(":0")
            flags += [f"--{name.replace('_', '-')}", self._reserve() if free else address]
        return flags

    def _reserve(self) -> str:
        return self._held.enter_context(reserved_address())

    def _check_pair(self) -> None:
        """Raises CommandFailed where a source cannot draft for the target."""
        with rpc_errors(), self._channel("verifier", "verifier") as channel:
            target = VerifierStub(channel).Describe(verifier_pb2.VerifierDescribeRequest(), timeout=CALL_S)
        for role in self._children.keys() & set(SOURCES):
            with rpc_errors(), self._channel(role, "source") as channel:
                source = DraftSourceStub(channel).Describe(
                    draft_source_pb2.SourceDescribeRequest(), timeout=CALL_S
                )
            check_pair(target, source, role)

    def _join(self) -> None:
        """Until the orchestrator has found the others."""
        workers = [child.address for role, child in self._children.items() if role != "orchestrator"]
        wait_until_joined(self._children["orchestrator"].metrics, workers, JOIN_S)

    def _channel(self, child: str, named: str) -> grpc.Channel:
        """To a service, with the certificate that the orchestrator was told to show, if any."""
        told = [self._said.text("orchestrator", name) or None for name in ("tls_ca", "tls_cert", "tls_key")]
        certificates = credentials_of(None, *told).certificates
        return open_sync_channel(self._children[child].address, certificates=certificates, role=named)
