#!/usr/bin/env bash
# Load on a running server: TTFT, TPOT and tokens per second at several numbers of clients.
#
#   ./examples/benchmark.sh                                    # BATON_URL, default http://127.0.0.1:8000
#   CLIENTS="1 8 32 64" REQUESTS=128 ./examples/benchmark.sh
#
# Optional: WORKLOAD=chat (or turns, documents, a JSONL file), INPUT=1024 and OUTPUT=256 tokens, JSON=1.
set -euo pipefail

url=${BATON_URL:-http://127.0.0.1:8000}
read -ra clients <<<"${CLIENTS:-1 8 32}"
if [ -n "${WORKLOAD:-}" ]; then
  shape=(--workload "$WORKLOAD")  # chat, turns or documents, or a JSONL file
else
  shape=(--input "${INPUT:-1024}" --output "${OUTPUT:-256}")
fi
exec baton bench serve --url "$url" --concurrency "${clients[@]}" --requests "${REQUESTS:-64}" "${shape[@]}" ${JSON:+--json}
