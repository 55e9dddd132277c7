"""One request's row tables, without a sidecar."""

from __future__ import annotations

import numpy as np
import pytest

from memshare.client.tables import BLOCK_TOKENS, KEY, VALUE, RowTables, TableDecision

LAYERS = 3
OVERFLOW = 100_000


def filled(tokens, sealed=None):
    """Tables of `tokens` tokens in use, all their rows distinct."""
    tables = RowTables(1, LAYERS)
    tables.add_rows(np.arange(tables.rows_needed(tokens), dtype=np.int32), private=False)
    tables.length = tables.final = tokens
    tables.sealed = tokens if sealed is None else sealed
    return tables


def decision(tables, items, generation=None):
    """`items`: (kind, layer, target, donor)."""
    kinds, layers, targets, donors = (np.array(column) for column in zip(*items, strict=True))
    return TableDecision(
        decision_id=1,
        request_id=1,
        generation=tables.generation if generation is None else generation,
        layers=layers.astype(np.uint16),
        kinds=kinds.astype(np.uint8),
        targets=targets.astype(np.int32),
        target_rows=tables.rows[kinds, layers, targets],
        donor_rows=tables.rows[kinds, layers, donors],
        deltas=((targets - donors) * (kinds == KEY)).astype(np.int32),
        distances=np.full(len(targets), 0.25, np.float32),
    )


def test_rows_come_in_whole_blocks_contiguous_in_each_layer():
    tables = RowTables(1, LAYERS)
    assert tables.rows_needed(1) == BLOCK_TOKENS * 2 * LAYERS
    tables.add_rows(np.arange(tables.rows_needed(20), dtype=np.int32), private=False)
    assert tables.allocated == 32
    assert (np.diff(tables.rows[:, :, :32], axis=2) == 1).all()
    assert len(np.unique(tables.rows[:, :, :32])) == 32 * 2 * LAYERS


def test_no_rows_are_needed_while_a_block_has_room():
    tables = filled(20)
    assert tables.rows_needed(12) == 0
    assert tables.rows_needed(13) == BLOCK_TOKENS * 2 * LAYERS


def test_growing_keeps_what_is_there():
    tables = filled(250)
    tables.apply(decision(tables, [(KEY, 1, 200, 10)]))
    before = tables.rows[:, :, :250].copy()
    tables.add_rows(np.arange(6000, 6000 + tables.rows_needed(600), dtype=np.int32), private=False)
    assert (tables.rows[:, :, :250] == before).all()
    assert tables.deltas[1, 200] == 190
    assert tables.shared.sum() == 1
    assert (tables.deltas[:, 250:] == 0).all()


def test_a_decision_points_entries_at_their_donors():
    tables = filled(32)
    own = tables.rows.copy()
    applied = tables.apply(decision(tables, [(KEY, 0, 30, 4), (VALUE, 2, 31, 5)]))
    assert applied.tolist() == [True, True]
    assert tables.rows[KEY, 0, 30] == own[KEY, 0, 4]
    assert tables.rows[VALUE, 2, 31] == own[VALUE, 2, 5]
    assert (tables.rows != own).sum() == 2
    assert tables.deltas[0, 30] == 26
    assert np.count_nonzero(tables.deltas) == 1
    assert tables.shared_entries.tolist() == [[1, 0, 0], [0, 0, 1]]


def test_a_decision_of_an_older_generation_is_a_miss():
    tables = filled(32)
    stale = decision(tables, [(KEY, 0, 10, 4)])
    tables.truncate(20)
    before = tables.rows.copy()
    assert tables.apply(stale).tolist() == [False]
    assert (tables.rows == before).all()
    assert not tables.shared.any()


def test_each_item_is_applied_only_where_the_tables_still_agree():
    tables = filled(32, sealed=30)
    items = [(KEY, 0, 10, 4), (KEY, 0, 11, 4), (KEY, 1, 31, 4), (VALUE, 1, 9, 4)]
    made = decision(tables, items)
    tables.rows[KEY, 0, 11] = 31_000  # another row since
    tables.apply(decision(tables, [(VALUE, 1, 9, 3)]))  # shared since
    assert tables.apply(made).tolist() == [True, False, False, False]
    assert tables.rows[KEY, 0, 11] == 31_000
    assert tables.rows[VALUE, 1, 9] == tables.rows[VALUE, 1, 3]


