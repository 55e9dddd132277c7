"""Transformers on memshare's memory, against Transformers' own cache: bit for bit."""

from __future__ import annotations

import inspect
import logging
import math
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    DynamicCache,
    LlamaConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MistralConfig,
    MptConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from memshare.client.tables import KEY, VALUE  # noqa: E402
from memshare.client.transformers import MemShareCache, describe_model  # noqa: E402
from memshare.v1 import common_pb2  # noqa: E402
from memshare.wire.errors import InvalidArgument, PoolLost  # noqa: E402
from tests.client.harness import counts, wait_for  # noqa: E402

# `cache` is the new name of `past_key_values`, which some releases warn of.
CACHE = next(
    name
    for name in ("cache", "past_key_values")
    if name in inspect.signature(transformers.LlamaForCausalLM.forward).parameters
)
SIZES = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # Large weights, so that attention is far from uniform.
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": lambda **more: LlamaConfig(**SIZES | {"head_dim": 16} | more),
    "qwen2": lambda **more: Qwen2Config(**SIZES | more),
    "qwen3": lambda **more: Qwen3Config(**SIZES | {"head_dim": 32} | more),
    "mistral": lambda **more: MistralConfig(
        **SIZES | {"sliding_window": None, "num_hidden_layers": 3} | more
    ),
}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    },
}
ATTENTIONS = [("memshare", "sdpa"), ("memshare_eager", "eager"), (None, "sdpa"), (None, "eager")]

# Looks at everything and may share nothing.
HARMLESS = common_pb2.Policy(
    name="harmless",
    mode=common_pb2.SHARING_MODE_ROW,
    stages=[common_pb2.PolicyStage(min_age=4, key_threshold=0.5, value_threshold=0.5)],
    protected_tokens=1 << 20,
    fidelity_budget=1.0,
)
GREEDY_SHARING = common_pb2.Policy(
    name="greedy",
    mode=common_pb2.SHARING_MODE_ROW,
    stages=[common_pb2.PolicyStage(min_age=4, key_threshold=0.05, value_threshold=0.05)],
    protected_tokens=2,
    fidelity_budget=1.0,
)


