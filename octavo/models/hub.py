"""Fetching a model from the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from octavo.models.errors import ModelError

CONNECT_TIMEOUT = 10.0
"""Seconds to wait for the hub before saying that it cannot be reached."""
_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model", "*.txt", "LICENSE*"]


def fetch_snapshot(hub_id: str, folder: Path, *, allow_pickle: bool = False) -> None:
    """Bring the files of `hub_id` (owner/name) that serving needs into `folder`. A repeat fetches what is missing.

    `allow_pickle`: PyTorch's files of weights too, where there are no others.

    Raises ModelError where the hub cannot be reached, does not know the model, or wants a token for it.
    """
    try:
        from huggingface_hub import HfApi, errors, snapshot_download
    except ImportError:
        raise ModelError(
            'fetching from the hub needs huggingface-hub: `pip install "octavo[executor]"`, or give a local folder'
        ) from None
    try:
        # Asked first: with files of an earlier try in the folder, the download alone would hide that the hub is away.
        info = HfApi().model_info(hub_id, timeout=CONNECT_TIMEOUT)
        has_safetensors = any(each.rfilename.endswith(".safetensors") for each in info.siblings or ())
        patterns = [*_PATTERNS, *(["pytorch_model*.bin"] if allow_pickle and not has_safetensors else [])]
        snapshot_download(
            hub_id, revision=info.sha, local_dir=folder, allow_patterns=patterns, etag_timeout=CONNECT_TIMEOUT
        )
    except errors.GatedRepoError:
        raise ModelError(
            f"{hub_id} is gated: accept its terms on the hub, then run `hf auth login` and repeat this command"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelError(
            f"the hub knows no model {hub_id}, or it is private: check the spelling, or run `hf auth login`"
        ) from None
    except Exception as error:  # the hub's client raises its HTTP library's own errors, which have changed before
        raise ModelError(
            f"cannot fetch {hub_id} from the Hugging Face hub ({error or type(error).__name__}): check the network, or "
            "bring the model's folder from a machine that reaches the hub and give its path instead of the name"
        ) from error
