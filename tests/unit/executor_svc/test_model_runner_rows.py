"""One step and its rows: order of effects, bad rows, failures, logprobs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fakes_executor import RecallModel, make_limits, make_runner, make_sequence

from executor_svc.batch import (
    NewSequence,
    RowStatus,
    SamplingParams,
    StepBatch,
    StepFailureReason,
    StepResult,
    StoppingParams,
)
from executor_svc.model_runner import ModelRunner
from executor_svc.record_check import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS

RANDOM = SamplingParams(temperature=1.0, seed=11)
PENALIZED = SamplingParams(temperature=0.0, repetition_penalty=2.0, presence_penalty=0.3, frequency_penalty=0.4)


def _batch(step: int, *rows: tuple[int, int, int, list[int]], **fields: object) -> StepBatch:
    """Rows of (handle, scheduled, computed, new blocks)."""
    return StepBatch(
        session=1,
        step=step,
        handles=tuple(row[0] for row in rows),
        num_scheduled_tokens=tuple(row[1] for row in rows),
        num_computed_tokens=tuple(row[2] for row in rows),
        num_new_blocks=tuple(len(row[3]) for row in rows),
        new_blocks=tuple(block for row in rows for block in row[3]),
        **fields,  # type: ignore[arg-type]
    )


def _start(runner: ModelRunner, *sequences: NewSequence) -> StepResult:
    """Step 1: sequences of up to 4 tokens, whole, in block = handle."""
    rows = [(each.handle, len(each.token_ids), 0, [each.handle]) for each in sequences]
    return runner.run(_batch(1, *rows, new_sequences=sequences))


def test_release_takes_effect_before_reuse() -> None:
    """A block that one step releases holds a new sequence in that very step, and neither sees the other."""
    alone = _start(make_runner(make_limits()), make_sequence(2, [6, 6, 6])).sampled[0]
    runner = make_runner(make_limits(num_blocks=2, max_num_seqs=1))
    _start(runner, make_sequence(1, [9, 8, 7]))
    result = runner.run(_batch(2, (2, 3, 0, [1]), released_handles=(1,), new_sequences=(make_sequence(2, [6, 6, 6]),)))
    assert (result.statuses, result.sampled) == ((RowStatus.OK,), (alone,))
    runner.check_invariants()
    assert runner.num_sequences == 1


def test_unknown_handles() -> None:
    """Releasing unknown and already released handles does nothing; a row of one is DESYNC and the others run (B10)."""
    runner = make_runner(make_limits())
    _start(runner, make_sequence(1, [9, 8]))
    result = runner.run(_batch(2, (77, 1, 4, []), (1, 1, 2, []), released_handles=(55, 55)))
    assert result.statuses == (RowStatus.DESYNC, RowStatus.OK)
    runner.run(_batch(3, released_handles=(1,)))
    again = runner.run(_batch(4, (1, 1, 3, []), released_handles=(1,)))
    assert again.statuses == (RowStatus.DESYNC,)
    runner.check_invariants()


@pytest.mark.parametrize(
    ("scheduled", "computed"), [(1, 1), (1, 3), (2, 2)], ids=["computed less", "computed more", "unknown tokens"]
)
def test_desync(scheduled: int, computed: int) -> None:
    """A row that counts other computed tokens, or schedules tokens nobody knows, is DESYNC; later ones are SKIPPED."""
    runner = make_runner(make_limits())
    _start(runner, make_sequence(1, [9, 8]), make_sequence(2, [9, 8]))
    result = runner.run(_batch(2, (1, scheduled, computed, []), (2, 1, 2, [])))
    assert result.statuses == (RowStatus.DESYNC, RowStatus.OK)
    assert result.sampled[0] is None
    assert runner.run(_batch(3, (1, 1, 2, []), (2, 1, 3, []))).statuses == (RowStatus.SKIPPED, RowStatus.OK)
    runner.check_invariants()


def test_a_known_handle_is_not_new() -> None:
    """A NewSequence with the handle of a live stay is DESYNC and ends that stay: which of the two is meant is not
    known.
    """
    runner = make_runner(make_limits())
    _start(runner, make_sequence(1, [9, 8]))
    result = runner.run(_batch(2, (1, 2, 0, [2]), new_sequences=(make_sequence(1, [9, 8]),)))
    assert result.statuses == (RowStatus.DESYNC,)
    assert runner.num_sequences == 0
    runner.check_invariants()


@pytest.mark.parametrize(
    "row",
    [
        (1, 1, 2, [0]),
        (1, 1, 2, [64]),
        (1, 1, 2, [2**32 - 1]),
        (1, 1, 2, list(range(10, 22))),
        (1, 0, 2, []),
        (2, 1, 4, []),
        (1, 2**32 - 1, 2, []),
    ],
    ids=["null block", "block too high", "block far too high", "table too long", "no token", "table too short", "huge"],
)
def test_bad_rows_disturb_nobody(row: tuple[int, int, int, list[int]]) -> None:
    """A row that breaks a limit gets no token, its later rows are SKIPPED, and the row beside it samples what it does
    alone.
    """
    sequences = (make_sequence(1, [9, 8]), make_sequence(2, [9, 8, 7, 6]), make_sequence(3, [5, 5]))
    alone = make_runner(make_limits())
    _start(alone, *sequences)
    expected = alone.run(_batch(2, (3, 1, 2, []))).sampled
    runner = make_runner(make_limits())
    _start(runner, *sequences)
    result = runner.run(_batch(2, row, (3, 1, 2, [])))
    assert result.statuses[0] in (RowStatus.BAD_INPUT, RowStatus.DESYNC)
    assert (result.statuses[0] is RowStatus.DESYNC) == (row[1] == 2**32 - 1)
    assert (result.sampled[0], result.sampled[1:]) == (None, expected)
    assert runner.run(_batch(3, (row[0], 1, row[2], []))).statuses == (RowStatus.SKIPPED,)
    runner.check_invariants()


def _biased(token_ids: tuple[int, ...], values: tuple[float, ...]) -> NewSequence:
    sampling = SamplingParams(temperature=1, bias_token_ids=token_ids, bias_values=values)
    return make_sequence(1, [9, 8], sampling=sampling)


def _with_bad_words(words: tuple[tuple[int, ...], ...]) -> NewSequence:
    return make_sequence(1, [9, 8], sampling=SamplingParams(temperature=1, bad_words=words))


@pytest.mark.parametrize(
    "bad",
    [
        make_sequence(1, [9, 61]),
        make_sequence(1, [9, 2**32 - 1]),
        make_sequence(1, [9, 8], num_prompt_tokens=0),
        make_sequence(1, [9, 8], num_prompt_tokens=3),
        make_sequence(1, [9] * 48),
        make_sequence(1, [9, 8], max_tokens=0),
        make_sequence(1, [9, 8, 7], num_prompt_tokens=1, max_tokens=2),
        make_sequence(1, [9, 8], num_prompt_tokens=1, stop_token_ids=(8,)),
        make_sequence(1, [9, 8], stop_token_ids=(61,)),
        make_sequence(1, [9, 8], min_tokens=1, stop_token_ids=tuple(range(61))),
        make_sequence(1, [9, 8], sampling=SamplingParams(temperature=float("nan"))),
        make_sequence(1, [9, 8], sampling=SamplingParams(temperature=1, top_p=0)),
        make_sequence(1, [9, 8], sampling=SamplingParams(temperature=1, min_p=1.5)),
        make_sequence(1, [9, 8], sampling=SamplingParams(temperature=1, repetition_penalty=0)),
        make_sequence(1, [9, 8], sampling=SamplingParams(temperature=1, presence_penalty=float("inf"))),
        make_sequence(1, [9, 8], sampling=SamplingParams(temperature=1, top_logprobs=21)),
        make_sequence(1, [9, 8], sampling=SamplingParams(temperature=1, prompt_logprobs=21)),
        make_sequence(1, [9, 8], sampling=SamplingParams(temperature=1, prompt_logprobs=-1)),
        make_sequence(1, [9, 8], sampling=SamplingParams(temperature=1, typical_p=0)),
        make_sequence(1, [9, 8], sampling=SamplingParams(temperature=1, typical_p=1.01)),
        make_sequence(1, [9, 8], sampling=SamplingParams(temperature=1, typical_p=float("nan"))),
        _biased((61,), (1.0,)),
        _biased((2**32 - 1,), (1.0,)),
        _biased((5,), (float("nan"),)),
        _biased((5,), (float("-inf"),)),
        _biased((5, 5), (1.0, 2.0)),
        _biased((5, 6), (1.0,)),
        _with_bad_words(((),)),
        _with_bad_words(((5,), (6, 61))),
        _with_bad_words(((5, 2**32 - 1),)),
        _with_bad_words(tuple((token,) for token in range(61))),
        _with_bad_words(tuple((5, 6) for _ in range(MAX_BAD_WORDS + 1))),
        _with_bad_words(((5,) * (MAX_BAD_WORD_TOKENS + 1),)),
        replace(
            _with_bad_words(tuple((token,) for token in range(60))),
            stopping=StoppingParams(max_tokens=8, min_tokens=1, stop_token_ids=(60,)),
        ),
    ],
)
def test_bad_records_disturb_nobody(bad: NewSequence) -> None:
    """A record that cannot run is BAD_INPUT, then SKIPPED until released; the new sequence beside it runs (E2)."""
    good = make_sequence(2, [9, 8, 7])
    runner = make_runner(make_limits())
    result = _start(runner, bad, good)
    assert result.statuses == (RowStatus.BAD_INPUT, RowStatus.OK)
    assert result.sampled == (None, _start(make_runner(make_limits()), good).sampled[0])
    assert runner.run(_batch(2, (1, 1, 2, []))).statuses == (RowStatus.SKIPPED,)
    assert runner.run(_batch(3, (1, 1, 2, []), released_handles=(1,))).statuses == (RowStatus.DESYNC,)
    runner.check_invariants()


def test_the_widest_records_run() -> None:
    """Biases on the whole vocabulary, as many and as long bad words as may be, and bad words that leave one token."""
    everything = SamplingParams(
        temperature=1,
        bias_token_ids=tuple(range(61)),
        bias_values=(3e38,) * 61,
        bad_words=tuple((5, 6, 7) for _ in range(MAX_BAD_WORDS)),
    )
    longest = replace(everything, bad_words=(*((token,) for token in range(60)), (5,) * MAX_BAD_WORD_TOKENS))
    sequences = [make_sequence(handle, [9, 8], sampling=each) for handle, each in enumerate((everything, longest), 1)]
    result = _start(make_runner(make_limits()), *sequences)
    assert result.statuses == (RowStatus.OK, RowStatus.OK)
    assert result.sampled[1] == 60


def test_rows_over_the_limits() -> None:
    """Rows past max_num_seqs, and from the one on that breaks the token budget, are BAD_INPUT; those before run."""
    runner = make_runner(make_limits(max_num_seqs=2))
    three = [make_sequence(handle, [9, 8]) for handle in (1, 2, 3)]
    assert _start(runner, *three).statuses == (RowStatus.OK, RowStatus.OK, RowStatus.BAD_INPUT)
    runner = make_runner(make_limits(max_num_batched_tokens=3))
    assert _start(runner, *three).statuses == (RowStatus.OK, RowStatus.BAD_INPUT, RowStatus.BAD_INPUT)
    runner.check_invariants()


def test_more_stays_than_fit_in_a_step() -> None:
    """A scheduler may hold more stays than rows fit in one step: the table grows and nothing is mixed up."""
    limits = make_limits(max_num_seqs=2)
    sequences = [make_sequence(handle, [handle, 8], max_tokens=20, sampling=PENALIZED) for handle in range(1, 8)]
    runner = make_runner(limits)
    for sequence in sequences:
        _start(runner, sequence)
    assert runner.num_sequences == 7
    runner.check_invariants()
    for sequence in sequences:
        result = runner.run(_batch(2, (sequence.handle, 1, 2, [])))
        alone = make_runner(limits)
        _start(alone, sequence)
        assert result.sampled == alone.run(_batch(2, (sequence.handle, 1, 2, []))).sampled
    runner.run(_batch(3, released_handles=tuple(range(1, 8))))
    assert runner.num_sequences == 0
    runner.check_invariants()


def test_a_batch_without_rows() -> None:
    """A step that only releases runs no model and answers with empty columns; so does one of skipped rows."""
    model = RecallModel(61)
    runner = make_runner(make_limits(), model)
    _start(runner, make_sequence(1, [9, 8], max_tokens=1))
    skipped = runner.run(_batch(2, (1, 1, 2, [])))
    assert skipped.statuses == (RowStatus.SKIPPED,)
    empty = runner.run(_batch(3, released_handles=(1,)))
    assert (empty.handles, empty.statuses, empty.sampled, empty.failure) == ((), (), (), None)
    assert model.num_forwards == 1


@pytest.mark.parametrize("where", ["prompt", "logits"])
def test_not_finite(where: str) -> None:
    """A row whose states or logits are NaN gets NAN and no token, its later rows are SKIPPED, its neighbours go on
    (E6, E7).
    """
    model = RecallModel(61, nan_token=60) if where == "prompt" else RecallModel(61, nan_logits_token=60)
    prompt = [60, 8, 7] if where == "prompt" else [7, 8, 60]
    neighbours = (make_sequence(1, [9, 8]), make_sequence(3, [5, 5], sampling=RANDOM))
    runner = make_runner(make_limits(), model)
    result = _start(runner, neighbours[0], make_sequence(2, prompt), neighbours[1])
    alone = _start(make_runner(make_limits()), *neighbours)
    assert result.statuses == (RowStatus.OK, RowStatus.NAN, RowStatus.OK)
    assert result.sampled == (alone.sampled[0], None, alone.sampled[1])
    after = runner.run(_batch(2, (1, 1, 2, []), (2, 1, 3, []), (3, 1, 2, [])))
    assert after.statuses == (RowStatus.OK, RowStatus.SKIPPED, RowStatus.OK)
    # Its block, NaN all over, goes to another sequence, which must not notice.
    reuse = make_sequence(4, [5, 5], sampling=RANDOM)
    reused = runner.run(_batch(3, (4, 2, 0, [2]), released_handles=(2,), new_sequences=(reuse,)))
    assert reused.sampled == (alone.sampled[1],)
    runner.check_invariants()


def test_not_finite_inside_a_prefill_chunk() -> None:
    """A chunk that does not sample is NAN too, where any of its states is not finite."""
    runner = make_runner(make_limits(), RecallModel(61, nan_token=60))
    result = runner.run(_batch(1, (1, 2, 0, [1]), new_sequences=(make_sequence(1, [60, 8, 7]),)))
    assert result.statuses == (RowStatus.NAN,)


def test_large_finite_values_are_not_nan() -> None:
    """Logits whose sum overflows float32 while each is finite are sound."""
    model = RecallModel(61)
    plain = model.compute_logits
    model.compute_logits = lambda hidden: plain(hidden).abs() + 3e38  # type: ignore[method-assign]
    assert _start(make_runner(make_limits(), model), make_sequence(1, [9, 8])).statuses == (RowStatus.OK,)


def _failing(error: Exception, at: int) -> RecallModel:
    def before_forward(number: int) -> None:
        if number == at:
            raise error

    return RecallModel(61, before_forward=before_forward)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError(), StepFailureReason.OUT_OF_MEMORY),
        (torch.OutOfMemoryError("full"), StepFailureReason.OUT_OF_MEMORY),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), StepFailureReason.OUT_OF_MEMORY),
        (RuntimeError("shape mismatch"), StepFailureReason.INTERNAL),
    ],
)
def test_step_failure(error: Exception, reason: StepFailureReason) -> None:
    """A step that raises answers with its reason; the stays of its rows are lost, the others run on as before."""
    undisturbed = make_runner(make_limits())
    _start(undisturbed, make_sequence(1, [9, 8]), make_sequence(2, [5, 5]))
    runner = make_runner(make_limits(), _failing(error, at=2))
    _start(runner, make_sequence(1, [9, 8]), make_sequence(2, [5, 5]))
    failed = runner.run(_batch(2, (1, 1, 2, []), (3, 2, 0, [3]), new_sequences=(make_sequence(3, [4, 4]),)))
    assert failed.failure is not None
    assert failed.failure.reason is reason
    assert (failed.handles, failed.statuses, failed.sampled) == ((), (), ())
    assert runner.num_sequences == 1
    result = runner.run(_batch(3, (1, 1, 3, []), (2, 1, 2, []), (3, 1, 2, [])))
    assert result.statuses == (RowStatus.SKIPPED, RowStatus.OK, RowStatus.SKIPPED)
    assert result.sampled[1] == undisturbed.run(_batch(2, (2, 1, 2, []))).sampled[0]
    runner.check_invariants()


def test_refusal() -> None:
    """A refused step runs nothing, loses the stays of its rows, new ones too, and still releases what it releases."""
    model = RecallModel(61)
    runner = make_runner(make_limits(), model)
    _start(runner, make_sequence(1, [9, 8]), make_sequence(2, [5, 5]), make_sequence(3, [4, 4]))
    refused = runner.refuse(
        _batch(2, (1, 1, 2, []), (4, 2, 0, [4]), new_sequences=(make_sequence(4, [4, 4]),), released_handles=(2,))
    )
    assert refused.failure is not None
    assert refused.failure.reason is StepFailureReason.REFUSED
    assert model.num_forwards == 1
    assert runner.num_sequences == 1
    result = runner.run(_batch(3, (1, 1, 2, []), (2, 1, 2, []), (3, 1, 2, []), (4, 1, 2, [])))
    assert result.statuses == (RowStatus.SKIPPED, RowStatus.DESYNC, RowStatus.OK, RowStatus.SKIPPED)
    runner.check_invariants()


def test_reset_forgets_everything() -> None:
    """After a reset no handle is known, and a new session's sequences may use the same handles and blocks."""
    runner = make_runner(make_limits())
    first = _start(runner, make_sequence(1, [9, 8]), make_sequence(2, [5, 5], max_tokens=1))
    runner.reset()
    assert runner.num_sequences == 0
    assert runner.run(_batch(1, (1, 1, 2, []), (2, 1, 2, []))).statuses == (RowStatus.DESYNC, RowStatus.DESYNC)
    assert _start(runner, make_sequence(1, [9, 8]), make_sequence(2, [5, 5])).sampled == first.sampled


