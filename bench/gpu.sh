#!/usr/bin/env bash
# Everything that needs a GPU, in one run that is given 8 minutes: the kernels' tests compiled, the microbenchmarks, the
# compile time, and compute-sanitizer with the time that is left. Without a GPU it rehearses on tiny sizes.
#
#     bash bench/gpu.sh
#     OUT=folder PYTHON=python3.12 LIMIT=900 bash bench/gpu.sh
#
# JSON files go to $OUT, by default bench/results/<device> (without a GPU: a new temporary folder), the log of every step to
# gpu.log in $OUT, by default in a new temporary folder. No step stops those behind it; the exit status is 0 only if
# none failed. Python packages that the machine lacks are taken from wheels/ if there is such a folder. Nothing in
# the checkout is changed but the results.
set -uo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." || exit 1

python=${PYTHON:-python3}
[[ -n ${PYTHON:-} || ! -x .venv/bin/python ]] || python=.venv/bin/python
[[ $python != */* || $python == /* ]] || python=$PWD/$python # steps run in other folders too
"$python" -c 'import torch' 2>/dev/null || {
    echo "no PyTorch in $python: PYTHON=... names another, ./run env makes one" >&2
    exit 1
}
deadline=$((SECONDS + ${LIMIT:-465}))
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export TRITON_CACHE_DIR=$work/triton TORCHINDUCTOR_CACHE_DIR=$work/inductor
logs=${OUT:-$(mktemp -d)}
mkdir -p "$logs"
log=$logs/gpu.log
: >"$log"
summary=()
failed=0

say() { printf '%s\n' "$*" | tee -a "$log"; }

# note STATE NAME SECONDS [WHY]
note() { summary+=("$(printf '%-8s %-28s %4s s  %s' "$1" "$2" "$3" "${4:-}")"); }

skip() {
    say "== $1: skipped: $2"
    note skipped "$1" 0 "$2"
}

# step NAME SECONDS COMMAND...: run it within SECONDS and within what is left of the whole.
step() {
    local name=$1 limit=$2 left=$((deadline - SECONDS)) start=$SECONDS status=0
    shift 2
    if ((left < 10)); then
        skip "$name" "no time left"
        failed=1
        return 1
    fi
    ((limit > left)) && limit=$left
    say ""
    say "== $name (at most $limit s)"
    timeout -k 15 "$limit" "$@" >"$work/step" 2>&1 || status=$?
    cat "$work/step" >>"$log"
    tail -n "${SHOWN:-6}" "$work/step"
    if ((status == 0)); then
        note passed "$name" $((SECONDS - start))
    elif ((status == 124 || status == 137)); then
        note late "$name" $((SECONDS - start)) "stopped after $limit s"
        failed=1
    else
        note FAILED "$name" $((SECONDS - start)) "exit status $status"
        failed=1
    fi
    return "$status"
}

has() { "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)" 2>/dev/null; }

# -- packages ----------------------------------------------------------------------------------------------------------
if compgen -G "wheels/*.whl" >/dev/null; then
    if "$python" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$work/site" wheels/*.whl >>"$log" 2>&1; then
        export PYTHONPATH=$work/site${PYTHONPATH:+:$PYTHONPATH}
    else
        say "the packages in wheels/ could not be installed"
    fi
fi

# The checkout's dspark_fast lacks its two rooms until it is installed. Asked from another folder, where no checkout helps.
imports() { (cd / && "$python" -c "import dspark_fast.reference, dspark_fast.kernels" 2>/dev/null); }
if ! imports; then
    # A package folder made of links does what an editable install does, and changes neither the checkout nor Python.
    mkdir -p "$work/links/dspark_fast"
    ln -s "$PWD"/dspark_fast/* "$work/links/dspark_fast/"
    rm -f "$work/links/dspark_fast/kernels" "$work/links/dspark_fast/reference"
    ln -s "$PWD/kernels" "$PWD/reference" "$work/links/dspark_fast/"
    export PYTHONPATH=$work/links${PYTHONPATH:+:$PYTHONPATH}
    imports || say "dspark_fast cannot be imported: $(cd / && "$python" -c 'import dspark_fast.reference, dspark_fast.kernels' 2>&1 | tail -n 1)"
fi

gpu=$("$python" -c 'import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else "")' 2>>"$log")
"$python" - >>"$log" 2>&1 <<'END'
import importlib.metadata as m, platform
print(platform.python_version(), *(f"{d.name} {d.version}" for d in m.distributions() if d.name in ("torch", "triton", "transformers", "pytest")))
END

# `-m pytest` would put the checkout on sys.path, where kernels/ shadows a library that transformers looks for. Terminated, it
# is interrupted, and so still says what failed until then.
pytest=("$python" -c '
import signal, sys
sys.path[:] = [path for path in sys.path if path]
signal.signal(signal.SIGTERM, signal.default_int_handler)
import pytest
sys.exit(pytest.main(sys.argv[1:]))
')
pytest+=(-p no:cacheprovider -v --tb=short)
options=()
if [[ -n $gpu ]]; then
    say "on $gpu"
    unset TRITON_INTERPRET
    results=${OUT:-bench/results/$(tr '[:upper:] ' '[:lower:]-' <<<"$gpu")}
else
    say "no GPU is at hand: this is a rehearsal on tiny sizes, and no figure of it counts"
    results=${OUT:-$(mktemp -d)}
    options=(--scale tiny --seconds 0.01)
fi
mkdir -p "$results"

# -- tests -------------------------------------------------------------------------------------------------------------
if [[ -z $gpu ]]; then
    skip tests "no GPU (the ordinary test run has the interpreted ones)"
    SHOWN=2 step "kernels, interpreted" 300 env TRITON_INTERPRET=1 "$python" bench/every_kernel.py --rows 2 \
        --ops context_kv sampling verify draft_loss
elif ! has pytest || ! has hypothesis; then
    skip tests "pytest or hypothesis is not installed, and wheels/ has none"
    failed=1 # figures of kernels that were not tested are worth nothing
else
    has xdist && pytest+=(-n 6) # what takes time is compiling, which does not need the GPU
    # Among these rows: 100 repeats of every kernel, which must be equal bit for bit.
    SHOWN=25 step tests 120 "${pytest[@]}" tests/kernels -m "gpu or not gpu" --durations=5
    if has transformers; then # which the targets of these tests are made with
        SHOWN=12 step "engine and training tests" 120 "${pytest[@]}" tests/test_gpu_rounds.py tests/test_training.py tests/trainer tests/test_features.py \
            -m gpu --durations=3
    else
        skip "engine and training tests" "transformers is not installed, and wheels/ has none"
    fi
fi

# -- figures -----------------------------------------------------------------------------------------------------------
if [[ -n $gpu ]]; then
    SHOWN=3 step roofline 30 "$python" bench/roofline.py --out "$results"
else
    skip roofline "no GPU (it would measure this CPU's memory)"
fi
# bench OP SECONDS: no row is begun after SECONDS; imports and the last row come on top.
bench() {
    SHOWN=12 step "bench $1" $(($2 + 30)) "$python" "bench/bench_$1.py" --budget "$2" --out "$results" "${options[@]+"${options[@]}"}"
}
bench rounds 120
bench markov 80
bench verify 50
bench block_attention 50
bench context_kv 15
bench sampling 20
bench draft_loss 40
SHOWN=6 step "training step" 90 "$python" bench/bench_training.py --out "$results" "${options[@]+"${options[@]}"}"

if [[ -n $gpu ]]; then
    SHOWN=4 step "compile time" 70 "$python" bench/compile_time.py --out "$results"
else
    skip "compile time" "no GPU"
fi

# -- memory and races --------------------------------------------------------------------------------------------------
sanitise() {
    # Without torch's caching allocator, or a read behind a tensor would land in memory that torch holds anyway.
    env PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout -k 5 "$1" compute-sanitizer --tool "$2" --error-exitcode 9 "${@:3}"
}
if [[ -z $gpu ]]; then
    skip compute-sanitizer "no GPU"
elif ! command -v compute-sanitizer >/dev/null; then
    skip compute-sanitizer "it is not installed"
elif ((deadline - SECONDS < 40)); then
    skip compute-sanitizer "no time left"
elif ! sanitise 30 memcheck "$python" -c 'import torch; torch.ones(8, device="cuda").sum().item()' >>"$log" 2>&1; then
    skip compute-sanitizer "it does not run on this machine (the log says why)"
else
    for tool in memcheck racecheck; do
        left=$((deadline - SECONDS))
        start=$SECONDS status=0
        say ""
        say "== $tool (at most $left s)"
        sanitise "$left" "$tool" "$python" bench/every_kernel.py --rows 2 >"$work/step" 2>&1 || status=$?
        cat "$work/step" >>"$log"
        grep -E "ERROR SUMMARY|RACECHECK SUMMARY" "$work/step" | tail -n 2
        case $status in
            0) note passed "$tool" $((SECONDS - start)) ;;
            124 | 137) note skipped "$tool" $((SECONDS - start)) "not done when the time was over" ;;
            *)
                note FAILED "$tool" $((SECONDS - start)) "exit status $status"
                failed=1
                ;;
        esac
    done
fi

# -- summary -----------------------------------------------------------------------------------------------------------
say ""
"$python" bench/summary.py "$results" 2>&1 | tee -a "$log"
say ""
for line in "${summary[@]}"; do say "$line"; done
say "results in $results, log in $log, $SECONDS s"
exit "$failed"
