"""Certificates from files: unusable files are refused by name at the start, and logged later."""

from pathlib import Path

import pytest

from outrider.wire.tls import Certificates, Files
from speculative.errors import InvalidRequest
from tests.certificates import LONG_AGO, Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


def inside(paths: dict[str, Path], *, server: bool = True) -> Certificates:
    files = Files(paths["tls_cert"], paths["tls_key"], paths["tls_ca"], server=server, own_ca=True)
    return Certificates(files, every_s=0.0)


@pytest.mark.parametrize("server", [True, False])
def test_a_certificate_that_its_authority_signed_is_taken(authority: Authority, server: bool) -> None:
    paths = authority.role("verifier")
    pem = inside(paths, server=server).current()
    assert (pem.chain, pem.key, pem.ca) == tuple(path.read_bytes() for path in paths.values())


@pytest.mark.parametrize("which", ["tls_cert", "tls_key", "tls_ca"])
@pytest.mark.parametrize("contents", [b"", b"rubbish", b"\xff\xfe", None])
def test_an_unusable_file_is_named(authority: Authority, which: str, contents: bytes | None) -> None:
    paths = authority.role("verifier")
    if contents is None:
        paths[which].unlink()
    else:
        paths[which].write_bytes(contents)
    with pytest.raises(InvalidRequest, match=f"^{which}: '{paths[which]}' "):
        inside(paths)


def test_a_key_of_another_certificate_is_refused(authority: Authority) -> None:
    paths, other = authority.role("verifier"), authority.role("drafter")
    with pytest.raises(InvalidRequest, match=r"^tls_key: .* that belongs to tls_cert"):
        inside(paths | {"tls_key": other["tls_key"]})


@pytest.mark.parametrize("server", [True, False])
def test_a_certificate_that_has_run_out_is_refused(authority: Authority, server: bool) -> None:
    paths = authority.role("verifier", not_before=LONG_AGO, not_after=LONG_AGO.replace(year=2002))
    with pytest.raises(InvalidRequest, match=r"^tls_cert: .* not accepted by tls_ca: .* expired"):
        inside(paths, server=server)


def test_a_certificate_of_another_authority_is_refused(authority: Authority, tmp_path: Path) -> None:
    paths = authority.role("verifier") | {"tls_ca": Authority(tmp_path / "theirs").ca}
    with pytest.raises(InvalidRequest, match=r"tls_cert: .* unable to get local issuer"):
        inside(paths)


def test_a_key_with_a_passphrase_is_refused_without_asking_for_it(authority: Authority) -> None:
    from cryptography.hazmat.primitives import serialization

    paths = authority.role("verifier")
    key = serialization.load_pem_private_key(paths["tls_key"].read_bytes(), password=None)
    paths["tls_key"].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(InvalidRequest, match="encrypted"):
        inside(paths)


def test_a_text_that_is_not_ascii_holds_no_certificate(tmp_path: Path) -> None:
    (tmp_path / "ca").write_text("größer")
    with pytest.raises(InvalidRequest, match="has no certificate in PEM"):
        Certificates(Files(ca=tmp_path / "ca"))


def test_a_front_certificate_is_checked_without_its_authority(authority: Authority) -> None:
    cert, key = authority.issue("front", ["a.example"])
    assert Certificates(Files(cert, key)).current().ca == b""
    cert, key = authority.issue(
        "old", ["a.example"], not_before=LONG_AGO, not_after=LONG_AGO.replace(year=2002)
    )
    with pytest.raises(InvalidRequest, match="has expired"):
        Certificates(Files(cert, key))


def test_new_files_are_taken_and_rubbish_is_not(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    paths = authority.role("verifier")
    certificates = inside(paths)
    first = certificates.current()
    assert certificates.current() is first
    authority.role("verifier")
    second = certificates.current()
    assert second.chain == paths["tls_cert"].read_bytes() != first.chain
    paths["tls_key"].write_bytes(b"rubbish")
    assert certificates.current() is second
    assert "what was read before goes on" in caplog.text


def test_a_key_is_in_no_repr(authority: Authority) -> None:
    paths = authority.role("verifier")
    certificates = inside(paths)
    shown = f"{certificates!r} {certificates.current()!r} {vars(certificates)!r}"
    assert paths["tls_key"].read_text().splitlines()[1] not in shown
    assert "PRIVATE" not in shown
