"""What is kept between starts lies in the user's cache folder, or where the setting says."""

from pathlib import Path

import pytest

from outrider.runtime.cache_folder import cache_folder, default_cache_dir
from outrider.runtime.settings import read_settings
from verifier_service.settings import VerifierSettings


def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/cache")
    assert cache_folder() == Path("/some/cache/outrider")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == Path.home() / ".cache" / "outrider"


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert default_cache_dir() is None


@pytest.mark.parametrize(("given", "folder"), [("none", None), ("/tmp/kept", Path("/tmp/kept"))])
def test_the_setting_moves_the_cache_or_switches_it_off(given: str, folder: Path | None) -> None:
    settings = read_settings(VerifierSettings, ["--model", "x", "--cache-dir", given], {})
    assert settings.cache_dir == folder
