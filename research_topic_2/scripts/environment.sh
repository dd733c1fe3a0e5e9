# Sourced by the launchers with $here at the benchmark's folder. Sets PYTHON, A2A_VENV's where that is set, and
# OMP_NUM_THREADS.
if [[ -z "${PYTHON:-}" && -n "${A2A_VENV:-}" ]]; then
    PYTHON="$A2A_VENV/bin/python"
    if [[ ! -x "$PYTHON" ]]; then
        echo "error: A2A_VENV=$A2A_VENV: must be a Python environment, but there is no $PYTHON" >&2
        exit 2
    fi
fi
if [[ -z "${PYTHON:-}" ]]; then
    PYTHON=python3
    for candidate in "$here/.venv/bin/python" "$here/../.venv/bin/python"; do
        if [[ -x "$candidate" ]]; then
            PYTHON="$candidate"
            break
        fi
    done
fi
if [[ -z "${OMP_NUM_THREADS:-}" ]]; then
    threads=$(($(nproc) / ${NPROC:-8}))
    export OMP_NUM_THREADS=$((threads > 0 ? threads : 1))
fi
export PYTHON
