"""The memory of every example that asks for a GPU, added up: weights, the largest step, keys and values."""

import re
from dataclasses import dataclass
from typing import Any

import pytest
from gpu_models import CARDS, CONTEXT, GIB, MODELS, SAME_SIZE, Footprint, footprint, model_of, weight_bytes
from rendering import EXAMPLES, ROOT, example, settings_class, variables, workloads

from outrider.cli.local.stack import GPU_SHARES
from outrider.lm.attention.shapes import BUCKETS
from outrider.runtime.settings import read_settings

PROCESS = 6 * GIB
"""Allowance of a process on the host beside weights: torch with CUDA, and the compilers of its kernels."""

ROW = re.compile(r"^\| `(\S+)` \| (\w+) \| (\S+) \| .* \| (\S+) GB \| (\d+) KB \| ([\d,]+) \|$", re.M)
"""A row of the documented table: values, role, model, weights, keys and values of a token, tokens."""

UNITS = {"Mi": 2**20, "Gi": 2**30}


@dataclass(frozen=True)
class GpuPod:
    """What a pod asks for, and what its processes run."""

    role: str
    settings: Any
    resources: dict[str, dict[str, str]]
    card: int
    """Memory of each of its GPUs, in bytes."""
    count: int
    shm: int

    @property
    def model(self) -> str:
        return str(self.settings.model).rpartition("/")[2]

    @property
    def ranks(self) -> int:
        return getattr(self.settings, "ranks", 1)

    @property
    def longest(self) -> int:
        """Tokens of the longest session."""
        return int(MODELS[SAME_SIZE.get(self.model, self.model)][0].max_position_embeddings)

    @property
    def footprint(self) -> Footprint:
        heads = getattr(self.settings, "heads", ())
        rows = getattr(self.settings, "most_rows", BUCKETS[-1])
        return footprint(self.model, rows, self.ranks, heads[0].rpartition("/")[2] if heads else "")

    @property
    def tokens(self) -> int:
        """Tokens whose keys and values fit beside weights and the largest step."""
        return self.footprint.kv_tokens(self.card, self.settings.gpu_memory_utilization)


def in_bytes(quantity: str) -> int:
    return int(quantity[:-2]) * UNITS[quantity[-2:]]


def pods(name: str) -> list[GpuPod]:
    """The pods of an example that ask for a GPU."""
    found = []
    for role, workload, container in workloads(example(name)):
        resources, spec = container["resources"], workload["spec"]["template"]["spec"]
        for asked in resources["limits"].keys() & {"nvidia.com/gpu", *CARDS}:
            label = spec.get("nodeSelector", {}).get("nvidia.com/gpu.product")
            shm = sum(
                in_bytes(one["emptyDir"]["sizeLimit"]) for one in spec["volumes"] if one["name"] == "shm"
            )
            found.append(
                GpuPod(
                    role,
                    read_settings(settings_class(role), [], variables(container)),
                    resources,
                    int(CARDS[label if asked == "nvidia.com/gpu" else asked] * GIB),
                    resources["limits"][asked],
                    shm,
                )
            )
    return found


PODS = [(name, pod) for name in EXAMPLES for pod in pods(name)]
each_pod = pytest.mark.parametrize(
    "pod", [pod for _, pod in PODS], ids=[f"{name}-{pod.role}" for name, pod in PODS]
)


def test_every_pod_on_a_gpu_is_added_up() -> None:
    asking = {
        (name, role)
        for name in EXAMPLES
        for role, _, container in workloads(example(name))
        if "nvidia" in str(container["resources"])
    }
    assert {(name, pod.role) for name, pod in PODS} == asking
    assert len(asking) == 7


@pytest.mark.parametrize("name", MODELS)
def test_models_have_their_published_number_of_parameters(name: str) -> None:
    counted = sum(each.numel() for each in model_of(name).parameters())
    assert counted == pytest.approx(MODELS[name][1], rel=1e-3)


@each_pod
def test_one_session_of_the_longest_context_fits_beside_the_weights_and_the_largest_step(pod: GpuPod) -> None:
    taken = pod.footprint
    left = pod.card - CONTEXT - taken.weights - taken.buffers - 2 * taken.step - pod.tokens * taken.slot
    print(f"{pod.model}: {taken}, {pod.tokens:,} tokens, {left / GIB:.1f} GiB stay free")
    assert pod.tokens >= pod.longest
    assert left >= taken.later, "a head is loaded once keys and values have their memory"


@each_pod
def test_a_pod_has_a_gpu_for_each_rank_and_memory_to_load(pod: GpuPod) -> None:
    assert pod.count == pod.ranks
    own = pod.ranks * PROCESS + pod.shm
    assert in_bytes(pod.resources["requests"]["memory"]) >= own
    # Files of weights are mapped; their pages count too, until they are needed for something else.
    assert in_bytes(pod.resources["limits"]["memory"]) >= own + weight_bytes(model_of(pod.model))


def test_target_and_drafter_fit_one_gpu_by_the_shares_that_up_gives_them() -> None:
    target, drafter = (pod for name, pod in PODS if name == "gpu")
    taken = 0
    for pod in (drafter, target):
        share, own = GPU_SHARES[pod.role], pod.footprint
        tokens = own.kv_tokens(target.card, share, beside=taken)
        assert tokens >= pod.longest
        taken += CONTEXT + own.weights + own.buffers + 2 * own.step + tokens * own.slot
    assert taken <= target.card


@pytest.mark.slow
def test_the_table_of_examples_says_what_was_added_up() -> None:
    text = (ROOT / "docs/deploy.md").read_text()
    assert {(name, role): tuple(figures) for name, role, *figures in ROW.findall(text)} == {
        (name, pod.role): (
            SAME_SIZE.get(pod.model, pod.model),
            f"{pod.footprint.weights / 1e9:.1f}",
            f"{pod.footprint.slot / 1024:.0f}",
            f"{pod.tokens // 1000 * 1000:,}",
        )
        for name, pod in PODS
        if pod.role != "drafter-2"
    }
