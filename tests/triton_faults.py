"""The faults that are planted in Triton kernels, by op: see test_triton_faults and test_triton_builds."""

from __future__ import annotations

from mutants import Fault

_ATTENTION, _WORK = "paged_attention.triton_impl", "paged_attention.work"
_ROTARY, _NORM, _ACTIVATION = "rotary_write_kv.triton_impl", "norm.triton_impl", "activation.triton_impl"
_SAMPLING, _SELECTION, _MATH = "sampling.triton_impl", "selection.triton_impl", "device_math.triton_impl"
_NOISE, _PENALTIES, _BIAS = "noise.triton_impl", "penalties.triton_impl", "logit_bias.triton_impl"
_FORBIDDEN, _LOGPROBS, _FINITE = "forbidden.triton_impl", "logprobs.triton_impl", "finite.triton_impl"
_COPY, _PLAN = "copy_blocks.triton_impl", "decode_plan.triton_impl"

FAULTS: dict[str, list[Fault]] = {
    "paged_attention": [
        Fault("causal mask off by one", _ATTENTION, "<= position[:, None])", "< position[:, None])"),
        Fault("a later token is seen", _ATTENTION, "<= position[:, None])", "<= position[:, None] + 1)"),
        Fault("window off by one", _ATTENTION, "> position[:, None] - window", ">= position[:, None] - window"),
        Fault(
            "no window",
            _ATTENTION,
            "seen = seen & (read[None, :] > position",
            "seen = seen | (read[None, :] > position",
        ),
        Fault("wrong scale", _ATTENTION, '"ieee") * scale', '"ieee") * (scale * 1.01)'),
        Fault("no scale of the cap", _ATTENTION, "soft_cap * tanh(", "tanh("),
        Fault("wrong block", _ATTENTION, "table + read // block_size", "table + (read * 0 + at) // block_size"),
        Fault("wrong slot in the block", _ATTENTION, "read % block_size)", "(read + 1) % block_size)"),
        Fault("wrong KV head", _ATTENTION, "* num_kv_heads + kv_head) * head_dim", "* num_kv_heads) * head_dim"),
        Fault("wrong head of the group", _ATTENTION, "kv_head * group + line % group", "line % group * 2 + kv_head"),
        Fault(
            "nobody's values are read", _ATTENTION, "mask=is_read[:, None] & (dim < head_dim)", "mask=(dim < head_dim)"
        ),
        Fault("sums do not decay", _ATTENTION, "total * decay + tl.sum", "total + tl.sum"),
        Fault("values do not decay", _ATTENTION, "values, mixed * decay[:, None], input", "values, mixed, input"),
        Fault(
            "last tokens are not read",
            _ATTENTION,
            "range(begin, end, block_tokens)",
            "range(begin, end - 1, block_tokens)",
        ),
        Fault("parts are not normalized", _ATTENTION, "mixed / some[:, None]", "mixed"),
        Fault("wrong sum of a part", _ATTENTION, "highest + tl.log2(total)", "highest"),
        Fault("wrong merge weight", _ATTENTION, "weight = tl.exp2(log_sum - shift)", "weight = tl.exp2(shift - shift)"),
        Fault("merged values do not decay", _ATTENTION, "mixed * decay[:, None] + values", "mixed + values"),
        Fault("a part is not merged", _ATTENTION, "range(0, count)", "range(1, count)"),
        Fault("no merge", _ATTENTION, "if len(work.merges):", "if not len(work.merges):"),
        Fault("tiles end too early", _WORK, "before + last_tokens + 1", "before + last_tokens"),
        Fault("windows begin too late", _WORK, "first_positions + 1 - window", "first_positions + 2 - window"),
        Fault("parts overlap", _WORK, "begins + part, self", "begins + part + 1, self"),
        Fault("wrong partial result", _WORK, "first_partials[of_tile] + index, -1", "first_partials[of_tile], -1"),
    ],
    "decode_plan": [
        Fault("parts overlap", _PLAN, "tl.minimum(begin + part, end)", "tl.minimum(begin + part + 1, end)"),
        Fault("windows begin too late", _PLAN, "tl.maximum(end - window, 0)", "tl.maximum(end - window + 1, 0)"),
        Fault("another row's items", _PLAN, "row_ends[None, :] <= at", "row_ends[None, :] < at"),
        Fault("a part too few", _PLAN, "tl.maximum((length + part - 1) // part, 1)", "tl.maximum(length // part, 1)"),
        Fault("wrong partial result", _PLAN, "(count > 1), at, -1)", "(count > 1), at + 1, -1)"),
        Fault("whole tiles are parts too", _PLAN, "is_item & (count > 1), at", "is_item, at"),
        Fault("what is left over has lines", _PLAN, "inner // count, row_tiles)", "inner // count, 0)"),
        Fault("merges of another tile", _PLAN, "axis=1) + at % row_tiles * count", "axis=1)"),
        Fault("whole tiles are merged", _PLAN, "tl.where(count > 1, at % row_tiles, row_tiles)", "(at % row_tiles)"),
        Fault("parts of the wrong length", _PLAN, "* row_tiles * num_kv_heads", "* num_kv_heads"),
    ],
    "rotary_write_kv": [
        Fault("turned the other way", _ROTARY, "first * cosine - second * sine", "first * cosine + second * sine"),
        Fault(
            "values are turned",
            _ROTARY,
            "tl.where(is_value[:, None], first, first",
            "tl.where(is_value[:, None] & (half == 0), first, first",
        ),
        Fault("wrong half", _ROTARY, "_store(turned_second, half + pair", "_store(turned_second, pair"),
        Fault("the rest is left out", _ROTARY, "place = 2 * half + tl", "place = 2 * half + 1 + tl"),
        Fault("wrong slot", _ROTARY, "tl.load(slots + token)", "tl.load(slots)"),
        Fault("wrong angles", _ROTARY, "tl.load(cos + token * half", "tl.load(cos + 0 * half"),
        Fault("keys go where values go", _ROTARY, "key_at = key_cache", "key_at = value_cache"),
        Fault("norm of the wrong width", _ROTARY, "squares / head_dim + eps", "squares / half + eps"),
        Fault("a norm that leaves out half", _ROTARY, "first * first + second * second", "first * first"),
        Fault(
            "keys normed as queries",
            _ROTARY,
            "query_weight[None, :], key_weight[None, :]",
            "query_weight[None, :], query_weight[None, :]",
        ),
        Fault(
            "values are normed",
            _ROTARY,
            "tl.where(is_value[:, None], part, (",
            "tl.where(is_value[:, None] & (width < 0), part, (",
        ),
    ],
    "norm": [
        Fault(
            "mean over the padding",
            _NORM,
            "tl.sum(value * value, axis=1) / width",
            "tl.sum(value * value, axis=1) / block",
        ),
        Fault("padding is centred too", _NORM, "tl.where(inside, value - mean[:, None], 0.0)", "value - mean[:, None]"),
        Fault("no epsilon", _NORM, "spread + eps", "spread"),
        Fault("the sum is not rounded", _NORM, "value = total.to(tl.float32)", "value = value + 0.0"),
        Fault(
            "the residual stays",
            _NORM,
            "tl.store(residual + target, total",
            "tl.store(residual + target, total - total",
        ),
        Fault("no bias", _NORM, "if has_bias:", "if has_bias and adds and not centers:"),
        Fault("wrong row", _NORM, "target = row[:, None] * width", "target = (row % 2)[:, None] * width"),
    ],
    "activation": [
        Fault(
            "gate and up changed round",
            _ACTIVATION,
            "row * 2 * width + columns, mask",
            "row * 2 * width + (columns + width) % (2 * width), mask",
        ),
        Fault("sigmoid of the other sign", _ACTIVATION, "tl.exp(-gate)", "tl.exp(gate)"),
        Fault("wrong cubic", _ACTIVATION, "0.044715", "0.0447"),
        Fault("wrong error function", _ACTIVATION, "tl.erf(x * 0.7071067811865476)", "tl.erf(x)"),
        Fault("tanh of the wrong sign", _MATH, "tl.where(x < 0, -far, far)", "far"),
        Fault("a short series", _MATH, "(-1.0 / 3.0 + square * series)", "(-1.0 / 3.0)"),
    ],
    "sampling": [
        Fault("the last rank is cut", _SELECTION, "(rank_keys_of(x, ids) >= cut)", "(rank_keys_of(x, ids) > cut)"),
        Fault("min_p cuts its equals", _SELECTION, "(weights >= min_p)", "(weights > min_p)"),
        Fault("equals by descending id", _SELECTION, "(LAST_ID - ids)", "(ids + 0)"),
        Fault("keys out of order below zero", _MATH, "((bits >> 31) & 0x7FFFFFFF)", "((bits >> 31) & 0)"),
        Fault("weights are cut to whole units", _MATH, "((x + shift) - shift)", "x"),
        Fault("a range too far", _SELECTION, "is_before = running < need", "is_before = running <= need"),
        Fault("the search stops early", _SELECTION, "while low + 1 < high", "while low + 4194304 < high"),
        Fault("the search asks for more", _SELECTION, "enough = mass >= need", "enough = mass > need"),
        Fault("k off by one", _SAMPLING, "range_and_rest(table + COUNTS, k)", "range_and_rest(table + COUNTS, k + 1)"),
        Fault("top_p of too much", _SAMPLING, "tl.where(places < place", "tl.where(places <= place"),
        Fault("a share rounded down", _SELECTION, "tl.ceil(share", "tl.floor(share"),
        Fault(
            "no temperature",
            _SELECTION,
            "tl.div_rn(x - highest, temperature)",
            "tl.div_rn(x - highest, temperature / temperature)",
        ),
        Fault("the mean of other weights", _SELECTION, "tl.load(table + TERMS).to", "tl.load(table + WEIGHTS).to"),
        Fault("distances to the left alone", _SELECTION, "return tl.abs(", "return ("),
        Fault("typical_p is off", _SELECTION, "typical_p + row) < 1.0:", "typical_p + row) < 0.0:"),
        Fault(
            "the farthest is cut",
            _SELECTION,
            "keys >= tl.load(table + DISTANCE_CUT)",
            "keys > tl.load(table + DISTANCE_CUT)",
        ),
        Fault(
            "the draw is a step early",
            _SAMPLING,
            "before + tl.cumsum(units, axis=0) <= threshold",
            "before + tl.cumsum(units, axis=0) < threshold",
        ),
        Fault("chunks before are not counted", _SAMPLING, "(before + tl.cumsum", "(0 * before + tl.cumsum"),
        Fault(
            "greedy takes the last",
            _SAMPLING,
            "tl.min(tl.where(x == highest, ids, vocab), axis=0)",
            "tl.max(tl.where(x == highest, ids, 0), axis=0)",
        ),
    ],
    "noise": [
        Fault("a round less", _NOISE, "static_range(10)", "static_range(9)"),
        Fault("keys changed round", _NOISE, "key0 + 0x9E3779B9", "key0 + 0xBB67AE85"),
        Fault("no lane", _NOISE, "+ lane.to(tl.uint64)", "+ lane.to(tl.uint64) * 0"),
        Fault("a bit less", _NOISE, "(word1 >> 11)", "((word1 >> 12) << 1)"),
    ],
    "penalties": [
        Fault("the prompt counts as output", _PENALTIES, "inside & (is_prompt == 0)", "inside"),
        Fault("read behind the sequence", _PENALTIES, "inside = at < length", "inside = at <= length"),
        Fault("another row's tokens", _PENALTIES, "tl.load(slots + row)", "tl.load(slots)"),
        Fault("frequency once", _PENALTIES, "* count.to(tl.float32)", "* (count > 0).to(tl.float32)"),
        Fault(
            "presence each time", _PENALTIES, "x - tl.load(presence + row), x", "x - count * tl.load(presence + row), x"
        ),
        Fault("positive logits multiplied", _PENALTIES, "tl.where(x > 0, tl.div_rn", "tl.where(x > 1e9, tl.div_rn"),
        Fault("no bound", _PENALTIES, "tl.minimum(tl.maximum(x, -LARGEST), LARGEST)", "x"),
        Fault("prompt tokens without repetition", _PENALTIES, "tl.where(factor != 1.0, times, count)", "times"),
    ],
    "logit_bias": [
        Fault("one too many", _BIAS, "inside = at < end", "inside = at <= end"),
        Fault("no bound", _BIAS, "tl.minimum(tl.maximum(x, -LARGEST), LARGEST)", "x"),
        Fault("wrong row", _BIAS, "logits + row * vocab", "logits + 0 * vocab"),
    ],
    "forbidden": [
        Fault("one too many", _FORBIDDEN, "mask=at < end)", "mask=at <= end)"),
        Fault("wrong row", _FORBIDDEN, "logits + row * vocab", "logits + 0 * vocab"),
    ],
    "logprobs": [
        Fault("equals by descending id", _LOGPROBS, "(0x7FFFFFFF - ids)", "(ids + 0)"),
        Fault("chunks are added as they are", _LOGPROBS, "sums * tl.exp(each - highest)", "sums"),
        Fault("the highest is left in", _LOGPROBS, "(x - highest) - log_total", "x - log_total"),
        Fault("another row's sum", _LOGPROBS, "place = row * num_chunks + chunks", "place = 0 * num_chunks + chunks"),
    ],
    "finite": [
        Fault("negative infinity passes", _FINITE, "tl.abs(value) < float", "value < float"),
        Fault("the end is not looked at", _FINITE, "(first + piece, width)", "(first + piece, width - block)"),
        Fault("one piece for all", _FINITE, "first = tl.program_id(1) * piece", "first = tl.program_id(1) * 0"),
        Fault("a piece is told for another", _FINITE, "+ tl.program_id(1)\n", "+ 0 * tl.program_id(1)\n"),
        Fault("the last block alone counts", _FINITE, "is_bad |=", "is_bad ="),
    ],
    "copy_blocks": [
        Fault("the wrong way", _COPY, "tl.load(key_cache + source + at", "tl.load(key_cache + target + at"),
        Fault("keys for values", _COPY, "tl.load(value_cache + source + at", "tl.load(key_cache + source + at"),
        Fault("one block for all", _COPY, "tl.load(sources + tl.program_id(0))", "tl.load(sources)"),
    ],
}
"""Each is found by the op's comparison."""
