# Sourced by the launchers with $here at the benchmark's folder. Sets PYTHON and OMP_NUM_THREADS.
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
