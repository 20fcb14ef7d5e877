"""One thread, no network, and every deprecation of transformers an error."""

import os
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch


def pytest_configure(config):
    cache = tempfile.TemporaryDirectory()
    config.add_cleanup(cache.cleanup)
    os.environ["HF_DATASETS_CACHE"] = cache.name
    config.addinivalue_line("filterwarnings", "error::FutureWarning")
    # PEFT asks for it by the old name.
    config.addinivalue_line("filterwarnings", "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