def test_logprobs_are_the_models_own() -> None:
    """Logprobs come from the raw logits, before penalties, masks and temperature, for the rows that ask, K of each
    row's own.
    """
    stops = tuple(range(30))
    asked = SamplingParams(temperature=0.7, seed=3, repetition_penalty=2.0, frequency_penalty=2.0, top_logprobs=4)
    sequences = (
        make_sequence(1, [9, 8], sampling=replace(asked, top_logprobs=None)),
        make_sequence(2, [9, 8], sampling=asked, min_tokens=3, stop_token_ids=stops),
        make_sequence(3, [9, 8], sampling=replace(asked, temperature=0, top_logprobs=0)),
    )
    captured: list[torch.Tensor] = []
    model = RecallModel(61)
    plain = model.compute_logits

    def capture(hidden: torch.Tensor) -> torch.Tensor:
        captured.append(plain(hidden))
        return captured[-1].clone()

    model.compute_logits = capture  # type: ignore[method-assign]
    result = _start(make_runner(make_limits(), model), *sequences)
    expected = torch.log_softmax(captured[0], dim=-1)
    assert sorted(result.logprobs) == [1, 2]
    top = expected[1].topk(4)
    assert result.logprobs[1].top_token_ids.tolist() == top.indices.tolist()
    assert result.logprobs[1].top_logprobs.tolist() == pytest.approx(top.values.tolist(), abs=1e-5)
    assert result.logprobs[1].sampled == pytest.approx(float(expected[1, result.sampled[1]]), abs=1e-5)
    assert result.sampled[1] not in stops
    assert result.logprobs[2].top_token_ids.tolist() == []


def test_timings_cover_the_step() -> None:
    """Prepare, forward and sample times are all positive where the model ran."""
    timings = _start(make_runner(make_limits()), make_sequence(1, [9, 8])).timings
    assert min(timings.prepare, timings.forward, timings.sample) > 0
