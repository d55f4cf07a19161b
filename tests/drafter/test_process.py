"""A drafter as its own process: it says where it is, drafts, and says why it cannot."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import grpc

from outrider.v1 import common_pb2, draft_source_pb2, draft_source_pb2_grpc

ROOT = Path(__file__).parents[2]


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "drafter_service", "--threads", "1", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_process_drafts_and_stops_when_told_to(tiny_llama: Path) -> None:
    process = start("--model", str(tiny_llama))
    try:
        assert process.stdout is not None
        printed = json.loads(process.stdout.readline())
        assert printed["role"] == "drafter"
        with grpc.insecure_channel(printed["address"]) as channel:
            stub = draft_source_pb2_grpc.DraftSourceStub(channel)
            described = stub.Describe(draft_source_pb2.SourceDescribeRequest(), timeout=100)
            assert described.vocabulary_size == 96
            follow = draft_source_pb2.Follow(
                alias=1,
                key=common_pb2.SessionKey(session="s"),
                tokenizer_digest=described.tokenizer_digest,
                ids=[5, 6, 7],
                prompt_length=3,
                limit=50,
                node_limit=20,
                vocabulary_size=96,
            )
            call = stub.Attach(iter([draft_source_pb2.AttachRequest(follow=[follow])]), timeout=100)
            described_again = stub.Describe(draft_source_pb2.SourceDescribeRequest(), timeout=100)
            assert described_again == described
            call.cancel()
        process.send_signal(signal.SIGTERM)
        assert process.wait(100) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_model_that_is_refused_is_named_and_the_exit_status_is_1(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    process = start("--model", str(tmp_path))
    out, err = process.communicate(timeout=200)
    assert process.returncode == 1
    assert "t5 is not served" in json.loads(out)["error"]["message"]
    assert "t5 is not served" in err
