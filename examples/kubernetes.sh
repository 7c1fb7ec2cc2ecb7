#!/usr/bin/env bash
# A cluster of one router, prefill and decode on Kubernetes with Helm.
#
#   IMAGE=registry/baton TAG=0.1.0-cuda MODEL_CLAIM=models MODEL=/models/llama ./examples/kubernetes.sh install
#   ./examples/kubernetes.sh ask "Why is the sky blue?"
#   ./examples/kubernetes.sh uninstall
#
# `render` prints the manifests and asks no cluster. Optional: RELEASE=baton, NAMESPACE=baton, PRESET=multi-node (or
# cpu-demo, secured, autoscaled). docs/operate.md has all values of the chart.
set -euo pipefail

release=${RELEASE:-baton} namespace=${NAMESPACE:-baton} preset=${PRESET:-multi-node}
chart=$(dirname "$0")/../deploy/packaging/helm/baton
# the chart names its objects by the release, with `baton` in the name
fullname() { case $release in *baton*) echo "$release" ;; *) echo "$release-baton" ;; esac; }
values=(
  --set "image.repository=${IMAGE:-baton}" --set "image.tag=${TAG:-}"
  --set "model.claim=${MODEL_CLAIM:-}" --set "model.path=${MODEL:-/models/model}"
  --values "$chart/presets/$preset.yaml"
)

case ${1:?install, render, ask or uninstall} in
install)
  helm upgrade --install "$release" "$chart" --namespace "$namespace" --create-namespace "${values[@]}"
  kubectl --namespace "$namespace" wait pods --for condition=Ready --timeout 20m \
    --selector "app.kubernetes.io/name=$(fullname),app.kubernetes.io/component in (router, prefill, decode)"
  ;;
render)
  helm template "$release" "$chart" --namespace "$namespace" "${values[@]}"
  ;;
ask)
  kubectl --namespace "$namespace" port-forward "service/$(fullname)" 8000:80 >/dev/null &
  trap 'kill $!' EXIT
  curl --silent --retry 10 --retry-connrefused http://127.0.0.1:8000/v1/models
  curl --silent --no-buffer http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \
    -d "$(python3 -c 'import json, sys; print(json.dumps({"stream": True, "messages": [
      {"role": "user", "content": sys.argv[1]}]}))' "${2:?a question}")"
  ;;
uninstall)
  helm uninstall "$release" --namespace "$namespace"
  ;;
*)
  echo "kubernetes.sh: $1 is none of install, render, ask and uninstall" >&2
  exit 2
  ;;
esac
