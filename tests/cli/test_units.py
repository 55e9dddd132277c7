from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memshare.client.cli.units import (
    format_bytes,
    format_duration,
    format_percent,
    parse_bytes,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1048576", 1 << 20),
        ("2GiB", 2 << 30),
        ("2g", 2 << 30),
        ("512 MiB", 512 << 20),
        ("1.5KB", 1536),
        ("64B", 64),
    ],
)
def test_sizes_are_read(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "lots", "-1GiB", "2 GiB RAM", "1e9", "0x10"])
def test_what_is_no_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size") as refusal:
        parse_bytes(text)
    assert repr(text) in str(refusal.value)


@given(st.integers(min_value=0, max_value=1 << 50))
def test_a_written_size_reads_back_to_within_its_rounding(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.06, abs=1)


def test_shares_and_durations() -> None:
    assert format_percent(1, 8) == "12.5 %"
    assert format_percent(0, 0) == "-"
    assert format_duration(0.25) == "0.2s"
    assert format_duration(61) == "1m 1s"
    assert format_duration(93784) == "1d 2h 3m"
