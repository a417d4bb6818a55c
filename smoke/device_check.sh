#!/usr/bin/env bash
# Runs all checks for a machine with a GPU: smoke, the tests that need a GPU, and benchmarks. If a part fails,
# the others still run; the exit code is 1 if any part failed.
#
#   smoke/device_check.sh [WHEELHOUSE]
#
# Needs a Python with Torch and pytest, and no network. If `import mm_encoder` fails, the missing packages are
# installed from WHEELHOUSE (a folder of wheels; Torch is never replaced). Without a WHEELHOUSE, or if the import
# still fails, this repository is added to PYTHONPATH, and smoke runs without -I.
#
#   PYTHON   the Python to use (python3)
#   OUT      folder for the output of each part (device_check_out)
#   DEVICE   cuda, cuda:N, or cpu to try this script: the tests that need a GPU are then skipped (cuda)
#   TABLES   benchmarks to run (overhead tower plan)
#   LIMIT    time limit of a part, in seconds (600)
set -u

python=${PYTHON:-python3}
device=${DEVICE:-cuda}
limit=${LIMIT:-600}
read -ra tables <<<"${TABLES:-overhead tower plan}"
wheelhouse=${1:+$(realpath "$1")}
out=$(realpath -m "${OUT:-device_check_out}")
mkdir -p "$out" || exit 2
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

works() { "$python" "$@" >"$out/import.txt" 2>&1; }

if ! works -I -c 'import mm_encoder' && [ -n "$wheelhouse" ]; then
  echo "mm_encoder cannot be imported: installing the missing packages from $wheelhouse"
  for pair in numpy:numpy PIL:pillow simplejpeg:simplejpeg safetensors:safetensors filelock:filelock xxhash:xxhash isal:isal \
      pytest:pytest mm_encoder:mm-encoder; do
    works -I -c "import ${pair%%:*}" && continue
    nodeps=()
    [ "$pair" = mm_encoder:mm-encoder ] && nodeps=(--no-deps) # otherwise pip would look for Torch
    "$python" -m pip install --no-index --find-links "$wheelhouse" "${nodeps[@]}" "${pair#*:}"
  done
fi
isolated=(-I)
if ! works -I -c 'import mm_encoder'; then
  echo "mm_encoder is not installed: adding this repository to PYTHONPATH, smoke runs without -I"
  isolated=()
  export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
  works -c 'import mm_encoder' || { echo "the import fails from the repository too:"; tail -n 1 "$out/import.txt"; }
fi

summary=()
failed=0

part() { # NAME COMMAND...: run the command, save its output, continue after a failure
  local name=$1 start=$SECONDS code result
  shift
  echo "== $name: $*"
  timeout "$limit" "$@" >"$out/$name.txt" 2>&1
  code=$?
  case $code in
    0) result=passed ;;
    124) result="FAILED (not done after $limit s)" ;;
    *) result="FAILED (exit code $code)" ;;
  esac
  [ "$code" = 0 ] || failed=1
  tail -n 40 "$out/$name.txt"
  summary+=("$(printf '%-20s %s, %d s' "$name" "$result" $((SECONDS - start)))")
}

part smoke "$python" "${isolated[@]}" -m pytest smoke --device "$device"

# Only the files with such tests: others may need packages that are missing on this machine.
mapfile -t files < <(grep -rl --include='test_*.py' 'mark\.needs_cuda' tests)
if [ "$device" = cpu ]; then
  summary+=("$(printf '%-20s %s' gpu-tests 'left out (DEVICE=cpu)')")
elif [ ${#files[@]} = 0 ]; then
  failed=1
  summary+=("$(printf '%-20s %s' gpu-tests 'FAILED (there are none in tests/)')")
else
  part gpu-tests env FAIL_WITHOUT_CUDA=1 "$python" -m pytest -p no:cacheprovider -m needs_cuda \
    --continue-on-collection-errors "${files[@]}"
fi

for table in "${tables[@]}"; do
  part "benchmark-$table" "$python" -m benchmarks "$table"
done

echo "== summary (output in $out)"
printf '%s\n' "${summary[@]}"
exit "$failed"
