"""A fixture with which the table of known models is read once for the tests of a file, and not in each command."""

from types import ModuleType

import pytest

from library.models import known_models as known_models_module
from library.tools.lora import identification, lora_files

READERS: tuple[ModuleType, ...] = (known_models_module, lora_files, identification)


@pytest.fixture(autouse=True, scope="module")
def known_models():
    """The models keep the names that they were asked for, which take long to build."""
    models = known_models_module.load_known_models()
    with pytest.MonkeyPatch.context() as patch:
        for module in READERS:
            patch.setattr(module, "load_known_models", lambda: models)
        yield models
