"""Requests whose output a test has written: what a scripted scheduler sends of them, step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.internal.executor.v1 import sequence_pb2
from octavo.internal.scheduler.v1 import scheduler_pb2
from octavo.rpc.logprobs import pack_floats, pack_ids

Script = Callable[[scheduler_pb2.Submit, int], Sequence[int]]
"""The whole output of a choice, its stop token included: a pure function of the record, like a model's."""


def write_again(submit: scheduler_pb2.Submit, choice: int) -> list[int]:
    """Write the prompt again, less its first `choice` tokens, and stop."""
    return [*submit.prompt_token_ids[choice:], *submit.stopping.stop_token_ids[:1]]


@dataclass
class Running:
    """A request as the scheduler knows it: what it will write, and how much of that it has sent.

    `num_cached`: tokens of the prompt that were cached when it ran, where that is not told yet.
    `num_told`: tokens of the prompt, the first included, whose logprobs it has told; all where none are asked for.
    """

    submit: scheduler_pb2.Submit
    outputs: list[list[int]]
    num_sent: list[int]
    ended: list[bool]
    num_told: int
    num_cached: int

    @classmethod
    def begin(cls, submit: scheduler_pb2.Submit, script: Script, num_cached: int = 0) -> Running:
        """Return a request that was submitted; what it has already must be what the script says."""
        outputs = [list(script(submit, choice)) for choice in range(len(submit.choices))]
        for choice, output in zip(submit.choices, outputs, strict=True):
            assert list(choice.token_ids) == output[: len(choice.token_ids)], "committed tokens are not what was sent"
        num_sent = [len(choice.token_ids) for choice in submit.choices]
        ended = [choice.HasField("end") for choice in submit.choices]
        num_told = 1 if submit.sampling.HasField("prompt_logprobs") else len(submit.prompt_token_ids)
        return cls(submit, outputs, num_sent, ended, num_told, num_cached)

    def _next_of_prompt(self, num_tokens: int) -> scheduler_pb2.ChoiceOutput:
        submit, first = self.submit, self.num_told
        self.num_told = min(first + num_tokens, len(submit.prompt_token_ids))
        columns = logprob_columns(submit.prompt_token_ids[first : self.num_told], submit.sampling.prompt_logprobs)
        told = scheduler_pb2.PromptLogprobs(first_token_index=first, columns=columns)
        return scheduler_pb2.ChoiceOutput(request=submit.request, choice=0, prompt_logprobs=told)

    def next_outputs(self, prompt_tokens: int) -> list[scheduler_pb2.ChoiceOutput]:
        """Return the next token of each choice, of the first the logprobs of so many prompt tokens before that."""
        submit, stopping = self.submit, self.submit.stopping
        outputs: list[scheduler_pb2.ChoiceOutput] = []
        for choice, tokens in enumerate(self.outputs):
            if self.ended[choice]:
                continue
            if choice == 0 and self.num_told < len(submit.prompt_token_ids):
                outputs.append(self._next_of_prompt(prompt_tokens))
                continue
            index = self.num_sent[choice]
            token_id = tokens[index]
            output = scheduler_pb2.ChoiceOutput(
                request=submit.request, choice=choice, first_token_index=index, token_ids=[token_id]
            )
            if token_id in stopping.stop_token_ids:
                output.end.reason = scheduler_pb2.FINISH_REASON_STOP
                output.end.stop_token_id = token_id
            elif index + 1 == min(stopping.max_tokens, len(tokens)):
                output.end.reason = scheduler_pb2.FINISH_REASON_LENGTH
            if submit.sampling.HasField("top_logprobs"):
                output.logprobs.CopyFrom(logprob_columns([token_id], submit.sampling.top_logprobs))
            self.num_sent[choice] += 1
            self.ended[choice] = output.HasField("end")
            outputs.append(output)
        if outputs:
            outputs[0].num_cached_tokens, self.num_cached = self.num_cached, 0
        return outputs


def logprob_columns(token_ids: Sequence[int], num_top: int) -> sequence_pb2.TokenLogprobColumns:
    """Return logprobs that tell of what token they are: -token_id / 8 for it, then token_id + k at -(k + 1) / 4."""
    return sequence_pb2.TokenLogprobColumns(
        num_top=num_top,
        sampled=pack_floats([-token_id / 8 for token_id in token_ids]),
        top_token_ids=pack_ids([token_id + each for token_id in token_ids for each in range(num_top)]),
        top_logprobs=pack_floats([-(each + 1) / 4 for _ in token_ids for each in range(num_top)]),
    )
