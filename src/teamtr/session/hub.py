"""Uploads exported folders to the Hugging Face hub."""

from __future__ import annotations

import json
from pathlib import Path

from teamtr.errors import UserError, first_line


def require_pushable(name: str, folder: Path) -> None:
    """Refuses an adapter whose base is a folder of this machine: it could not be loaded elsewhere."""
    adapter = folder / "adapter_config.json"
    if adapter.exists() and Path(json.loads(adapter.read_text())["base_model_name_or_path"]).is_absolute():
        raise UserError(
            f"agent {name!r} is an adapter on a model that is not on the hub: merge it into a whole model "
            "(`teamtr export --merged`, in Python merge=True)"
        )


def push(name: str, folder: Path, repo_id: str, *, private: bool = True, token: str | None = None) -> str:
    """Upload an agent's folder; returns the address of the commit. The local folder is kept, even if the upload
    fails."""
    from huggingface_hub import HfApi

    require_pushable(name, folder)
    hub = HfApi(token=token)
    try:
        hub.create_repo(repo_id, private=private, exist_ok=True)
        return str(hub.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=f"TeamTR: {name}"))
    except Exception as error:  # of any HTTP client: that of the hub raises its own if no connection is made
        raise UserError(
            f"{repo_id}: the hub did not take agent {name!r} ({first_line(error)}): check the name (USER/NAME), the "
            "connection, and HF_TOKEN or `hf auth login`"
        ) from error