def build(config, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def tokens(batch, length, seed=0):
    return torch.randint(3, 100, (batch, length), generator=torch.Generator().manual_seed(seed))


def padded():
    """A batch of three prompts of different lengths, padded on the left."""
    ids = tokens(3, 21)
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 9, 4)):
        ids[row, :padding], mask[row, :padding] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def whole(ids):
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def generate(model, inputs, cache, new=20, **more):
    torch.manual_seed(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.generate(
            **inputs,
            **{CACHE: cache},
            max_new_tokens=new,
            return_dict_in_generate=True,
            output_logits=True,
            **{"do_sample": False} | more,
        )


def plain(model, attention, inputs, **more):
    model.set_attn_implementation(attention)
    return generate(model, inputs, DynamicCache(config=model.config), **more)


def assert_identical(ours, theirs):
    assert torch.equal(ours.sequences, theirs.sequences)
    assert len(ours.logits) == len(theirs.logits)
    for step, (one, other) in enumerate(zip(ours.logits, theirs.logits, strict=True)):
        assert torch.equal(one, other), f"logits of step {step} differ"


def shared_entries(cache):
    return sum(int(tables.shared_entries.sum()) for tables in cache.batch.tables)


def share_all(cache):
    """Let the sidecar share until it finds no more; the number of shared entries."""
    cache.finish_step()
    before = -1
    while (shared := shared_entries(cache)) > before:
        before = shared
        assert cache.session.synchronise()
    return shared


@pytest.fixture(autouse=True)
def _all_rows_come_back(request):
    """Whatever a test did, its rows are free again after it."""
    yield
    if "sidecar" in request.fixturenames:
        running = request.getfixturevalue("sidecar")
        wait_for(lambda: counts(running).free == counts(running).total, "all rows")


@pytest.fixture(scope="module")
def models():
    """Each family's model, made once."""
    return {name: build(config()) for name, config in FAMILIES.items()}


# ---- nothing shared: nothing changed ----------------------------------------------------------


SCENES = {
    "greedy": (whole(tokens(1, 30)), {}),
    "sampling": (whole(tokens(2, 25)), {"do_sample": True, "temperature": 1.5, "top_k": 20}),
    "padded": (padded(), {}),
}


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize(("attention", "reference"), ATTENTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_generation_is_bit_identical_while_nothing_is_shared(
    sidecar, models, family, attention, reference, scene
):
    model = models[family]
    inputs, options = SCENES[scene]
    theirs = plain(model, reference, inputs, **options)
    with MemShareCache(
        model, policy=HARMLESS, runtime_dir=sidecar.runtime.path, attention=attention
    ) as cache:
        ours = generate(model, inputs, cache, **options)
        assert share_all(cache) == 0
        assert cache.session.mode_reason == ""
        assert cache.session.statistics.sealed_tokens > 0
        assert cache.session.statistics.rejected == 0
    assert_identical(ours, theirs)


@pytest.mark.parametrize("attention", ["memshare", "memshare_eager"])
def test_observing_changes_nothing(sidecar, models, attention):
    model = models["llama"]
    inputs = whole(tokens(1, 12).repeat(1, 8))
    theirs = plain(model, {"memshare": "sdpa"}.get(attention, "eager"), inputs, new=40)
    observe = common_pb2.Policy()
    observe.CopyFrom(GREEDY_SHARING)
    observe.mode = common_pb2.SHARING_MODE_OBSERVE
    with MemShareCache(
        model, policy=observe, runtime_dir=sidecar.runtime.path, attention=attention
    ) as cache:
        ours = generate(model, inputs, cache, new=40)
        assert share_all(cache) == 0
        with sidecar.admin() as admin:
            (engine,) = admin.engines()
        assert engine.counters.shareable_keys > 0
    assert_identical(ours, theirs)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("attention", ["memshare", "memshare_eager"])
def test_every_fixed_rope_type_is_bit_identical_and_may_share(sidecar, rope, attention):
    model = build(FAMILIES["llama"](rope_parameters=ROPES[rope]))
    theirs = plain(model, {"memshare": "sdpa"}.get(attention, "eager"), padded())
    with MemShareCache(
        model, policy=HARMLESS, runtime_dir=sidecar.runtime.path, attention=attention
    ) as cache:
        ours = generate(model, padded(), cache)
        assert cache.session.mode_reason == ""
        assert cache.session.policy.mode == common_pb2.SHARING_MODE_ROW
    assert_identical(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("attention", "reference"), ATTENTIONS)
def test_half_precision_is_bit_identical(sidecar, dtype, attention, reference):
    model = build(FAMILIES["qwen3"](), dtype)
    theirs = plain(model, reference, padded())
    with MemShareCache(
        model, policy=HARMLESS, runtime_dir=sidecar.runtime.path, attention=attention
    ) as cache:
        ours = generate(model, padded(), cache)
    assert_identical(ours, theirs)


def test_the_attention_functions_are_plain_ones_without_a_memshare_cache(models):
    model = models["llama"]
    inputs = whole(tokens(1, 20))
    for ours, theirs in (("memshare", "sdpa"), ("memshare_eager", "eager")):
        assert_identical(plain(model, ours, inputs), plain(model, theirs, inputs))


def test_the_padding_in_front_of_a_prompt_is_known(sidecar, models):
    for attention in ("memshare", "memshare_eager"):
        with MemShareCache(
            models["llama"], runtime_dir=sidecar.runtime.path, attention=attention
        ) as cache:
            generate(models["llama"], padded(), cache, new=2)
            assert [tables.first_token for tables in cache.batch.tables] == [0, 9, 4]


def test_a_prompt_in_chunks_is_bit_identical(sidecar, models):
    model = models["llama"]
    ids = tokens(1, 50)
    model.set_attn_implementation("sdpa")

    def logits(cache):
        chunks = [ids[:, :17], ids[:, 17:18], ids[:, 18:50]]
        with torch.no_grad():
            return [model(input_ids=chunk, **{CACHE: cache}).logits for chunk in chunks]

    theirs = logits(DynamicCache(config=model.config))
    with MemShareCache(model, policy=HARMLESS, runtime_dir=sidecar.runtime.path) as cache:
        ours = logits(cache)
        assert cache.get_seq_length() == 50
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


# ---- sharing ----------------------------------------------------------------------------------


def divergence(reference, logits):
    """Kullback-Leibler divergence in nats, the worst of a batch."""
    log_p, log_q = reference.log_softmax(-1), logits.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).max()


def turned(rows, deltas, inv_freq, heads, dim):
    """Rows `[n, heads * dim]` turned by deltas `[n]`, in float64."""
    x = rows.astype(np.float64).reshape(len(rows), heads, 2, dim // 2)
    angle = deltas[:, None, None] * np.array(inv_freq, np.float64)
    cos, sin = np.cos(angle), np.sin(angle)
    first, second = x[:, :, 0], x[:, :, 1]
    both = np.stack((first * cos - second * sin, second * cos + first * sin), axis=2)
    return both.reshape(len(rows), heads, dim)


@pytest.mark.parametrize("rope", ROPES)
def test_shared_keys_are_read_as_their_donors_turned_into_place(sidecar, rope):
    model = build(FAMILIES["llama"](rope_parameters=ROPES[rope]))
    ids = tokens(2, 20).repeat(1, 8)
    theirs = plain(model, "sdpa", whole(ids), new=40)
    with MemShareCache(model, policy=GREEDY_SHARING, runtime_dir=sidecar.runtime.path) as cache:
        generate(model, whole(ids), cache, new=1)
        assert share_all(cache) > 0
        layout = cache.session.layout
        pool = cache.session.pool.rows(np.float32)[:, : layout.key_width]
        for layer in range(layout.num_layers):
            read = cache.batch.gather(layer, KEY).numpy().copy()
            for tables, states in zip(cache.batch.tables, read, strict=True):
                deltas = tables.deltas[layer, : tables.length]
                stored = pool[tables.rows[KEY, layer, : tables.length]]
                shared = tables.shared[KEY, layer, : tables.length]
                assert (deltas[shared] > 0).all()
                assert not deltas[~shared].any()
                expected = turned(stored, deltas, layout.inv_freq, 2, 16).swapaxes(0, 1)
                np.testing.assert_allclose(
                    states, expected, rtol=0, atol=2e-6 * abs(expected).max()
                )
                own = stored.reshape(-1, 2, 16).swapaxes(0, 1)[:, ~shared]
                assert np.array_equal(states[:, ~shared], own)
            assert cache.batch.tables[0].shared_entries[KEY, 0] > 0
        # The whole prompt again from the shared rows: close to what it would have been.
        cache.crop(-1)
        with torch.no_grad():
            last = model(input_ids=ids[:, -1:], **{CACHE: cache}).logits[:, -1]
    assert float(divergence(theirs.logits[0], last)) < 0.01


def test_generation_goes_on_over_shared_rows_and_the_saved_ones_come_back(sidecar, models):
    model = models["llama"]
    ids = tokens(1, 20).repeat(1, 8)
    theirs = plain(model, "sdpa", whole(ids), new=60)
    with MemShareCache(model, policy=GREEDY_SHARING, runtime_dir=sidecar.runtime.path) as cache:
        ours = generate(model, whole(ids), cache, new=60)
        shared = share_all(cache)
        (tables,) = cache.batch.tables
        entries = 2 * 2 * tables.sealed
        assert shared > 0.3 * entries
        rows = counts(sidecar)
        assert rows.live == entries - shared
        assert rows.quarantined == 0
    # Where the sampled texts still agree, so do the logits.
    for step in range(60):
        assert float(divergence(theirs.logits[step], ours.logits[step])) < 0.05
        if not torch.equal(ours.sequences[:, : 161 + step], theirs.sequences[:, : 161 + step]):
            break


def test_attention_that_does_not_know_rows_reads_shared_ones_all_the_same(sidecar, models):
    model = models["llama"]
    ids = tokens(1, 20).repeat(1, 6)

    def after_sharing(attention):
        model.set_attn_implementation("sdpa")
        with (
            MemShareCache(
                model,
                policy=GREEDY_SHARING,
                runtime_dir=sidecar.runtime.path,
                attention=attention,
            ) as cache,
            torch.no_grad(),
        ):
            model(input_ids=ids, **{CACHE: cache})
            shared = share_all(cache)
            logits = model(input_ids=ids[:, :1], **{CACHE: cache}).logits
        return shared, logits

    ours, dense = after_sharing("memshare"), after_sharing(None)
    assert ours[0] == dense[0] > 0
    assert torch.equal(ours[1], dense[1])


def test_equal_prompts_share_within_a_tenant_and_stay_bit_identical(sidecar, models):
    model = models["qwen2"]
    inputs = whole(tokens(1, 48))
    theirs = plain(model, "sdpa", inputs)
    runtime = sidecar.runtime.path
    with (
        MemShareCache.attach(model, policy="exact", runtime_dir=runtime, tenant="a") as mine,
        MemShareCache.attach(model, policy="exact", runtime_dir=runtime, tenant="b") as foreign,
        MemShareCache(model, mine) as first,
        MemShareCache(model, mine) as second,
        MemShareCache(model, foreign) as other,
    ):
        assert_identical(generate(model, inputs, first), theirs)
        alone = share_all(first)
        generate(model, inputs, second, new=1)
        generate(model, inputs, other, new=1)
        assert share_all(second) >= 48 * 2 * 2
        assert share_all(other) <= alone
        # Decoding from another request's rows gives the same bits.
        second.reset()
        ours = generate(model, inputs, second)
        share_all(second)
        assert_identical(ours, theirs)
        foreign_rows = other.batch.tables[0].rows[:, :, :48]
        own_rows = first.batch.tables[0].rows[:, :, :48]
        assert not np.intersect1d(foreign_rows, own_rows).size


def test_exact_sharing_inside_a_request_is_bit_identical(sidecar, models):
    model = models["llama"]
    inputs = whole(tokens(1, 10).repeat(1, 6))
    theirs = plain(model, "sdpa", inputs, new=40)
    with MemShareCache(model, policy="exact", runtime_dir=sidecar.runtime.path) as cache:
        ours = generate(model, inputs, cache, new=40)
        assert share_all(cache) > 0  # the first layer's values of equal tokens
    assert_identical(ours, theirs)


# ---- rollbacks, resets, refusals --------------------------------------------------------------


@pytest.mark.parametrize("removed", [1, 5, 17, 40])
def test_a_rollback_forgets_the_newest_tokens_exactly(sidecar, models, removed):
    model = models["llama"]
    ids = tokens(1, 40)
    model.set_attn_implementation("sdpa")

    def logits(cache):
        with torch.no_grad():
            model(input_ids=ids, **{CACHE: cache})
            cache.crop(-removed)
            assert cache.get_seq_length() == 40 - removed
            return model(input_ids=ids[:, :7] + 1, **{CACHE: cache}).logits

    theirs = logits(DynamicCache(config=model.config))
    with MemShareCache(model, policy=HARMLESS, runtime_dir=sidecar.runtime.path) as cache:
        assert torch.equal(logits(cache), theirs)
        assert cache.get_seq_length() == 47 - removed
        assert cache.session.synchronise()
        assert cache.session.statistics.rejected == 0


def test_a_rollback_of_nothing_or_too_much(sidecar, models):
    with MemShareCache(models["llama"], runtime_dir=sidecar.runtime.path) as cache:
        generate(models["llama"], whole(tokens(1, 10)), cache, new=2)
        cache.crop(0)
        assert cache.get_seq_length() == 11
        for wrong in (1, -12):
            with pytest.raises(InvalidArgument, match="the cache holds 11 tokens"):
                cache.crop(wrong)


@pytest.mark.parametrize("assistance", ["assistant", "lookup"])
def test_assisted_generation_is_bit_identical(sidecar, models, assistance):
    model = models["llama"]
    assistant = build(FAMILIES["llama"](num_hidden_layers=1), seed=1)
    options = (
        {"assistant_model": assistant}
        if assistance == "assistant"
        else {"prompt_lookup_num_tokens": 4}
    )
    inputs = whole(tokens(1, 12).repeat(1, 3))
    theirs = plain(model, "sdpa", inputs, **options)
    with MemShareCache(model, policy=HARMLESS, runtime_dir=sidecar.runtime.path) as cache:
        ours = generate(model, inputs, cache, **options)
        assert cache.batch.tables[0].generation > 1
        share_all(cache)
        assert cache.session.statistics.rejected == 0
    assert_identical(ours, theirs)


def test_a_cache_that_was_reset_serves_another_batch(sidecar, models):
    model = models["llama"]
    theirs = plain(model, "sdpa", padded())
    with MemShareCache(model, policy=HARMLESS, runtime_dir=sidecar.runtime.path) as cache:
        generate(model, whole(tokens(1, 30)), cache)
        cache.reset()
        assert cache.get_seq_length() == 0
        ours = generate(model, padded(), cache)
        assert len(cache.batch.tables) == 3
    assert_identical(ours, theirs)


def test_another_batch_size_is_refused(sidecar, models):
    model = models["llama"]
    with MemShareCache(model, runtime_dir=sidecar.runtime.path) as cache, torch.no_grad():
        model(input_ids=tokens(1, 5), **{CACHE: cache})
        with pytest.raises(InvalidArgument, match="1 sequences, the step has 2: make a new"):
            model(input_ids=tokens(2, 1), **{CACHE: cache})


def test_beam_search_is_refused_readably(sidecar, models):
    refused = pytest.raises(NotImplementedError, match="not support beam search: use greedy")
    with MemShareCache(models["llama"], runtime_dir=sidecar.runtime.path) as cache, refused:
        generate(models["llama"], whole(tokens(1, 8)), cache, num_beams=2)


def test_a_session_of_another_model_is_refused(sidecar, models):
    with MemShareCache.attach(models["llama"], runtime_dir=sidecar.runtime.path) as session:
        with pytest.raises(InvalidArgument, match="attached for another model"):
            MemShareCache(models["mistral"], session)
        with pytest.raises(InvalidArgument, match="belong to the session"):
            MemShareCache(models["llama"], session, policy="exact")
        with pytest.raises(InvalidArgument, match="attention 'flash' is unknown"):
            MemShareCache(models["llama"], session, attention="flash")


def test_a_model_in_an_element_type_of_no_row_is_refused():
    with pytest.raises(InvalidArgument, match="load it as float32, float16 or bfloat16"):
        describe_model(build(FAMILIES["llama"](), torch.float64))


def test_attention_that_was_set_back_is_told_instead_of_reading_a_part(sidecar, models):
    model = models["llama"]
    with MemShareCache(model, runtime_dir=sidecar.runtime.path) as cache:
        model.set_attn_implementation("sdpa")
        with torch.no_grad(), pytest.raises(InvalidArgument, match="pass attention=None"):
            model(input_ids=tokens(1, 5), **{CACHE: cache})


# ---- models whose keys cannot be turned -------------------------------------------------------


def small(config, **sizes):
    return build(config(vocab_size=101, eos_token_id=None, pad_token_id=0, **sizes))


def bloom():
    return small(BloomConfig, hidden_size=64, n_layer=2, n_head=4, initializer_range=0.2)


def mpt():
    return small(MptConfig, d_model=64, n_layers=2, n_heads=4, max_seq_len=2048)


def deepseek():
    return build(
        DeepseekV3Config(
            **SIZES | {"num_key_value_heads": 4},
            moe_intermediate_size=32,
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            q_lora_rank=32,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=24,
        )
    )


def phi3_longrope():
    factors = [1.0 + 0.1 * i for i in range(8)]
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": 256,
    }
    return build(Phi3Config(**SIZES, rope_parameters=rope, original_max_position_embeddings=256))


OTHERS = {
    "bloom": (bloom, None, "no rotary position embedding"),
    "mpt": (mpt, None, "no rotary position embedding"),
    "deepseek": (deepseek, "memshare", "MLA"),
    "deepseek-dense": (deepseek, None, "MLA"),
    "sliding": (
        lambda: build(FAMILIES["mistral"](sliding_window=64)),
        "memshare",
        "layers 0 to 2 attend to a sliding window",
    ),
    "dynamic": (
        lambda: build(
            FAMILIES["llama"](
                rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
            )
        ),
        "memshare",
        "'dynamic' changes its frequencies",
    ),
    "longrope": (phi3_longrope, "memshare", "'phi3' is not known to rotate like"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_keys_that_cannot_be_turned_are_shared_exactly_and_said_so(sidecar, name):
    make, attention, reason = OTHERS[name]
    model = make()
    inputs = whole(tokens(1, 10).repeat(1, 4))
    theirs = plain(model, "sdpa" if model._supports_sdpa else "eager", inputs)
    with MemShareCache(
        model, policy="aggressive", runtime_dir=sidecar.runtime.path, attention=attention
    ) as cache:
        assert cache.session.policy.mode == common_pb2.SHARING_MODE_EXACT
        assert reason in cache.session.mode_reason
        assert cache.session.mode_reason.startswith("keys cannot be corrected")
        ours = generate(model, inputs, cache)
        assert share_all(cache) > 0
        assert not any(tables.deltas.any() for tables in cache.batch.tables)
    assert_identical(ours, theirs)


def test_a_sliding_window_is_kept_to(sidecar):
    model = build(FAMILIES["mistral"](sliding_window=16))
    inputs = whole(tokens(1, 40))
    theirs = plain(model, "eager", inputs)
    with MemShareCache(
        model, runtime_dir=sidecar.runtime.path, attention="memshare_eager"
    ) as cache:
        ours = generate(model, inputs, cache)
    assert torch.equal(ours.sequences, theirs.sequences)
    for one, other in zip(ours.logits, theirs.logits, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_only_known_rope_types_count_as_fixed():
    model = build(FAMILIES["llama"](rope_parameters=ROPES["yarn"]))
    layout, obstacle = describe_model(model)
    assert obstacle == ""
    assert layout.inv_freq == tuple(model.model.rotary_emb.inv_freq.tolist())
    assert all(map(math.isfinite, layout.inv_freq))


# ---- the sidecar dies -------------------------------------------------------------------------


class At(LogitsProcessor):
    """Does something in the middle of a generation."""

    def __init__(self, step, act):
        self.left, self.act = step, act

    def __call__(self, input_ids, scores):
        self.left -= 1
        if self.left == 0:
            self.act()
        return scores


def said_gone(caplog):
    return [r for r in caplog.records if r.levelno >= logging.WARNING and "is gone" in r.message]


def test_a_generation_finishes_without_the_manager(sidecar, models, caplog):
    model, inputs = models["llama"], padded()
    theirs = plain(model, "sdpa", inputs, new=80)
    with MemShareCache(model, policy=HARMLESS, runtime_dir=sidecar.runtime.path) as cache:

        def die():
            sidecar.kill_manager()
            wait_for(lambda: cache.session.state == "detached-by-manager", "the session to notice")

        try:
            act = LogitsProcessorList([At(10, die)])
            ours = generate(model, inputs, cache, new=80, logits_processor=act)
            assert_identical(ours, theirs)
            assert len(said_gone(caplog)) == 1
        finally:
            sidecar.start_manager()


def test_a_generation_finishes_without_the_memorys_owner(fresh_sidecar, models, caplog):
    model, inputs = models["llama"], padded()
    theirs = plain(model, "sdpa", inputs, new=80)
    with MemShareCache(model, policy=HARMLESS, runtime_dir=fresh_sidecar.runtime.path) as cache:

        def die():
            fresh_sidecar.kill_agent()
            wait_for(lambda: cache.session.state == "lost", "the session to notice")

        act = LogitsProcessorList([At(10, die)])
        ours = generate(model, inputs, cache, new=80, logits_processor=act)
        assert_identical(ours, theirs)
        assert len(said_gone(caplog)) == 1
        with pytest.raises(PoolLost, match="attach a new session"):
            generate(model, inputs, MemShareCache(model, cache.session), new=1)


def test_a_generation_goes_on_sharing_once_the_manager_is_back(sidecar, models):
    model = models["llama"]
    inputs = whole(tokens(1, 20).repeat(1, 6))
    before = []
    with MemShareCache(model, policy=GREEDY_SHARING, runtime_dir=sidecar.runtime.path) as cache:

        def restart():
            sidecar.kill_manager()
            sidecar.start_manager()
            wait_for(lambda: cache.session.statistics.reattached, "the session to resume")

        def look():
            before.append(shared_entries(cache))

        act = LogitsProcessorList([At(20, restart), At(30, look)])
        generate(model, inputs, cache, new=80, logits_processor=act)
        assert share_all(cache) > before[0] > 0
        (tables,) = cache.batch.tables
        rows = counts(sidecar)
        assert rows.live == len(np.unique(tables.rows[:, :, : tables.sealed]))
        assert cache.session.statistics.rejected == 0


def test_values_are_never_turned(sidecar, models):
    model = models["mistral"]
    ids = tokens(1, 20).repeat(1, 6)
    with MemShareCache(model, policy=GREEDY_SHARING, runtime_dir=sidecar.runtime.path) as cache:
        generate(model, whole(ids), cache, new=1)
        share_all(cache)
        (tables,) = cache.batch.tables
        pool = cache.session.pool.rows(np.float32)
        for layer in range(3):
            stored = pool[tables.rows[VALUE, layer, : tables.length], : 2 * 16]
            read = cache.batch.gather(layer, VALUE)[0].numpy().swapaxes(0, 1)
            assert np.array_equal(read.reshape(len(read), -1), stored)
