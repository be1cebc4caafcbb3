"""A conversation as the model gets it: every turn is sent with all turns before it."""

from __future__ import annotations

from octavo.client.types import Message


class Conversation:
    """An optional system message, then questions and their answers in turn."""

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        """Instructions to the model that come before all turns; None: none."""
        self._turns: list[tuple[str, str]] = []

    def __len__(self) -> int:
        return len(self._turns)

    def ask(self, question: str) -> list[Message]:
        """Return the messages that ask `question` after all that was said. Nothing is kept of it yet."""
        messages = [Message("system", self.system)] if self.system else []
        for earlier, answer in self._turns:
            messages += [Message("user", earlier), Message("assistant", answer)]
        return [*messages, Message("user", question)]

    def add(self, question: str, answer: str) -> None:
        """Keep a turn. A turn without an answer is not kept: templates want the two to alternate."""
        if answer:
            self._turns.append((question, answer))

    def undo(self) -> str | None:
        """Forget the last turn and return its question; None where there is none."""
        return self._turns.pop()[0] if self._turns else None

    def reset(self) -> None:
        """Forget every turn. The system message stays."""
        self._turns.clear()
