#!/usr/bin/env bash
# One call on the card: make what is missing, then measure serving within SECONDS.
#   tests/bench/h200.sh smol|8b|tools [SECONDS] [options of tests.bench.h200_serving ...]
# OUT: folder of the results.  SHAPE: folder of the 8B checkpoint, written at its first use.
# LOADS: folder of load.py and prompts.py.  KIT: unpack.sh of packages and model, where neither is
# installed.
set -euo pipefail
cd "$(dirname "$0")/../.."
work=${1:?smol, 8b or tools} seconds=${2:-540}; shift; shift || true
out=${OUT:-${TMPDIR:-/tmp}/slipstream-h200}/$work shape=${SHAPE:-$HOME/slipstream-8b} kit=${KIT:-.gpu/kit/unpack.sh}
[ ! -f "$kit" ] || eval "$(bash "$kit" env)"
begin=$(date +%s) model=smollm2
if [ "$work" = 8b ]; then
  model=$shape
  [ -f "$shape/model.safetensors.index.json" ] ||
    python3 -m tests.bench.make_shape "$shape" \
      --tokenizer "${SLIPSTREAM_GGUF:?the path of SmolLM2 as GGUF}"
fi
[ "$work" != tools ] || set -- --loads "${LOADS:?the folder of load.py and prompts.py}" "$@"
exec python3 -m tests.bench.h200_serving "$model" --work "$work" --out "$out" \
  --budget-s $((seconds - ($(date +%s) - begin))) "$@"
