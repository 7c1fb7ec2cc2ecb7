#!/usr/bin/env bash
# Prefill on one host, decode on another, with authenticated and encrypted links. Run on each host:
#
#   MODEL=DIR_OR_HUB_ID ROUTER=10.0.0.1 KEYS=./keys ./examples/two_hosts.sh keys       # once, on the first host
#   (copy the directory KEYS to the second host)
#   MODEL=... ROUTER=10.0.0.1 HERE=10.0.0.1 KEYS=./keys ./examples/two_hosts.sh prefill   # router and prefill
#   MODEL=... ROUTER=10.0.0.1 HERE=10.0.0.2 KEYS=./keys ./examples/two_hosts.sh decode
#
# Optional: DRAFT=HEAD (directory, Hub id or ngram), HTTP_PORT=8000, CONTROL_PORT=7100, KV_PORT=7200, PREFIX_PORT=7300,
# MORE="flags of all workers". Clients reach the router at http://127.0.0.1:HTTP_PORT of the first host; to open it
# to other hosts, give the router --api-keys and --tls-cert (docs/router.md).
set -euo pipefail

role=${1:?keys, prefill or decode}
keys=${KEYS:?a directory for keys}
control="tcp://${ROUTER:-127.0.0.1}:${CONTROL_PORT:-7100}"
draft=(${DRAFT:+--draft "$DRAFT"})
read -ra more <<<"${MORE:-}"

case $role in
keys)
  baton keys init "$keys"
  ;;
prefill)
  baton router --model "${MODEL:?}" --port "${HTTP_PORT:-8000}" --control-bind "$control" --keys "$keys" &
  router=$!
  baton prefill --model "$MODEL" "${draft[@]}" --router "$control" --keys "$keys" \
    --kv-bind "tcp://${HERE:-127.0.0.1}:${KV_PORT:-7200}" "${more[@]}" &
  prefill=$!
  trap 'kill -TERM $router $prefill 2>/dev/null; wait' EXIT INT TERM
  wait -n  # when one ends, so does the other
  ;;
decode)
  exec baton decode --model "${MODEL:?}" "${draft[@]}" --router "$control" --keys "$keys" \
    --prefix-bind "tcp://${HERE:-127.0.0.1}:${PREFIX_PORT:-7300}" "${more[@]}"
  ;;
*)
  echo "two_hosts.sh: $role is none of keys, prefill and decode" >&2
  exit 2
  ;;
esac
