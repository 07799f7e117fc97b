#!/usr/bin/env bash
# Makes the PrometheusRule of deploy/kubernetes from the rules and alerts of deploy/prometheus. Prometheus itself cannot
# read a PrometheusRule, and kustomize cannot make one of a file; tests/deploy/check-kubernetes.py sees that both agree.
set -euo pipefail
cd "$(dirname "$0")/.."

{
    cat <<'HEAD'
# Made by scripts/make-prometheus-rule.sh of deploy/prometheus: change it there.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: flambeau
  labels:
    app.kubernetes.io/name: flambeau
spec:
  groups:
HEAD
    for file in rules alerts; do
        sed -e '1,/^groups:/d' -e '/./s/^/  /' "deploy/prometheus/$file.yml"
    done
} >deploy/kubernetes/components/monitoring/prometheus-rule.yaml
