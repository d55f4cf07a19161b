"""Volumes: mounted where they are, writable by their owner alone, and with room in the pod's memory."""

from pathlib import Path

import pytest
from rendering import EXAMPLES, Object, example, of_kind, render, workloads

from outrider.compiling.store import CompileFailed, PackageStore


def volumes_of(workload: Object) -> set[str]:
    spec = workload["spec"]
    claims = {one["metadata"]["name"] for one in spec.get("volumeClaimTemplates", ())}
    return claims | {one["name"] for one in spec["template"]["spec"]["volumes"]}


def test_a_volume_for_every_role_is_none_for_orchestrators_which_keep_nothing() -> None:
    objects = render({"common": {"persistence": {"enabled": True}}})
    with_data = set()
    for role, workload, container in workloads(objects):
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted <= volumes_of(workload), role
        with_data |= {role} if "data" in mounted else set()
    assert with_data == {"verifier", "drafter"}


@pytest.mark.parametrize("variant", ["", "retrieval"])
def test_a_volume_that_is_mounted_again_keeps_the_modes_that_processes_gave_its_folders(
    variant: str, tmp_path: Path
) -> None:
    """Otherwise the kubelet lets the group write, as here, and packages are never loaded again."""
    store = PackageStore(tmp_path / "passes")
    with store.building() as made:
        (made / "passes.so").write_bytes(b"")
        kept = store.publish(made, "key", ("passes.so",))
    for folder in (tmp_path / "passes", kept):
        folder.chmod(0o2770)
    with pytest.raises(CompileFailed, match="other users could place code in it"):
        store.find("key")
    for _, workload, _ in workloads(example(variant)):
        context = workload["spec"]["template"]["spec"]["securityContext"]
        assert context["fsGroup"] == context["runAsGroup"]
        assert context["fsGroupChangePolicy"] == "OnRootMismatch"


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_claim_that_the_chart_makes_can_be_filled(name: str) -> None:
    for claim in of_kind(example(name), "PersistentVolumeClaim"):
        assert {"ReadWriteOnce", "ReadWriteMany"} & set(claim["spec"]["accessModes"])


@pytest.mark.parametrize("name", EXAMPLES)
def test_shared_memory_fits_into_the_memory_of_its_pod(name: str) -> None:
    """The kernel counts what lies in /dev/shm as memory of the container."""
    for _, workload, container in workloads(example(name)):
        for volume in workload["spec"]["template"]["spec"]["volumes"]:
            if volume["name"] == "shm":
                limit = container["resources"]["limits"]["memory"]
                assert gibibytes(volume["emptyDir"]["sizeLimit"]) < gibibytes(limit) / 2


def gibibytes(quantity: str) -> int:
    assert quantity.endswith("Gi"), quantity
    return int(quantity.removesuffix("Gi"))


@pytest.mark.parametrize("claim", [{}, {"existingClaim": "model-weights"}])
def test_pods_download_nothing_unless_told_to_and_then_with_the_token_given(claim: Object) -> None:
    secret = {"name": "hub-token", "key": "token"}
    told = render({"weights": {**claim, "offline": False, "readOnly": False, "tokenSecret": secret}})
    for objects, offline in ((render({"weights": claim}), True), (told, False)):
        for role, _, container in workloads(objects):
            given = {one["name"]: one for one in container["env"]}
            if role != "orchestrator":
                assert (given.get("HF_HUB_OFFLINE", {}).get("value") == "1") is offline, role
                assert ("HF_TOKEN" in given) is not offline, role
