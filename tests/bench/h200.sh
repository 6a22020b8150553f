#!/usr/bin/env bash
# One call on the card: make what is missing, then measure all that is asked of WORK in SECONDS.
#   tests/bench/h200.sh smol|8b|card [SECONDS] [options of tests.bench.acceptance ...]
# OUT: folder of the results.  SHAPE: folder of the 8B checkpoint, written at its first use with the
# tokenizer of TOKENIZER, a GGUF file.  LOADS: folder of load.py, prompts.py and toolcheck.py; smol
# measures no tools without it.  KIT: unpack.sh of packages and model, where neither is installed.
# CACHE: folder of compiled kernels; card finds those of smol there.
set -euo pipefail
cd "$(dirname "$0")/../.."
work=${1:?smol, 8b or card} seconds=${2:-540}; shift; shift || true
out=${OUT:-${TMPDIR:-/tmp}/slipstream-h200} shape=${SHAPE:-$HOME/slipstream-8b} kit=${KIT:-.gpu/kit/unpack.sh}
[ ! -f "$kit" ] || eval "$(bash "$kit" env)"
begin=$(date +%s) model=smollm2 cache=${CACHE:-$HOME/slipstream-kernels}
case $work in
  8b) model=$shape
      [ -f "$shape/model.safetensors.index.json" ] ||
        python3 -m tests.bench.make_shape "$shape" \
          --tokenizer "${TOKENIZER:-${SLIPSTREAM_GGUF:?the path of SmolLM2 as GGUF}}" ;;
  card) model=${SLIPSTREAM_GGUF:?the path of SmolLM2 as GGUF} ;;
  smol) [ -z "${LOADS:-}" ] || set -- --loads "$LOADS" "$@" ;;
esac
exec python3 -u -m tests.bench.acceptance "$work" "$model" --out "$out" \
  --cache "$cache/${work/card/smol}" --budget-s $((seconds - ($(date +%s) - begin))) "$@"
