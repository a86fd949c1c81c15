#!/bin/sh
# Open the page in the browser.  The first time, install.py makes the environment.  Options are those of
# python -m library web, such as --port 7861.
cd "$(dirname "$0")/.." || exit 1
if [ ! -x .venv/bin/python ]; then
    python3 install.py || exit 1
fi
exec .venv/bin/python -m library web --open_browser "$@"
