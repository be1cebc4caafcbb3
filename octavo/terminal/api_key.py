"""What a person is told who has no API key, or a wrong one."""

from __future__ import annotations

API_KEY_HINT = (
    "set OCTAVO_API_KEY to a key that its operator gave you; `octavo complete`, `chat` and `bench` take --api-key, too"
)
