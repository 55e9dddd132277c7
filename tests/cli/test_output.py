from __future__ import annotations

import json

import pytest

from memshare.client.cli import output
from memshare.v1 import admin_pb2, common_pb2


def test_a_message_becomes_plain_json_values() -> None:
    message = admin_pb2.GetStatusResponse(
        pool=common_pb2.PoolDescriptor(pool_id=b"\x01\xff", pool_bytes=1 << 40),
        awaited_pids=[7, 8],
        state="serving",
    )
    document = json.loads(json.dumps(output.to_document(message)))
    assert document["pool"] == {
        "pool_id": "01ff",
        "pool_bytes": 1 << 40,
        "row_bytes": 0,
        "num_rows": 0,
    }
    assert document["awaited_pids"] == [7, 8]
    assert document["sessions"] == 0
    assert "rows" not in document


def test_enums_floats_and_packed_numbers_are_readable() -> None:
    policy = common_pb2.Policy(
        mode=common_pb2.SHARING_MODE_ROW,
        stages=[common_pb2.PolicyStage(min_age=64, key_threshold=0.1)],
    )
    document = output.to_document(policy)
    assert document["mode"] == "row"
    assert document["stages"][0]["key_threshold"] == 0.1
    request = admin_pb2.RequestInfo(shared_keys_by_layer=b"\x01\0\0\0\x02\0\0\0")
    assert output.to_document(request)["shared_keys_by_layer"] == [1, 2]


def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    output.fail("first\n  second")
    captured = capsys.readouterr()
    assert captured.err == "memshare: error: first second\n"
    assert not captured.out


def test_a_piped_table_keeps_its_rows_whole(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_table(("a", "b"), [("[x]", "y" * 150)])
    assert "[x]" in capsys.readouterr().out
