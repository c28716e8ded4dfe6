"""State of the sampler on the device for each running sequence."""

import jax.numpy as jnp
import numpy as np
from sampling_cases import (
    GREEDY,
    ROWS,
    SLOTS,
    Case,
    State,
    jit_draw_full,
    jit_sample,
    random_logits,
    sample,
    sample_full,
)

from amoeba_jax import SamplingParams
from amoeba_jax.sampling.rows import NO_SLOT, mask_words, pack, state_rows


def test_device_counts_tokens_as_a_readmitted_sequence_would():
    params = SamplingParams(temperature=0, frequency_penalty=0.5, presence_penalty=0.2, repetition_penalty=1.2)
    logits = np.round(random_logits(ROWS, seed=4))
    case, state = Case(params, prompt=[3, 9], slot=4), State()
    state.admit(case)
    for _ in range(12):
        token = int(state.step(logits, [case.row()]).tokens[0])
        case.output = [*case.output, token]
        flags, bias = state_rows(case.row().row, case.prompt, case.output)
        np.testing.assert_array_equal(state.flags[4], flags)
        np.testing.assert_array_equal(state.bias[4], bias)
        assert state.last_tokens[4] == token
    assert max(case.output.count(token) for token in case.output) < 12, "penalties had an effect"


def test_only_rows_that_use_state_touch_it_and_only_their_own():
    state = State()
    counted, uncounted = Case(SamplingParams(temperature=0, presence_penalty=1), slot=3), Case(GREEDY, slot=5)
    unrecorded = Case(SamplingParams(temperature=0, presence_penalty=1), slot=SLOTS)
    state.admit(counted)
    flags, bias, last_tokens = (np.array(x) for x in (state.flags, state.bias, state.last_tokens))
    logits = random_logits(ROWS, seed=2)
    rows = [uncounted.row(), counted.row(), unrecorded.row(), unrecorded.row()._replace(slot=NO_SLOT)]
    result = state.step(logits, rows)
    np.testing.assert_array_equal(result.tokens[[0, 1, 4, 5, 6, 7]], logits.argmax(-1)[[0, 1, 4, 5, 6, 7]])
    token = result.tokens[1]
    flags[3, token] += 4
    last_tokens[3], last_tokens[5] = token, result.tokens[0]
    np.testing.assert_array_equal(state.flags, flags)
    np.testing.assert_array_equal(state.bias, bias)
    np.testing.assert_array_equal(state.last_tokens, last_tokens)


def test_draw_records_last_tokens_of_real_rows_only():
    logits = random_logits(ROWS, seed=2)
    rows = [Case(GREEDY, slot=7).row(), Case(GREEDY, slot=SLOTS).row(), Case(SamplingParams(), slot=0).row()]
    before = jnp.arange(100, 100 + SLOTS, dtype=jnp.int32)
    last_tokens, result = jit_sample(jnp.asarray(logits.T), before, jnp.asarray(pack(rows, ROWS)))
    expected = np.array(before)
    expected[[7, 0]] = result[0, 0], result[2, 0]
    np.testing.assert_array_equal(last_tokens, expected)


def test_rows_without_state_ignore_what_is_in_their_slot():
    logits = random_logits(ROWS)
    params = [SamplingParams(top_p=0.9), SamplingParams(top_k=5), GREEDY, SamplingParams(logprobs=2)]
    cases = [Case(p, seed=index) for index, p in enumerate(params)]
    tokens = sample(logits, [*params, *[GREEDY] * 4], [0, 1, 2, 3, 0, 0, 0, 0])
    np.testing.assert_array_equal(sample_full(logits, cases), tokens[:4])
    # A row with state makes the program read the state.
    cases.append(Case(SamplingParams(min_tokens=1)))
    np.testing.assert_array_equal(sample_full(logits, cases)[:4], tokens[:4])


def test_state_is_updated_in_place():
    vocabulary = 5000
    state = State(vocabulary)
    packed = jnp.asarray(pack([], ROWS, full=True))
    x = jnp.zeros((vocabulary, ROWS))
    masks = jnp.zeros((ROWS, mask_words(vocabulary)), jnp.int32)
    compiled = jit_draw_full.lower(x, state.last_tokens, state.flags, state.bias, packed, masks).compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= state.flags.nbytes
    copies = [
        line for line in compiled.as_text().splitlines() if f"s32[{SLOTS},{vocabulary}]" in line and " copy(" in line
    ]
    assert not copies
