"""What a person is told when a command fails: the error, and what to do about it."""

from __future__ import annotations

import errno
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TextIO

import grpc

from octavo.client.errors import START_HINT
from octavo.local.plan import BadSettingError, PlanError
from octavo.local.supervisor import StartError
from octavo.models.errors import ModelError
from octavo.rpc.errors import ServiceError
from octavo.terminal.api_key import API_KEY_HINT
from octavo.terminal.packages import requirement_for
from octavo.terminal.style import Style, printable
from octavo.terminal.suggestion import with_model

FAILED = 1
BAD_USAGE = 2
"""Exit codes: of a command that could not be done, and of one that nobody could do as it was given."""


@dataclass(frozen=True)
class Explained:
    """An error in words, and the next step where there is one."""

    message: str
    hint: str | None = None
    exit_code: int = FAILED


class CommandError(Exception):
    """A command cannot do what it was asked; `hint` is the next step."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


# By ErrorInfo.reason, which is stable; the code says less.
_HINT_BY_REASON: Mapping[str, str] = {
    "NO_EXECUTOR": "an executor may be starting: wait and repeat; `octavo load` lists those that are ready",
    "NO_SCHEDULER": "the scheduler is away: wait and repeat; `octavo doctor` shows which services answer",
    "MODEL_NOT_FOUND": "name one of those with --model, or leave it out where one model is served",
    "UNKNOWN_MODEL": "no executor has announced it yet: wait and repeat; `octavo load` lists the executors",
    "EXCEEDS_KV_MEMORY": "lower --max-tokens, or serve the model with more --kv-memory",
    "MODEL_REVISION_MISMATCH": "restart gateway and executors on the same prepared model",
    "TOO_MANY_REQUESTS": "the gateway serves as much as it may (--max-requests): repeat it in a moment",
    "QUEUE_TTL": "it waits in the queue for others: repeat it later or with a larger --queue-ttl",
    "FIRST_TOKEN_TARGET": "others go first, or the prompt is long: a larger --first-token-target gives it more time",
    "MISSING_API_KEY": API_KEY_HINT,
    "INVALID_API_KEY": API_KEY_HINT,
    "CANCELLED_BY_OPERATOR": "somebody cancelled it by `octavo cancel`",
}
_HINT_BY_CODE: Mapping[grpc.StatusCode, str] = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: "the cell is full: repeat it in a moment; `octavo load` shows how busy it is",
    grpc.StatusCode.UNIMPLEMENTED: "check --address: a gateway has one port for clients and one for operators, and "
    "`octavo doctor` tells which is which",
}
_REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EIO)
"""What the system says of a disk or folder that cannot be used. It is nobody's defect."""
_INPUT_FIELDS = ("text", "token_ids.ids", "chat.messages")
_FLAG_FIELDS = ("sampling.", "stopping.", "scheduling.", "seed")
"""Where the fields of a request come from flags: sampling.top_p is --top-p."""


def explain(error: Exception, *, in_chat: bool = False) -> Explained | None:
    """Return what to tell a person; None where the error is a defect, whose traceback is what helps.

    `in_chat`: the person can type the commands of `octavo chat`.
    """
    match error:
        case ServiceError():
            return _explain_service_error(error, in_chat)
        case CommandError():
            return Explained(error.message, error.hint)
        case BadSettingError():
            return Explained(str(error), error.hint, BAD_USAGE)
        case PlanError():
            return Explained(str(error), error.hint)
        case ModelError() | StartError():
            # Their messages name the command or flag themselves.
            return Explained(str(error))
        case ModuleNotFoundError(name=str(name)):
            return Explained(f"{name} is not installed: {requirement_for(name)}")
        case OSError() if error.errno in _REFUSALS:
            where = f": {error.filename}" if error.filename else ""
            return Explained(f"{error.strerror}{where}")
    return None


def _explain_service_error(error: ServiceError, in_chat: bool) -> Explained:
    message, is_unreachable, rest = error.message.partition(f"; {START_HINT}")
    if is_unreachable:
        # The client's words for every caller; here the advice has a line of its own.
        elsewhere = "so does --address HOST:PORT" if rest else "--address HOST:PORT names another place"
        return Explained(message, f"{START_HINT}{rest}; {elsewhere}")
    hint = _HINT_BY_REASON.get(error.reason) or _HINT_BY_CODE.get(error.code)
    is_too_long = any(each.field in _INPUT_FIELDS and "at most" in each.description for each in error.violations)
    if error.reason == "PROMPT_TOO_LONG" or (hint is None and is_too_long):
        hint = _hint_on_length(error.metadata, in_chat)
    if hint is None:
        fields = [each.field for each in error.violations if each.field.startswith(_FLAG_FIELDS)]
        flags = dict.fromkeys(f"--{field.rpartition('.')[2].replace('_', '-')}" for field in fields)
        hint = f"see {', '.join(flags)}" if flags else None
    return Explained(message, hint)


def _hint_on_length(metadata: Mapping[str, str], in_chat: bool) -> str:
    hint = (
        "shorten the input, or forget some of the conversation by /undo or /reset" if in_chat else "shorten the input"
    )
    served, own = metadata.get("max_model_len", ""), metadata.get("max_position_embeddings", "")
    if not (served.isdecimal() and own.isdecimal()):
        return f"{hint}, or serve the model with a larger --max-model-len where it has one"
    if int(served) >= int(own):
        return hint
    return f"{hint}, or serve the model with a larger --max-model-len: its own end is at {own} tokens"


def show(explained: Explained, stream: TextIO | None = None) -> None:
    """Print an error, and below it the hint."""
    stream = sys.stderr if stream is None else stream
    style = Style(stream)
    print(f"{style.red('octavo: error:')} {printable(explained.message)}", file=stream, flush=True)
    if explained.hint:
        print(f"{style.dim('hint:')} {with_model(explained.hint)}", file=stream, flush=True)
