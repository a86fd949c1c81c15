"""The table of known models is read once for all tests of the tools, and not in each command."""

import pytest

from library.models import known_models as known_models_module
from library.tools import lora_identification
from library.tools.lora import lora_files


@pytest.fixture(scope="package")
def known_models():
    return known_models_module.load_known_models()


@pytest.fixture(autouse=True)
def read_known_models_once(request, monkeypatch):
    """The models keep the names that they were asked for, which take long to build."""
    if any(module in str(request.node.path) for module in ("lora", "convert", "biases")):
        models = request.getfixturevalue("known_models")
        for module in (known_models_module, lora_files, lora_identification):
            monkeypatch.setattr(module, "load_known_models", lambda: models)
