#!/bin/sh
# Open the page in the browser.  The first time, and after an installation that has not finished, install.py makes
# the environment; one of your own is used as it is.  Options are those of python -m library web, such as --port 7861.
cd "$(dirname "$0")/.." || exit 1
if [ ! -x .venv/bin/python ] || { [ -f .venv/made_by_install.txt ] && [ ! -f .venv/install_finished.txt ]; }; then
    python3 install.py || exit 1
fi
exec .venv/bin/python -m library web --open_browser "$@"
