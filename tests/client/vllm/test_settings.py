import json

import pytest

from memshare.client.vllm import Settings, engine_arguments, serve_flags
from memshare.client.vllm.versions import require_supported
from memshare.wire.errors import InvalidArgument, VersionMismatch


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"polciy": "exact"}, "'polciy' is unknown.*policy"),
        ({"lease_blocks": "12"}, "lease_blocks is '12', must be of type int"),
        ({"lease_blocks": True}, "must be of type int"),
        ({"lease_blocks": -1}, "lease_blocks is -1, must be 0"),
        ({"lease_blocks": 1 << 31}, "lease_blocks is 2147483648, must be 0 to 2147483647"),
        ({"engine": "a\x1b[2Jb"}, "engine is .* must be printable"),
        ({"tenant": "half \ud800"}, "tenant is .* must be printable"),
        ({"policy": ["exact"]}, "must be of type str"),
        ({"step_similarity": float("nan")}, "step_similarity is nan"),
        ({"test_share_every": 1}, "use 2 or more"),
    ],
)
def test_a_wrong_setting_is_refused_by_its_name(config, text):
    with pytest.raises(InvalidArgument, match=text):
        Settings.from_extra_config(config)


def test_settings_survive_the_way_through_vllms_configuration():
    settings = Settings(policy="block", lease_blocks=7, step_similarity=1)
    assert Settings.from_extra_config(settings.to_extra_config()) == settings
    assert Settings.from_extra_config({}) == Settings()


def test_flags_and_arguments_say_the_same():
    arguments = engine_arguments(policy="block", tenant="t")
    flags = dict(
        flag.removeprefix("--").split("=", 1)
        for flag in serve_flags(Settings(policy="block", tenant="t"))
    )
    assert json.loads(flags["kv-transfer-config"]) == arguments["kv_transfer_config"]
    assert flags["worker-cls"] == arguments["worker_cls"]
    assert flags["scheduler-cls"] == arguments["scheduler_cls"]


def test_only_known_versions_of_vllm_are_served():
    require_supported("0.32.0+cpu")
    require_supported("0.31.1")
    for version in ("0.33.0", "0.3.2", "1.32.0"):
        with pytest.raises(VersionMismatch, match=r"0\.31 or 0\.32"):
            require_supported(version)
