"""Downloads over real HTTP: what is fetched, what a broken or silent hub costs, and what the errors say."""

import threading
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download

from benchmarks.shared.local_hub import LocalHub
from outrider.hub.cached import all_cached, cached
from outrider.hub.download import download
from outrider.hub.listing import HubModel, look_up
from speculative.errors import (
    InvalidRequest,
    OutriderError,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from tests.hub.conftest import WEIGHTS

FIRST, SECOND = WEIGHTS


class View:
    """Keeps what a person would see."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.counts: list[int] = []
        self.stalls: list[float] = []
        self.ends = 0

    def began(self, model: str, size: int) -> None:
        self.sizes.append(size)

    def arrived(self, count: int) -> None:
        self.counts.append(count)

    def stalled(self, seconds: float) -> None:
        self.stalls.append(seconds)

    def ended(self) -> None:
        self.ends += 1


def fetch(text: str = "org/tiny", view: View | None = None) -> Path:
    model = look_up(text)
    return download(model, [*model.small_files, *model.weights], view or View())


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_download_has_the_files_that_a_service_loads_and_the_cache_is_the_library_s(
    hub: LocalHub, model: Path
) -> None:
    view = View()
    folder = fetch(view=view)
    wanted = {"config.json", "tokenizer.json", "model.safetensors.index.json", *WEIGHTS}
    assert content_of(folder) == {name: (model / name).read_bytes() for name in wanted}
    assert view.sizes == [sum((model / name).stat().st_size for name in wanted)]
    assert view.counts[-1] == view.sizes[0]
    assert view.ends == 1
    assert snapshot_download("org/tiny", local_files_only=True) == str(folder)
    assert (found := cached("org/tiny")) is not None
    assert (found.name, found.folder, found.size) == ("org/tiny", folder, 120_000)
    assert list(all_cached()) == [found]


def test_a_second_download_asks_for_no_file_again(hub: LocalHub) -> None:
    fetch()
    sent, view = dict(hub.sent), View()
    fetch(view=view)
    assert {**hub.sent, "": 0} == {**sent, "": 0}
    assert view.sizes == [], "there was nothing to show"


def test_a_revision_may_be_named_and_a_commit_needs_no_name(hub: LocalHub, cache: Path) -> None:
    commit = hub.models["org/tiny"].commit
    assert fetch(f"org/tiny@{commit}") == cache / "models--org--tiny" / "snapshots" / commit
    assert cached("org/tiny") is None
    assert cached(f"org/tiny@{commit}") is not None
    assert fetch("org/tiny@main").name == commit
    assert cached("org/tiny@main") is not None


def test_a_connection_that_breaks_goes_on_at_the_next_byte(hub: LocalHub) -> None:
    hub.wrong.cut_after = {FIRST: [8_192, 16_384], SECOND: [0, 0, 100]}
    view = View()
    folder = fetch(view=view)
    assert content_of(folder).items() >= WEIGHTS.items()
    assert hub.sent[FIRST] == len(WEIGHTS[FIRST]), "no byte was sent twice"
    assert view.counts[-1] == view.sizes[0]


def test_a_download_that_was_given_up_is_resumed_by_the_next_one(hub: LocalHub) -> None:
    hub.wrong.silent_after = {FIRST: 24_576}
    with pytest.raises(Unavailable, match=r"24,576 of 60,000 bytes are kept: the same command resumes there"):
        fetch()
    assert cached("org/tiny") is None
    hub.wrong.silent_after = {}
    before, view = hub.sent[FIRST], View()
    folder = fetch(view=view)
    assert content_of(folder).items() >= WEIGHTS.items()
    assert hub.sent[FIRST] - before == 60_000 - 24_576
    assert view.counts[-1] == view.sizes[0], "kept bytes count as there"


def test_a_stall_is_told_while_it_lasts(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.hub.download.STALL_S", 0.15)
    hub.wrong.silent_after = {FIRST: 100}
    view = View()
    with pytest.raises(Unavailable, match="no byte of model-00001-of-00002"):
        fetch(view=view)
    assert len(view.stalls) >= 2
    assert view.stalls == sorted(view.stalls)
    assert view.ends == 1


def test_a_whole_file_with_other_bytes_is_thrown_away(hub: LocalHub) -> None:
    hub.wrong.other_bytes = {SECOND}
    with pytest.raises(Unavailable, match=f"{SECOND} is not the file that the hub announced"):
        fetch()
    hub.wrong.other_bytes = set()
    assert content_of(fetch()).items() >= WEIGHTS.items()


def test_a_file_that_does_not_end_fills_no_disk(hub: LocalHub, cache: Path) -> None:
    hub.wrong.endless = {SECOND}
    view = View()
    with pytest.raises(Unavailable, match=f"more than the 60,000 bytes that it announced for {SECOND}"):
        fetch(view=view)
    assert max(view.counts) <= view.sizes[0]
    assert all(file.stat().st_size <= 60_000 for file in cache.rglob("*") if file.is_file())


@pytest.mark.parametrize("digest", ["", "../../../../secret", "/etc/passwd"])
def test_what_a_hub_lists_names_no_file_outside_the_cache(hub: LocalHub, cache: Path, digest: str) -> None:
    (cache.parent / "secret").write_text("{}")
    info = hub.models["org/tiny"].info
    config = next(one for one in info["siblings"] if one["rfilename"] == "config.json")
    config["blobId"] = digest
    with pytest.raises(Unavailable, match=r"the digest of 'config\.json' is"):
        fetch()
    assert not cache.exists()
    config["blobId"] = "0" * 40
    info["sha"] = "../" + "0" * 37
    with pytest.raises(Unavailable, match="its commit is"):
        fetch()


def test_two_downloads_at_once_send_each_file_once(hub: LocalHub) -> None:
    model = look_up("org/tiny")
    files = [*model.small_files, *model.weights]
    both = [threading.Thread(target=download, args=(model, files, View())) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert hub.sent[FIRST] == 60_000
    assert cached("org/tiny") is not None


def test_a_wrong_token_is_named_with_what_to_do(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "hf_right"
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(Unauthenticated, match=r"refused the token .*set HF_TOKEN to a valid token") as raised:
        look_up("org/tiny")
    assert "hf_wrong" not in str(raised.value)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert content_of(fetch()).items() >= WEIGHTS.items()


def test_a_private_model_asks_for_a_token(hub: LocalHub) -> None:
    hub.token = "hf_right"
    with pytest.raises(InvalidRequest, match=r"no model 'org/tiny' at http.*or it is private.*set HF_TOKEN"):
        look_up("org/tiny")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("org/other", "there is no model 'org/other'"),
        ("org/tiny@v9", "has no such revision"),
        ("org/..", "is not a model id: give ORG/NAME"),
    ],
)
def test_a_name_that_the_hub_lacks_is_said(hub: LocalHub, text: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        look_up(text)


def test_a_gated_model_names_the_page_where_its_terms_are(hub: LocalHub) -> None:
    hub.gated = frozenset({"org/tiny"})
    with pytest.raises(PermissionDenied, match=f"gated: accept its terms at {hub.url}/org/tiny"):
        fetch()


def test_a_web_page_in_place_of_an_answer_or_a_file_is_recognised(hub: LocalHub) -> None:
    hub.wrong.web_page_for = {FIRST}
    with pytest.raises(Unavailable, match=f"answered with a web page in place of {FIRST}"):
        fetch()
    hub.wrong.web_page = True
    with pytest.raises(Unavailable, match="web page in place of an answer about the model: a login page"):
        look_up("org/tiny")


def test_a_hub_that_is_out_of_order_or_not_there_is_said(
    hub: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.wrong.status = 503
    with pytest.raises(Unavailable, match=r"answered 503 .*try again later"):
        look_up("org/tiny")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(Unavailable, match=r"cannot be reached .*check the network, proxies and HF_ENDPOINT"):
        look_up("org/tiny")


def test_a_full_disk_is_found_before_a_byte_is_sent(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        free = 1_000

    monkeypatch.setattr("shutil.disk_usage", lambda path: Full)
    with pytest.raises(Unavailable, match=r"needs 0\.0 GB more, .*: make room, or set HF_HOME"):
        fetch()
    assert not hub.sent[FIRST]


def test_a_cache_that_cannot_be_written_is_named(hub: LocalHub, cache: Path) -> None:
    cache.write_text("a file in place of the folder")
    with pytest.raises(OutriderError, match="cannot be written to"):
        fetch()


def test_weights_come_in_one_form_alone(hub: LocalHub) -> None:
    model = look_up("org/tiny")
    assert {file.path for file in model.weights} == set(WEIGHTS)
    older = HubModel(
        "a/b", "a/b", "main", "c", tuple(f for f in model.files if "model-" not in f.path), Path()
    )
    assert [file.path for file in older.weights] == ["pytorch_model.bin"]
