#!/usr/bin/env bash
# Installs what the tests need into .venv and runs them; arguments go to pytest (for instance -m 'slow and not full', or a file).
source "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"
"$python" -m pip install --quiet --disable-pip-version-check -e '.[test,docs,colab]'
"$python" -m pytest -n 2 --dist worksteal "$@"
