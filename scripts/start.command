#!/bin/sh
# For a double click on macOS: open the page in the browser.  The first time, install.py makes the environment.
exec "$(dirname "$0")/start.sh" "$@"
