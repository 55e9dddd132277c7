import pytest

from memshare.wire.errors import InvalidArgument
from memshare.wire.names import MAX_NAME_BYTES, require_name


@pytest.mark.parametrize("text", ["", "vllm", "a model, 7 B", "Größe 模型", "x" * MAX_NAME_BYTES])
def test_what_can_be_shown_is_a_name(text: str) -> None:
    require_name("engine", text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("two\nlines", "must be printable"),
        ("\x1b[2J", "must be printable"),
        ("half \ud800", "must be printable"),
        ("é" * 129, "has 258 bytes, at most 256"),
    ],
)
def test_what_cannot_be_shown_or_kept_is_refused_by_its_field(text: str, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=f"engine .*{reason}") as error:
        require_name("engine", text)
    assert error.value.details == {"field": "engine"}
    # The refusal itself can be sent and shown.
    assert str(error.value).isprintable()
    str(error.value).encode()
