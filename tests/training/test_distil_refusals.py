"""What stops `outrider distil` is said in one line, before hours of training where that is possible."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider.tokens import TokenTable
from speculative.errors import InvalidRequest
from tests.cli.inside import Ended, ended
from tests.training.conftest import TEXTS, quiet
from training.export import publish
from training.heads.job import distil
from training.heads.recipe import DistilOptions, checked
from training.heads.rows import read_text

ROOT = Path(__file__).parents[2]


def distilled(
    capsys: pytest.CaptureFixture[str], target: Path, tmp_path: Path, *more: object, out: object = "head"
) -> Ended:
    """The command, for a run of two steps."""
    text = tmp_path / "text.txt"
    text.write_text("\n".join(TEXTS))
    return ended(
        *(capsys, "distil", text, "--kind", "medusa", "--target", target, "--out", tmp_path / str(out)),
        *("--tokens", 512, "--window", 32, "--batch", 128, "--steps", 2, "--depth", 2, "--json"),
        *("--threads", torch.get_num_threads(), *more),
    )


@pytest.mark.parametrize("name", ["held_out", "past"])
def test_a_file_that_cannot_be_read_is_named(options: DistilOptions, tmp_path: Path, name: str) -> None:
    def given(path: Path) -> DistilOptions:
        return replace(options, held_out=path) if name == "held_out" else replace(options, past=(path,))

    with pytest.raises(InvalidRequest, match=r"nowhere.jsonl cannot be read: No such file"):
        distil(given(tmp_path / "nowhere.jsonl"), TEXTS, quiet)
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    with pytest.raises(InvalidRequest, match=r"latin.jsonl is not UTF-8 at byte 12"):
        distil(given(tmp_path / "latin.jsonl"), TEXTS, quiet)


def test_a_held_out_prompt_may_hold_characters_that_other_programs_take_for_line_ends(
    tmp_path: Path, target: Path
) -> None:
    table = TokenTable.from_json((target / "tokenizer.json").read_text())
    prompt = "one\u2028two\x85three"
    held = tmp_path / "held.jsonl"
    held.write_text(json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_text(table, 299, TEXTS, (), held, window=32).prompts == [table.encode(prompt)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": -1}, "--seed -1 is not a whole number from 0"),
        ({"seed": 2**64}, "--seed 18446744073709551616 is not"),
        ({"rate": float("nan")}, "--rate nan is no learning rate"),
        ({"rate": -1.0}, "--rate -1.0 is no learning rate"),
        ({"out": Path(".")}, "--out '.' cannot hold the head"),
        ({"out": Path("..")}, "--out '..' cannot hold the head"),
        ({"out": Path(__file__)}, "is a file; name a folder"),
    ],
)
def test_a_number_or_a_folder_that_cannot_be_used_is_refused_by_name(
    options: DistilOptions, change: dict[str, object], said: str
) -> None:
    with pytest.raises(InvalidRequest, match=said):
        checked(replace(options, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize("flag", ["target", "drafter"])
def test_rows_that_a_model_cannot_read_whole_are_refused(
    options: DistilOptions, small: Path, tmp_path: Path, flag: str
) -> None:
    shutil.copytree(small, tmp_path / "short")
    config = json.loads((small / "config.json").read_text())
    (tmp_path / "short/config.json").write_text(json.dumps(config | {"max_position_embeddings": 31}))
    short = replace(options, **{flag: str(tmp_path / "short")})
    with pytest.raises(InvalidRequest, match=f"--window 32 is more than the 31 tokens that --{flag} "):
        distil(short, TEXTS, quiet)
    assert not options.out.exists()


def test_a_held_out_prompt_that_the_target_cannot_continue_is_refused(
    options: DistilOptions, tmp_path: Path, target: Path
) -> None:
    table = TokenTable.from_json((target / "tokenizer.json").read_text())
    held = tmp_path / "held.jsonl"
    for count, fits in ((256 - options.held_tokens, True), (257 - options.held_tokens, False)):
        prompt = "\x00" * count
        assert len(table.encode(prompt)) == count
        held.write_text(json.dumps({"prompt": prompt}) + "\n")
        if fits:
            assert distil(replace(options, held_out=held), TEXTS, quiet)["held_out_prompts"] == 1
            continue
        with pytest.raises(InvalidRequest, match=f"has {count} tokens.* it can read 256: shorten"):
            distil(replace(options, held_out=held, work=tmp_path / "other"), TEXTS, quiet)


def test_a_device_that_is_not_there_is_refused_before_anything_is_written(options: DistilOptions) -> None:
    with pytest.raises(InvalidRequest, match=r"cuda:99.*CUDA devices here"):
        distil(replace(options, device="cuda:99"), TEXTS, quiet)
    assert not options.work.exists()


def test_a_head_takes_the_place_of_a_head_and_of_an_empty_folder_but_of_no_other_files(
    options: DistilOptions,
) -> None:
    options.out.mkdir()
    assert checked(options).out == options.out
    shutil.copytree(ROOT / "models/heads/eagle", options.out, dirs_exist_ok=True)
    assert checked(options).out == options.out
    (options.out / "thesis.tex").write_text("years of work")
    with pytest.raises(InvalidRequest, match=r"holds 'thesis.tex', which this command did not write"):
        checked(options)


def test_a_head_does_not_take_the_place_of_a_model_that_somebody_else_made(
    options: DistilOptions, small: Path
) -> None:
    shutil.copytree(small, options.out)
    with pytest.raises(InvalidRequest, match="which this command did not write"):
        checked(options)


@pytest.mark.parametrize("flag", ["target", "drafter", "boost_of"])
@pytest.mark.parametrize(
    ("below", "relation"), [("models/one", "is"), ("models", "holds"), ("models/one/head", "lies in")]
)
def test_a_head_does_not_take_the_place_of_a_model_that_the_run_reads(
    options: DistilOptions, tmp_path: Path, flag: str, below: str, relation: str
) -> None:
    shutil.copytree(ROOT / "models/heads/eagle", tmp_path / "models/one")
    (tmp_path / "link").symlink_to(tmp_path / "models")
    given = {"kind": "lm", "drafter": options.target, flag: str(tmp_path / "models/one")}
    out = tmp_path / below.replace("models", "link")
    with pytest.raises(InvalidRequest, match=f"{relation} the folder of --{flag.replace('_', '-')} "):
        checked(replace(options, out=out, **given))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("work", "relation"),
    [("head", "is"), ("head/work", "holds"), ("../{}", "lies in"), ("link/work", "holds")],
)
def test_a_head_does_not_take_the_place_of_the_work_folder(
    options: DistilOptions, tmp_path: Path, work: str, relation: str
) -> None:
    (tmp_path / "link").symlink_to(options.out.name)
    work_folder = tmp_path / work.format(tmp_path.name)
    with pytest.raises(InvalidRequest, match=rf"{relation} the work folder .* \(--work\)"):
        distil(replace(options, work=work_folder), TEXTS, quiet)
    assert not options.out.exists()


def test_a_full_disk_is_said_of_the_work_folder_and_not_of_standard_output(
    capsys: pytest.CaptureFixture[str], target: Path, tmp_path: Path
) -> None:
    work = tmp_path / "head.work"
    work.mkdir()
    (work / "data.partial").symlink_to("/dev/full")
    done = distilled(capsys, target, tmp_path)
    assert done.status == 1
    assert done.said["error"]["message"].startswith(f"work folder {work}: No space left on device")
    assert "Traceback" not in done.err


def test_a_work_folder_that_is_a_file_and_an_out_that_is_this_folder_are_one_line_each(
    capsys: pytest.CaptureFixture[str], target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = distilled(capsys, target, tmp_path, "--work", tmp_path / "text.txt")
    assert (done.status, "Traceback" in done.err) == (1, False)
    assert done.said["error"]["message"].startswith(f"{tmp_path / 'text.txt'}: File exists")
    monkeypatch.chdir(tmp_path)
    done = ended(capsys, "distil", "text.txt", "--target", target, "--out", ".", "--json")
    assert (done.status, "Traceback" in done.err) == (1, False)
    assert "--out '.' cannot hold the head" in done.said["error"]["message"]


def test_a_head_takes_the_place_of_what_a_link_leads_to_again_and_again(tmp_path: Path) -> None:
    staged, folder, link = (tmp_path / name for name in ("staged", "eagle-7", "eagle"))
    folder.mkdir()
    link.symlink_to(folder.name)
    staged.mkdir()
    for weights in ("first", "second"):
        (staged / "config.json").write_text(weights)
        publish(staged, link)
        assert link.is_symlink()
        assert (folder / "config.json").read_text() == weights
    assert {path.name for path in tmp_path.iterdir()} == {"staged", "eagle-7", "eagle"}
