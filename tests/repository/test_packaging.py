"""Declared dependencies are those in use, and every version is pinned."""

import re
import subprocess
import sys
from importlib import metadata

import pytest
from source import PACKAGES, ROOT, imports, modules, project

import outrider

# Where the name to import is not the name to install.
DISTRIBUTIONS = {
    "google": "protobuf",
    "google.rpc": "googleapis-common-protos",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "jwt": "pyjwt",
    "llama_cpp": "llama-cpp-python",
}
ROLES = {"verifier_service": "verifier", "drafter_service": "drafter", "orchestrator": "orchestrator"}
# Imported where it is there, as an extra of its own or brought by a CUDA build of torch, or by uvicorn alone.
OPTIONAL = {"triton", "uvloop", "websockets"}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def names(requirements: list[str]) -> set[str]:
    return {normal(re.split(r"[\s<>=!~\[;]", requirement)[0]) for requirement in requirements}


def pins(file: str) -> dict[str, str]:
    lines = [line for line in (ROOT / file).read_text().splitlines() if line and not line.startswith("#")]
    split = [line.split("==") for line in lines]
    assert all(len(parts) == 2 for parts in split), f"{file} has a line that pins nothing"
    return {normal(name): version for name, version in split}


def declared(extras: set[str]) -> set[str]:
    """Names of the distributions that these extras ask for; an extra of other extras asks for theirs."""
    optional = project()["project"]["optional-dependencies"]
    found = names(project()["project"]["dependencies"])
    for requirement in (requirement for extra in extras for requirement in optional[extra]):
        ours = re.fullmatch(r"outrider\[(.*)\]", requirement)
        found |= names([requirement]) if ours is None else declared(set(ours[1].split(",")))
    return found


def installed(module: str) -> str:
    """The part of a module's name that tells what to install."""
    return "google.rpc" if module.startswith("google.rpc") else module.partition(".")[0]


def used(package: str) -> set[str]:
    """Distributions that a package's modules import."""
    found: set[str] = set()
    for name, path in modules(generated=True):
        if name.partition(".")[0] == package:
            found |= {installed(other) for other in imports(name, path.read_text())}
    return {
        DISTRIBUTIONS.get(top, normal(top))
        for top in found - set(sys.stdlib_module_names) - set(PACKAGES) - OPTIONAL - {""}
    }


@pytest.mark.parametrize(("package", "role"), ROLES.items())
def test_a_service_uses_what_its_role_declares(package: str, role: str) -> None:
    assert used(package) <= declared({role})


def test_the_core_needs_numpy_alone() -> None:
    assert used("speculative") == {"numpy"}


def test_every_declared_dependency_is_used() -> None:
    anywhere = set[str]().union(*(used(package) for package in PACKAGES)) | OPTIONAL
    assert declared({"verifier", "drafter", "orchestrator", "fast"}) <= anywhere


def test_every_dependency_stands_below_its_reason() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    block = text[text.index("dependencies = [") : text.index("optional-dependencies")]
    assert block.count("#") >= block.count('    "') - 1


def test_every_declared_dependency_is_pinned() -> None:
    extras = set(project()["project"]["optional-dependencies"])
    assert declared(extras) <= set(pins("constraints.txt"))


def test_what_is_installed_here_is_what_is_pinned() -> None:
    pinned = pins("constraints.txt")
    installed = {normal(d.metadata["Name"]): d.version.partition("+")[0] for d in metadata.distributions()}
    assert {name: installed[name] for name in pinned if name in installed} == {
        name: version for name, version in pinned.items() if name in installed
    }


def test_everything_that_the_environment_needs_is_pinned() -> None:
    """The packages that the declared ones need, for this Python, are in the list too."""
    pinned = set(pins("constraints.txt"))
    extras = set(project()["project"]["optional-dependencies"])
    pulled, waiting = set[str](), {name for name in declared(extras) if _is_installed(name)}
    while waiting:
        name = waiting.pop()
        pulled.add(name)
        for requirement in metadata.requires(name) or []:
            plain = "extra ==" not in requirement and "platform" not in requirement
            other = names([requirement]).pop()
            if plain and other not in pulled and _is_installed(other):
                waiting.add(other)
    assert pulled <= pinned


def _is_installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def test_the_stub_generator_is_no_newer_than_the_oldest_runtime_allowed() -> None:
    generator = pins("proto/constraints.txt")["grpcio-tools"]
    assert f"grpcio>={generator.removesuffix('.0')},<2" in project()["project"]["dependencies"]
    assert pins("proto/constraints.txt")["mypy-protobuf"]


def test_the_version_is_one() -> None:
    assert outrider.__version__ == project()["project"]["version"]


def test_the_command_is_the_programs() -> None:
    assert project()["project"]["scripts"] == {"outrider": "outrider.cli.app:main"}


def test_what_is_exported_can_be_imported() -> None:
    for name in outrider.__all__:
        assert getattr(outrider, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        outrider.nothing  # noqa: B018


def test_every_package_is_listed_for_installation() -> None:
    listed = project()["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {f"{package}*" for package in PACKAGES} <= set(listed)
    for package in PACKAGES:
        folders = {path.parent for path in (ROOT / package).rglob("*.py")}
        assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_generated_stubs_load_without_a_warning() -> None:
    stubs = ("generation_pb2_grpc", "verifier_pb2_grpc", "draft_source_pb2_grpc")
    code = f"from outrider.v1 import {', '.join(stubs)}"
    subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, timeout=200, check=True)