@pytest.mark.parametrize(
    ("field", "value"), [("targets", -1), ("targets", 32), ("layers", LAYERS), ("kinds", 2)]
)
def test_an_entry_outside_the_tables_is_a_miss(field, value):
    tables = filled(32)
    made = decision(tables, [(KEY, 0, 10, 4), (KEY, 0, 12, 4)])
    getattr(made, field)[0] = value
    before = tables.rows.copy()
    assert tables.apply(made).tolist() == [False, True]
    assert (tables.rows != before).sum() == 1


def test_applying_twice_changes_nothing_more():
    tables = filled(32)
    made = decision(tables, [(KEY, 0, 10, 4)])
    tables.apply(made)
    assert tables.apply(made).tolist() == [False]
    assert tables.shared_entries[KEY, 0] == 1


def test_a_rollback_gives_back_unsealed_blocks_whole():
    tables = filled(64, sealed=16)
    expected = tables.rows[:, :, 32:64].ravel().tolist()
    assert sorted(tables.truncate(20).tolist()) == sorted(expected)
    assert (tables.length, tables.allocated, tables.sealed, tables.final) == (20, 32, 16, 20)
    assert tables.generation == 2
    assert tables.rows_needed(12) == 0


def test_a_rollback_into_sealed_tokens_leaves_their_rows_to_the_manager():
    tables = filled(64, sealed=40)
    loose = tables.truncate(20)
    assert sorted(loose.tolist()) == sorted(tables.rows[:, :, 40:64].ravel().tolist())
    assert (tables.length, tables.allocated, tables.sealed) == (20, 20, 20)
    # The slots that are left of the block are allocated anew.
    assert tables.rows_needed(1) == BLOCK_TOKENS * 2 * LAYERS


def test_a_rollback_forgets_what_was_shared_beyond_it():
    tables = filled(64)
    tables.apply(decision(tables, [(KEY, 0, 10, 4), (KEY, 0, 50, 4), (VALUE, 1, 51, 4)]))
    tables.truncate(20)
    assert tables.shared_entries.tolist() == [[1, 0, 0], [0, 0, 0]]
    assert tables.deltas[0, 10] == 6
    assert np.count_nonzero(tables.deltas) == 1
    assert tables.shared.sum() == 1
    assert tables.errors.sum() == 0.25


def test_a_rollback_to_nothing_and_on():
    tables = filled(20, sealed=0)
    assert len(tables.truncate(0)) == 32 * 2 * LAYERS
    assert (tables.length, tables.allocated) == (0, 0)
    tables.add_rows(np.arange(tables.rows_needed(5), dtype=np.int32), private=False)
    assert tables.allocated == 16


def test_nothing_is_sealed_from_the_first_private_token_on():
    tables = filled(16, sealed=0)
    tables.add_rows(np.arange(OVERFLOW, OVERFLOW + tables.rows_needed(16), dtype=np.int32), True)
    tables.length = tables.final = 32
    assert tables.seal_limit() == 16
    tables.add_rows(np.arange(5000, 5000 + tables.rows_needed(16), dtype=np.int32), False)
    tables.length = tables.final = 48
    assert tables.seal_limit() == 16
    assert tables.tokens_in_overflow(OVERFLOW).tolist() == list(range(16, 32))


def test_a_rollback_before_the_private_tokens_makes_all_sealable():
    tables = filled(16, sealed=0)
    tables.add_rows(np.arange(OVERFLOW, OVERFLOW + tables.rows_needed(16), dtype=np.int32), True)
    tables.length = tables.final = 32
    loose = tables.truncate(10)
    assert (loose >= OVERFLOW).all()
    assert tables.overflow_from is None
    assert tables.tokens_in_overflow(OVERFLOW).tolist() == []
    assert tables.seal_limit() == 10


def test_the_rows_of_unsealed_tokens_include_those_not_in_use():
    tables = filled(20, sealed=16)
    assert len(tables.unsealed_rows()) == 16 * 2 * LAYERS
