# Sourced by demo.sh and test.sh. Makes the Python environment once and sets root, PYTHON and PATH; nothing to do the next time.
#   PYTHON=/path/to/python3.12   the interpreter that .venv is made with, where none is found
#   A2A_VENV=/path               use this environment as it is, and make none

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

is_312() { # a pyenv shim may be on the PATH and fail, so run it
  "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1
}

find_312() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python \
    /usr/bin/python3.12 /usr/local/bin/python3.12 python3 python; do
    if is_312 "$candidate"; then echo "$candidate"; return; fi
  done
  cat >&2 <<TEXT
error: no working Python 3.12 with venv was found (tried \$PYTHON, python3.12, pyenv's 3.12 versions, python3).
  Install it, for example:  apt install python3.12 python3.12-venv python3.12-dev
                            pyenv install 3.12
  or name it:               PYTHON=/path/to/python3.12 bash $0
  or use an environment that has torch 2.6 or newer, numpy and pytest:  A2A_VENV=/path/to/venv bash $0
TEXT
  return 1
}

make_environment() {
  local venv=$root/.venv stamp python
  stamp=$({ echo "$root"; cat "$root"/research_topic_2/requirements.txt "$root"/pyproject.toml; } | sha256sum)
  if [[ -x $venv/bin/python && $(cat "$venv/.stamp" 2>/dev/null) == "$stamp" ]]; then return; fi
  if [[ -e $venv/bin/python || -L $venv/bin/python ]] && ! is_312 "$venv/bin/python"; then
    echo "error: $venv does not hold a working Python 3.12; remove it, or set A2A_VENV" >&2
    return 1
  fi
  python=$(find_312) || return 1
  echo "== environment: $("$python" -V) in .venv; torch and its libraries, about 5 GB and a few minutes, once"
  "$python" -m venv "$venv" || return 1
  # From inside the folder: the requirements' `-e ..` is relative.
  if ! (cd "$root/research_topic_2" &&
    "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off -r requirements.txt -e '..[test]'); then
    echo "error: pip could not install the requirements (its messages are above); run this again to continue" >&2
    return 1
  fi
  echo "$stamp" >"$venv/.stamp"
}

need_modules() { # name...: the environment must be able to import them
  local missing
  missing=$("$PYTHON" -c '
import importlib.util, sys
print(*[name for name in sys.argv[1:] if importlib.util.find_spec(name) is None])' "$@") || return 1
  if [[ -n $missing ]]; then
    echo "error: $PYTHON has no $missing; install what is missing there, or unset A2A_VENV to have .venv made" >&2
    return 1
  fi
}

need_compiler() { # Inductor compiles C++ on CPU, Triton a launcher on GPUs; both include Python.h
  local cxx=${CXX:-g++} include
  if ! command -v "$cxx" >/dev/null; then
    echo "error: no C++ compiler ($cxx), which torch.compile calls; install one (apt install g++), or set CXX" >&2
    return 1
  fi
  include=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("include"))')
  if [[ ! -e $include/Python.h ]]; then
    echo "error: no $include/Python.h, which torch.compile needs; install Python's headers (apt install python3.12-dev)" >&2
    return 1
  fi
}

if [[ -n ${A2A_VENV:-} ]]; then
  PYTHON=$A2A_VENV/bin/python
  if ! "$PYTHON" -c '' 2>/dev/null; then
    echo "error: A2A_VENV=$A2A_VENV: $PYTHON does not run; it must be a Python environment" >&2
    exit 1
  fi
else
  make_environment || exit 1
  PYTHON=$root/.venv/bin/python
fi
need_modules torch numpy depyf || exit 1
need_compiler || exit 1
export PYTHON PATH=$(dirname "$PYTHON"):$PATH PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
# Compiled code of earlier runs is used again; a folder of its own keeps it out of other projects' way.
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$root/build/inductor}
