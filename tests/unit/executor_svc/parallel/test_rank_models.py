"""Models divided among ranks against the same models whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model_variations import VARIATIONS, Variation, save_variation
from paged import PagedLoop, PagedSequence
from ranks import LeadingLoop, generate, run_ranks
from torch import Tensor

from executor_svc.kernels import KernelSet, build_kernels
from executor_svc.kernels.linear.reference import ReferenceLinear
from executor_svc.kernels.record.cpu import RecordedBody
from executor_svc.kv_cache import KVCache
from executor_svc.models import CausalLM, shard_config
from executor_svc.models.loader import describe, load_checkpoint
from executor_svc.parallel.lead import ConnectedRanks
from executor_svc.parallel.messages import Kind
from executor_svc.parallel.share import Share
from executor_svc.parallel.vocabulary import DividedVocabulary
from executor_svc.weights import open_checkpoint

CPU = torch.device("cpu")
_BY_ID = {variation.id: variation for variation in VARIATIONS}
SOME = [
    "Llama, biases",
    "Llama, tied head, wide heads",
    "Mixtral, no window",
    "Gemma 2, window on every other layer",
    "Phi-3, plain",
    "OLMo 2, plain",
    "GPT-2, plain",
    "OPT, narrow embedding, norms after the sums (350m)",
    "GPT-NeoX, parallel",
]
"""One of each way in which tensors divide: what `make test` runs. All the others are slow together."""
_ODD = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16}
ODD = [
    replace(_BY_ID["Llama, biases"], fields={**_BY_ID["Llama, biases"].fields, **_ODD}),
    # The norm of queries and keys is of all heads together.
    replace(_BY_ID["OLMo 2, plain"], fields={"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}),
]
"""Two ranks of these have 1 and 2 KV heads."""


def _load(
    folder: Path, kernels: KernelSet, ranks: ConnectedRanks | None = None, variation: Variation | None = None
) -> CausalLM:
    longest = None if variation is None else variation.max_model_len
    return load_checkpoint(open_checkpoint(folder), torch.float32, CPU, kernels, None, longest, ranks=ranks)


def _prompts(shortest: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 320, (length + shortest,), generator=generator).tolist() for length in (0, 15, 22)]


def _check_same(folder: Path, variation: Variation, kernels: KernelSet, size: int) -> None:
    save_variation(folder, variation)
    prompts = _prompts(variation.shortest)
    whole = PagedLoop(_load(folder, kernels, None, variation), num_blocks=64, block_size=8)
    expected = whole.generate(prompts, 5, chunk=5)
    assert len({tuple(tokens) for tokens in expected}) > 1
    found = generate(size, lambda ranks: _load(folder, kernels, ranks, variation), prompts, 5, chunk=5)
    assert found == expected


@pytest.mark.parametrize("name", SOME)
def test_two_ranks_write_what_one_writes(tmp_path: Path, name: str) -> None:
    """Greedy tokens in float32 are the same, over KV memory full of NaN, in ragged batches and by chunks."""
    _check_same(tmp_path, _BY_ID[name], build_kernels("cpu"), 2)


@pytest.mark.parametrize("variation", ODD, ids=lambda variation: variation.family)
def test_a_rank_may_have_more_heads_than_another(tmp_path: Path, variation: Variation) -> None:
    """So it is where KV heads do not divide evenly. The last rank has the most: by it KV blocks are counted."""
    _check_same(tmp_path, variation, build_kernels("cpu"), 2)
    config, _ = describe(open_checkpoint(tmp_path))
    heads = [(each.num_heads, each.num_kv_heads) for each in (shard_config(config, Share(rank, 2)) for rank in (0, 1))]
    assert heads == [(2, 1), (4, 2)]


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize("variation", VARIATIONS, ids=lambda variation: variation.id)
def test_ranks_write_what_one_writes(tmp_path: Path, variation: Variation, kernels: str, size: int) -> None:
    """So it is for every variation of every family, with 2 ranks and with 4, of which pairs share a KV head."""
    _check_same(tmp_path, variation, build_kernels(kernels), size)


@pytest.mark.parametrize("size", [2, 4])
def test_company_changes_no_bit(tmp_path: Path, size: int) -> None:
    """With the kernels of the CPU set a sequence's logits have the same bits alone and beside others, and whole and in
    chunks, also where several ranks' terms are added up.
    """
    save_variation(tmp_path, _BY_ID["OLMo 2, plain"])
    kernels = build_kernels("cpu")
    prompts = _prompts()

    def steps(loop: PagedLoop) -> list[Tensor]:
        alone = [loop.step([(PagedSequence(prompt), len(prompt))])[0] for prompt in prompts]
        together = loop.step([(PagedSequence(prompt), len(prompt)) for prompt in prompts])
        chunked = PagedSequence(prompts[2])
        loop.step([(chunked, 7)])
        last = loop.step([(chunked, len(prompts[2]) - 7)])[0]
        return [torch.stack(alone), together, alone[2], last]

    alone, together, whole, chunked = LeadingLoop(size, lambda ranks: _load(tmp_path, kernels, ranks)).run(steps)
    assert torch.equal(alone, together)
    assert torch.equal(whole, chunked)


@pytest.mark.parametrize("name", ["Llama, plain", "OLMo 2, plain"])
def test_steps_with_sums_are_recorded(tmp_path: Path, name: str) -> None:
    """A step of a shape that came before runs as one call, which calls back for what ranks do together. Its bits are
    those of op by op.
    """
    save_variation(tmp_path, _BY_ID[name])
    kernels = build_kernels("cpu")
    bodies: list[RecordedBody] = []

    def record(body: object) -> RecordedBody:
        bodies.append(kernels.record(body))  # type: ignore[arg-type]
        return bodies[-1]

    def decode(loop: PagedLoop) -> list[Tensor]:
        sequence = PagedSequence(_prompts()[1])
        return [loop.step([(sequence, 1)])[0] for _ in range(6)]

    def run(each: KernelSet) -> Tensor:
        return torch.stack(LeadingLoop(2, lambda ranks: _load(tmp_path, each, ranks)).run(decode))

    plain = run(replace(kernels, record=lambda body: body))
    assert torch.equal(run(replace(kernels, record=record)), plain)
    assert [body.num_programs for body in bodies] == [1, 1]


def test_an_error_inside_a_recorded_step_ends_it(tmp_path: Path) -> None:
    """What a sum raises comes out of the step, and the sums behind it are not tried."""
    save_variation(tmp_path, _BY_ID["Llama, plain"])
    kernels = build_kernels("cpu")

    alone = _Alone()
    model = _load(tmp_path, kernels, alone)  # type: ignore[arg-type]
    loop, sequence = PagedLoop(model, num_blocks=8, block_size=8), PagedSequence(_prompts()[1])
    for _ in range(3):
        loop.step([(sequence, 1)])
    alone.sums = 0
    with pytest.raises(RuntimeError, match="the other rank is gone"):
        loop.step([(sequence, 1)])
    # The embedding's is not part of the recorded step; the first inside it fails.
    assert alone.sums == 2


class _Alone:
    """Ranks whose sums are made of one term, until they fail."""

    share = Share(0, 2)
    sums: int | None = None

    def sum(self, _: Tensor) -> None:
        if self.sums is not None:
            self.sums += 1
            if self.sums > 1:
                raise RuntimeError("the other rank is gone")

    def gather(self, x: Tensor) -> list[Tensor]:
        return [x] * self.share.size

    def ask(self, kind: Kind, x: Tensor) -> None:
        pass


def _head(ranks: ConnectedRanks, weight: Tensor) -> DividedVocabulary:
    first, last = ranks.share.of(len(weight))
    return DividedVocabulary(ReferenceLinear(weight[first:last], None), len(weight), ranks)


@pytest.mark.parametrize("vocab", [7, 8, 13])
def test_a_vocabulary_divides_as_it_comes(vocab: int) -> None:
    """Embedding, logits and likeliest tokens of vocabularies that do not divide evenly are those of the whole: among
    equals the first token, and rows that are not finite are told.
    """
    generator = torch.Generator().manual_seed(vocab)
    weight = torch.randint(-3, 4, (vocab, 5), generator=generator).float()
    weight[-1] = weight[0]
    hidden = torch.randint(-3, 4, (9, 5), generator=generator).float()
    hidden[4] = torch.nan
    tokens = torch.arange(vocab).flip(0)

    def body(ranks: ConnectedRanks) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        head = _head(ranks, weight)
        rows = head.weight_rows(tokens)
        if ranks.share.rank:
            head.answer(Kind.LIKELIEST, hidden)
            head.answer(Kind.LOGITS, hidden)
            return None
        likeliest = head.likeliest(hidden)
        assert likeliest is not None
        return rows, *likeliest, head.logits(hidden)

    rows, likeliest, finite, logits = run_ranks(3, body)[0]
    expected = hidden @ weight.T
    assert torch.equal(rows, weight[tokens])
    torch.testing.assert_close(logits, expected, equal_nan=True)
    assert torch.equal(finite, expected.isfinite().all(1))
    assert torch.equal(likeliest[finite], expected.argmax(1)[finite])
    assert bool((likeliest < vocab).all())


def test_kv_memory_of_a_rank_has_its_heads(tmp_path: Path) -> None:
    """Two ranks have half the KV heads each, four share pairwise what there is."""
    save_variation(tmp_path, _BY_ID["Llama, plain"])
    kernels = build_kernels("reference")
    for size, heads in ((2, 1), (4, 1)):
        configs = run_ranks(size, lambda ranks: _load(tmp_path, kernels, ranks).config)
        assert [(config.num_heads, config.num_kv_heads) for config in configs] == [(4 // size, heads)] * size
        cache = KVCache.allocate(configs[0], 2, 8, torch.float32, CPU)
        assert cache.keys[0].shape[2] == heads
