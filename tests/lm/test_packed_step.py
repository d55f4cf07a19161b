"""The benchmark of the packed pass, run small."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import packed_step
from benchmarks.peers.llama_bench import pass_times
from benchmarks.shared.envelope import MODELS
from outrider.lm.runner import PackedLM

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
def test_its_last_line_is_what_the_schema_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["packed_step", "--json", "--repeats", "1", "--layers", "1"])

    packed_step.main()

    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    schema = json.loads((REPOSITORY / "docs/figures/packed_step.schema.json").read_text())
    assert set(found) == set(schema["properties"]) == set(schema["required"])
    assert found["name"] == schema["properties"]["name"]["const"]
    assert set(schema["properties"]["ms"]["required"]) <= set(found["ms"])
    assert set(found["over_floor"]) == set(found["ms"])
    assert set(schema["properties"]["floor"]["required"]) == set(found["floor"])
    assert set(found["kernels"]) == {"512x256", "256x256", "1376x256", "256x688", "4096x256"}
    for name in ("small_ms", "pass_overhead_ms"):
        assert set(schema["properties"][name]["required"]) == set(found[name])
    assert all(spent > 0 for spent in [*found["ms"].values(), *found["small_ms"].values()])
    assert all(spent > 0 for spent in found["pass_overhead_ms"].values())


def program(folder: Path, *lines: str) -> str:
    path = folder / "llama-bench"
    path.write_text("\n".join((f"#!{sys.executable}", *lines, "")))
    path.chmod(0o755)
    return str(path)


def test_passes_of_llama_are_read_from_its_own_program_by_rows(tmp_path: Path) -> None:
    given = tmp_path / "given"
    found = program(
        tmp_path,
        "import json, sys",
        f"open({str(given)!r}, 'w').write(' '.join(sys.argv[1:]))",
        "rows = sys.argv[sys.argv.index('--n-prompt') + 1].split(',')",
        "print(json.dumps([{'n_prompt': int(n), 'samples_ns': [int(n) * 10**6] * 2} for n in rows]))",
    )

    times = pass_times(found, tmp_path / "target.gguf", (1, 8), 256, 2, 3)

    assert times == {1: [1.0, 1.0], 8: [8.0, 8.0]}
    flags = given.read_text()
    assert "--n-depth 256" in flags
    assert "--threads 2 --repetitions 3" in flags


def test_a_program_of_llama_that_fails_ends_the_run_with_its_last_line(tmp_path: Path) -> None:
    found = program(tmp_path, "raise SystemExit('the model is too large')")

    with pytest.raises(SystemExit, match="ended with 1: the model is too large"):
        pass_times(found, tmp_path / "target.gguf", (1,), 256, 1, 1)


def test_compiled_passes_read_weights_that_were_stored_in_bfloat16_in_half_the_bytes() -> None:
    stored = packed_step.products_of(PackedLM.load(MODELS / "target"))
    drawn = packed_step.products_of(packed_step.random_pair(layers=1)[0])

    assert packed_step.weight_bytes(stored, as_compiled=True) * 2 == packed_step.weight_bytes(stored)
    assert packed_step.weight_bytes(drawn, as_compiled=True) == packed_step.weight_bytes(drawn)


def test_each_pass_stands_over_the_floor_of_the_weights_that_it_reads() -> None:
    medians = {"packed_1x1": 6.0, "llama_1": 3.0, "compiled_1x1": 2.0, "llama_bf16_1": 3.0}

    over = packed_step.over_floors(medians, {"ms": 2.0}, {"ms": 1.0})

    assert over == {"packed_1x1": 3.0, "llama_1": 1.5, "compiled_1x1": 2.0, "llama_bf16_1": 3.0}
