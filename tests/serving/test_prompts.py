"""Where prompts come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from memshare.client.serving.prompts import LOOPING_PROMPTS, read_prompts, take_prompts
from memshare.wire.errors import InvalidArgument


def test_the_looping_ones_differ_from_one_another() -> None:
    assert len(set(LOOPING_PROMPTS)) == len(LOOPING_PROMPTS) >= 32
    assert take_prompts(None, 5) == LOOPING_PROMPTS[:5]


def test_a_file_may_name_them_in_any_known_field(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"question": "q", "id": 1}\n\n{"problem": "p", "trace": "t"}\n{"prompt":"x"}')
    assert read_prompts(path) == ("q", "p", "x")
    assert take_prompts(path, 2) == ("q", "p")


@pytest.mark.parametrize("line", ['{"text": "x"}', "[1]", "no json", '{"prompt": 7}'])
def test_a_wrong_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "x"}}\n{line}\n')
    with pytest.raises(InvalidArgument, match=r"prompts\.jsonl:2: .*problem, question or prompt"):
        read_prompts(path)


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "x"}\n{"prompt": "\xff"}\n')
    with pytest.raises(InvalidArgument, match=r"prompts\.jsonl:2: "):
        read_prompts(path)


def test_one_that_comes_twice_is_asked_once(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "x"}\n{"prompt": "y"}\n{"prompt": "x"}\n')
    assert read_prompts(path) == ("x", "y")


def test_too_few_are_refused_rather_than_asked_twice(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "x"}')
    with pytest.raises(InvalidArgument, match=r"2 requests need as many prompts: 1 in .*\.jsonl"):
        take_prompts(path, 2)
    with pytest.raises(InvalidArgument, match="are built in; name a file of more with --prompts"):
        take_prompts(None, 1000)
