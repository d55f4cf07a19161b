"""An orchestrator whose port is taken says which port, which setting, and what to do."""

import socket

import pytest

from outrider.runtime.children import ServiceFailed, ServiceProcess


@pytest.mark.parametrize("setting", ["http_bind", "registry_bind"])
def test_a_taken_port_is_named_with_its_setting(setting: str) -> None:
    flag = f"--{setting.replace('_', '-')}"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        process = ServiceProcess.start(
            "orchestrator", "orchestrator", ["--verifier", "127.0.0.1:1", flag, address]
        )
        try:
            with pytest.raises(ServiceFailed) as caught:
                process.wait_ready(100.0)
        finally:
            process.stop(0.0)
    assert f"on {address}: another process uses port" in str(caught.value)
    assert f"give the orchestrator another {setting} ({flag} or" in str(caught.value)
