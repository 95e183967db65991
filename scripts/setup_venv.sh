# Sourced by quickstart.sh and test.sh: makes .venv beside this folder if there is none, and sets $python to it.
# The user's own Python is only asked to make the environment. PYTHON=... picks another one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ ! -x .venv/bin/python ]; then
  for candidate in ${PYTHON:-python3.13 python3.12 python3.11 python3 python}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      "$candidate" -m venv .venv
      break
    fi
  done
fi
if [ ! -x .venv/bin/python ]; then
  echo "zjax needs Python 3.11 or newer with the venv module; none of '${PYTHON:-python3.13 python3.12 python3.11 python3 python}' is one. Set PYTHON=/path/to/python." >&2
  exit 1
fi
python="$PWD/.venv/bin/python"
