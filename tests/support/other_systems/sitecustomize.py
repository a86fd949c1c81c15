"""In every process that has this folder on PYTHONPATH: rules of Windows and macOS, as environment variables say.

``pytest --start_method spawn --refuse_open_files`` sets them, for its own process and for all that it starts.
"""

import os

if os.environ.get("TEST_START_METHOD"):
    import multiprocessing

    multiprocessing.set_start_method(os.environ["TEST_START_METHOD"], force=True)
if os.environ.get("TEST_REFUSE_OPEN_FILES"):
    import open_file_rules

    open_file_rules.install()
