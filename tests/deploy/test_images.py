"""The Dockerfile and the compose file: linted, and true to the chart and the processes."""

import re
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import yaml
from rendering import (
    DEPLOY,
    GRPC_PORT,
    METRICS_PORT,
    MODULES,
    ROLES,
    ROOT,
    Object,
    render,
    settings_class,
    workloads,
)

from outrider.runtime.settings import read_settings

SCRIPTS = Path(sysconfig.get_path("scripts"))
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
COMPOSE: Object = yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def ran(*command: str | Path) -> str:
    """What it said; fails where its status is not 0."""
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def stages() -> dict[str, str]:
    """Text of each stage by name."""
    parts = re.split(r"^FROM .* AS (\S+)$", DOCKERFILE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_hadolint_has_nothing_to_complain_of() -> None:
    assert ran(SCRIPTS / "hadolint", DEPLOY / "Dockerfile") == ""


def test_the_linter_would_find_something(tmp_path: Path) -> None:
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM python:latest\nRUN cd /tmp && pip install numpy\n")
    with pytest.raises(AssertionError, match="DL3007"):
        ran(SCRIPTS / "hadolint", bad)


def test_compose_is_valid() -> None:
    check = (SCRIPTS / "check-jsonschema", "--builtin-schema", "vendor.compose-spec")
    ran(*check, DEPLOY / "compose.yaml")


@pytest.mark.parametrize("role", ROLES)
def test_each_role_is_a_target_that_runs_its_module_without_rights(role: str) -> None:
    text = stages()[role]
    assert f'ENTRYPOINT ["python", "-P", "-m", "{MODULES[role]}"]' in text
    assert "USER 65532:65532" in text
    assert f"COPY --from=build-{role} " in text
    extras = re.search(r'"\.\[([a-z,]+)\]"', stages()[f"build-{role}"])
    assert extras is not None
    assert role in extras[1].split(",")


@pytest.mark.parametrize("role", ["orchestrator", "retrieval"])
def test_who_needs_no_torch_is_built_without(role: str) -> None:
    assert f"FROM build AS build-{role}\n" in DOCKERFILE
    commands = [
        line for line in (stages()["build"] + stages()[f"build-{role}"]).splitlines() if line[:1] != "#"
    ]
    assert not [line for line in commands if "torch" in line]


def test_torch_comes_from_where_the_builder_says() -> None:
    text = stages()["build-torch"]
    assert "ARG TORCH_INDEX_URL=\n" in text
    assert '${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} torch' in text


def test_whatever_computes_has_a_compiler_for_a_gpus_kernels_unless_the_builder_says_otherwise() -> None:
    found = re.search(r'^ARG PACKAGES="([^"]*)"$', stages()["runtime-torch"], flags=re.MULTILINE)
    assert found is not None
    assert {"gcc", "libc6-dev"} <= set(found[1].split())
    assert all(f"FROM runtime-torch AS {role}\n" in DOCKERFILE for role in ("verifier", "drafter"))


def test_the_context_is_what_is_installed() -> None:
    lines = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    kept = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert "*" in lines
    assert {"constraints.txt", "pyproject.toml", "README.md", "LICENSE"} <= kept
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages <= kept
    for copied in re.findall(r"^COPY (models/\S+)", DOCKERFILE, flags=re.MULTILINE):
        assert copied.removesuffix("/tokenizer.json") in kept
        assert (ROOT / copied).is_file() or (ROOT / copied / "config.json").exists()


def test_the_tokenizer_that_retrieval_is_told_of_is_in_its_image() -> None:
    said = "/opt/outrider/models/target"
    assert f"COPY models/target/tokenizer.json {said}/\n" in stages()["retrieval"]
    assert COMPOSE["services"]["retrieval"]["environment"]["OUTRIDER_RETRIEVAL__TOKENIZER"] == said
    rendered = {role: container for role, _, container in workloads(render({"retrieval": {"enabled": True}}))}
    assert {"name": "OUTRIDER_RETRIEVAL__TOKENIZER", "value": said} in rendered["retrieval"]["env"]


def test_chart_and_compose_use_the_images_that_are_built() -> None:
    targets = {f"outrider-{role}:0.1.0": role for role in ROLES}
    chart = {
        container["image"]: role for role, _, container in workloads(render({"retrieval": {"enabled": True}}))
    }
    compose = {one["image"]: one["build"]["target"] for one in COMPOSE["services"].values()}
    assert chart == compose == targets


@pytest.mark.parametrize("role", ROLES)
def test_compose_gives_settings_that_its_process_takes(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    service: dict[str, Any] = COMPOSE["services"][role]
    given = {name: re.sub(r"\$\{\w+:-(.*)\}", r"\1", value) for name, value in service["environment"].items()}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    settings = read_settings(settings_class(role), [], given)
    assert (settings.bind, settings.metrics_bind) == (f"0.0.0.0:{GRPC_PORT}", f"0.0.0.0:{METRICS_PORT}")
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    grace = re.fullmatch(r"(\d+)s", service["stop_grace_period"])
    assert grace is not None
    assert int(grace[1]) >= 2 * settings.grace_s + 2
    assert f"http://127.0.0.1:{METRICS_PORT}/readyz" in service["healthcheck"]["test"][-1]
