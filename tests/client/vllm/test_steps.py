import numpy as np

from memshare.client.block_tables import MAX_CANDIDATES, NO_CANDIDATE
from memshare.client.vllm.steps import ReasoningSteps, boundary_tokens

END = 9
BOUNDARIES = np.arange(10) == END


def steps_of(tokens, min_tokens=4, similarity=0.8):
    steps = ReasoningSteps(BOUNDARIES, min_tokens, similarity)
    steps.add(tokens, len(tokens))
    return steps


def test_newlines_and_sentence_ends_are_boundaries():
    texts = [" the", ".", ".\n\n", "\n", "!", "?", "。", "3.5", ". ", ",", ""]
    assert boundary_tokens(texts).tolist() == [
        False, True, True, True, True, True, True, False, True, False, False,
    ]  # fmt: skip


def test_a_step_has_its_least_length_and_shorter_ones_join_the_next():
    assert steps_of([1, END, 2, END, 3, 4, 5, END]).count == 2
    assert steps_of([1, 2, END]).count == 0


def test_a_repeated_step_names_the_block_that_lies_as_far_into_the_earlier_one():
    step = [1, 2, 3, 4, 5, 6, 7, END]
    other = [8, 8, 8, 8, 8, 8, 8, END]
    steps = steps_of(step + other + step)
    # Blocks of 4: the third step is blocks 4 and 5, the first is blocks 0 and 1.
    assert steps.candidates(4, 4).tolist() == [0] + [NO_CANDIDATE] * (MAX_CANDIDATES - 1)
    assert steps.candidates(5, 4)[0] == 1
    assert (steps.candidates(2, 4) == NO_CANDIDATE).all()


def test_unlike_steps_are_no_candidates_and_order_of_tokens_does_not_matter():
    unlike = steps_of([1, 1, 1, END, 2, 2, 2, END])
    assert (unlike.candidates(1, 4) == NO_CANDIDATE).all()
    assert steps_of([1, 2, 3, END, 3, 1, 2, END]).candidates(1, 4)[0] == 0


def test_tokens_that_come_in_pieces_give_the_same_steps():
    tokens = np.random.default_rng(0).integers(0, 10, 400).tolist()
    whole, pieces = steps_of(tokens), ReasoningSteps(BOUNDARIES, 4, 0.8)
    for end in range(0, 401, 7):
        pieces.add(tokens, end)
    pieces.add(tokens, 400)
    assert pieces.count == whole.count > 16
    for block in range(25):
        assert (pieces.candidates(block, 16) == whole.candidates(block, 16)).all()


def test_candidates_are_earlier_blocks_and_never_the_block_itself():
    steps = steps_of([1, 2, 3, END] * 40)
    for block in range(1, 10):
        found = steps.candidates(block, 16)
        found = found[found != NO_CANDIDATE]
        assert len(found)
        assert ((found >= 0) & (found < block)).all()
        assert len(set(found.tolist())) == len(found)


def test_only_the_newest_steps_of_a_very_long_request_are_compared(monkeypatch):
    monkeypatch.setattr("memshare.client.vllm.steps._MAX_COMPARED", 2)
    steps = ReasoningSteps(BOUNDARIES, 4, 0.8)
    tokens: list[int] = []
    for token in (1, 2, 3, 1):
        tokens += [token] * 3 + [END]
        steps.add(tokens, len(tokens))
    assert (steps.candidates(3, 4) == NO_CANDIDATE).all()
    tokens += [3] * 3 + [END]
    steps.add(tokens, len(tokens))
    assert steps.candidates(4, 4)[0] == 2


def test_a_token_beyond_the_known_vocabulary_ends_nothing():
    assert steps_of([1, 2, 3, 4, 5000, 6]).count == 0
