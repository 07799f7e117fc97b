{{/* The prefix of all names. */}}
{{- define "flambeau.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains "flambeau" .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-flambeau" (.Release.Name | trunc 31 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{/* The labels by which this release's pods are selected; with .role those of one role. */}}
{{- define "flambeau.selector" -}}
app.kubernetes.io/name: flambeau
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .role }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end -}}

{{/* The labels of an object; with .role it is one role's. */}}
{{- define "flambeau.labels" -}}
{{ include "flambeau.selector" . }}
app.kubernetes.io/version: {{ .root.Values.image.version | default .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end -}}

{{/* The claim that is mounted as /runs. */}}
{{- define "flambeau.runs" -}}
{{- .Values.runs.existingClaim | default (printf "%s-runs" (include "flambeau.fullname" .)) -}}
{{- end -}}

{{/* The Secret with a role's certificate. */}}
{{- define "flambeau.certificate" -}}
{{- index .root.Values.tls.secrets .role | default (printf "%s-%s" (include "flambeau.fullname" .root) .role) -}}
{{- end -}}

{{/* The Secret with the token, if it is one of its own. */}}
{{- define "flambeau.token" -}}
{{- if .Values.token.create -}}
{{- .Values.token.secret | default (printf "%s-token" (include "flambeau.fullname" .)) -}}
{{- else -}}
{{- .Values.token.secret -}}
{{- end -}}
{{- end -}}

{{/* How long servers and workers wait for a coordinator. */}}
{{- define "flambeau.patience" -}}
{{- .Values.patienceSeconds | default (ternary 600 1800 (eq .Values.form "job")) -}}
{{- end -}}
