{{/*
The spec of a role's pod: .root is the chart's scope, .role the role, .program what the image runs.
*/}}
{{- define "flambeau.pod" -}}
{{- $root := .root -}}
{{- $role := .role -}}
{{- $values := index .root.Values .role -}}
{{- $job := eq .root.Values.form "job" -}}
{{- $gpus := and (eq .role "worker") (gt (int .root.Values.worker.gpus) 0) -}}
{{- $token := include "flambeau.token" .root -}}
{{- $certs := or .root.Values.tls.enabled $token -}}
{{- $rows := and (eq .role "ps") (gt (int .root.Values.ps.tableMebibytes) 0) -}}
{{- $runs := or (eq .role "coordinator") (eq .role "worker") .root.Values.runs.shared -}}
automountServiceAccountToken: false
enableServiceLinks: false
# It leaves within 10 s of being told to.
terminationGracePeriodSeconds: 30
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with $values.priorityClassName | default $root.Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- if $job }}
restartPolicy: Never
{{- end }}
{{- with $values.spread }}
# A node that is lost should take along as little as it can.
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: {{ . }}
    labelSelector:
      matchLabels:
        {{- include "flambeau.selector" (dict "root" $root "role" $role) | nindent 8 }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if or $gpus $values.tolerations }}
tolerations:
  {{- if $gpus }}
  # Nodes with GPUs are often kept for those who ask for one.
  - key: nvidia.com/gpu
    operator: Exists
    effect: NoSchedule
  {{- end }}
  {{- with $values.tolerations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
{{- if eq $role "worker" }}
{{- with $values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
containers:
  - name: {{ $role }}
    image: "{{ $root.Values.image.registry }}/{{ .image }}:{{ $root.Values.image.version | default $root.Chart.AppVersion }}"
    imagePullPolicy: {{ $root.Values.image.pullPolicy }}
    {{- if $job }}
    command:
      - sh
      - -c
      - {{ $root.Files.Get "files/as-job.sh" | toJson }}
      - as-job
      {{- range .program }}
      - {{ . }}
      {{- end }}
    {{- else if $gpus }}
    # Without the image's entry point, by which containers that see the same GPUs settle who has which: here
    # NVIDIA's device plugin gives each its own.
    command:
      - worker
    {{- end }}
    {{- if eq $role "coordinator" }}
    # The run directory is runs/NAME from here, NAME being the job's.
    workingDir: /
    {{- end }}
    env:
      {{- .env | nindent 6 }}
      - name: FLAMBEAU_METRICS_LISTEN
        value: 0.0.0.0:9464
      - name: FLAMBEAU_LOG
        value: {{ $root.Values.log | quote }}
      - name: FLAMBEAU_LOG_FORMAT
        value: json
      # In a cluster Kubernetes starts again what exits, be it with 0: after a job every role waits for the next (flambeau submit).
      - name: FLAMBEAU_AFTER_JOB
        value: {{ ternary "exit" "wait" $job }}
      {{- if $root.Values.tls.enabled }}
      - name: FLAMBEAU_TLS_CA
        value: /certs/ca.crt
      - name: FLAMBEAU_TLS_CERT
        value: /certs/tls.crt
      - name: FLAMBEAU_TLS_KEY
        value: /certs/tls.key
      {{- end }}
      {{- if or $token (and $root.Values.tls.enabled (not $root.Values.tls.certManager.enabled)) }}
      - name: FLAMBEAU_TOKEN_FILE
        value: /certs/token
      {{- end }}
      {{- with $values.env }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    # Keys for checkpoints and data in s3://..., if there are any: AWS_ACCESS_KEY_ID and so on.
    envFrom:
      - secretRef:
          name: {{ $root.Values.s3.secret }}
          optional: true
    ports:
      {{- if and (eq $role "ps") $root.Values.ps.lookups.enabled }}
      - name: lookups
        containerPort: 7002
      {{- end }}
      {{- with .port }}
      - name: grpc
        containerPort: {{ . }}
      {{- end }}
      - name: metrics
        containerPort: 9464
    startupProbe:
      httpGet:
        path: /healthz
        port: metrics
      periodSeconds: 2
      timeoutSeconds: 2
      failureThreshold: 30
    # Slow to give up: one that is busy is not dead.
    livenessProbe:
      httpGet:
        path: /healthz
        port: metrics
      periodSeconds: 10
      timeoutSeconds: 5
      failureThreshold: 6
    {{- if eq $role "ps" }}
    # Once it has its shard: until then, a rolling upgrade and the disruption budget spare the others. One answer
    # decides, so that a spare that is given a shard counts as loading at once.
    readinessProbe:
      httpGet:
        path: /readyz
        port: metrics
      periodSeconds: 2
      timeoutSeconds: 2
      failureThreshold: 1
    {{- else }}
    readinessProbe:
      httpGet:
        path: /readyz
        port: metrics
      periodSeconds: 5
      timeoutSeconds: 2
    {{- end }}
    {{- $resources := deepCopy $values.resources }}
    {{- if $gpus }}
    {{- $resources = mergeOverwrite $resources (dict "limits" (dict "nvidia.com/gpu" (int $values.gpus))) }}
    {{- end }}
    resources:
      {{- toYaml $resources | nindent 6 }}
    securityContext:
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities:
        drop:
          - ALL
    volumeMounts:
      {{- if eq $role "coordinator" }}
      - name: job
        mountPath: /jobs
        readOnly: true
      {{- end }}
      {{- if $runs }}
      - name: runs
        mountPath: /runs
      {{- end }}
      {{- if and (eq $role "worker") $root.Values.worker.dataClaim }}
      - name: data
        mountPath: /data
        readOnly: true
      {{- end }}
      {{- if $certs }}
      - name: certs
        mountPath: /certs
        readOnly: true
      {{- end }}
      {{- if $rows }}
      - name: rows
        mountPath: /rows
      {{- end }}
      - name: tmp
        mountPath: /tmp
volumes:
  {{- if eq $role "coordinator" }}
  - name: job
    configMap:
      name: {{ include "flambeau.fullname" $root }}-job
  {{- end }}
  {{- if and $runs (or $root.Values.runs.shared (eq $role "coordinator")) }}
  - name: runs
    persistentVolumeClaim:
      claimName: {{ include "flambeau.runs" $root }}
  {{- else if $runs }}
  # A worker's copy of the final weights goes with the pod; the checkpoint has them too.
  - name: runs
    emptyDir: {}
  {{- end }}
  {{- if and (eq $role "worker") $root.Values.worker.dataClaim }}
  - name: data
    persistentVolumeClaim:
      claimName: {{ $root.Values.worker.dataClaim }}
      readOnly: true
  {{- end }}
  {{- if and $root.Values.tls.enabled (not $token) }}
  - name: certs
    secret:
      secretName: {{ include "flambeau.certificate" . }}
      defaultMode: 0440
  {{- else if $certs }}
  - name: certs
    projected:
      defaultMode: 0440
      sources:
        {{- if $root.Values.tls.enabled }}
        - secret:
            name: {{ include "flambeau.certificate" . }}
            items:
              - key: ca.crt
                path: ca.crt
              - key: tls.crt
                path: tls.crt
              - key: tls.key
                path: tls.key
        {{- end }}
        - secret:
            name: {{ $token }}
            items:
              - key: token
                path: token
  {{- end }}
  {{- if $rows }}
  # A restart needs none of these rows: they come back with the checkpoint.
  - name: rows
    emptyDir:
      sizeLimit: {{ $values.tableDiskSize }}
  {{- end }}
  - name: tmp
    emptyDir:
      sizeLimit: {{ $values.tmpSize }}
{{- end -}}

{{/* The metadata of a pod's template; .annotations are the template's own. */}}
{{- define "flambeau.podMetadata" -}}
{{- $values := index .root.Values .role -}}
labels:
  {{- include "flambeau.selector" . | nindent 2 }}
  {{- with $values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (dict) (.annotations | default dict) $values.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* A disruption budget: .maxUnavailable of .role. Pods of a Job can have none. */}}
{{- define "flambeau.budget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "flambeau.fullname" .root }}-{{ .role }}
  labels:
    {{- include "flambeau.labels" . | nindent 4 }}
spec:
  maxUnavailable: {{ .maxUnavailable }}
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "flambeau.selector" . | nindent 6 }}
{{- end -}}

{{/*
A Job's rules for pods that have failed. An evicted pod is replaced. Exit code 1 says that the job has failed, or that this
process cannot go on: it is not tried again. A worker's exit code 3 says that it cannot work: it is tried again for as long
as the coordinator waits for one.
*/}}
{{- define "flambeau.failures" -}}
rules:
  - action: Ignore
    onPodConditions:
      - type: DisruptionTarget
        status: "True"
  {{- if eq .role "worker" }}
  - action: Ignore
    onExitCodes:
      containerName: worker
      operator: In
      values: [3]
  {{- end }}
  - action: {{ ternary "FailJob" "FailIndex" (eq .role "coordinator") }}
    onExitCodes:
      containerName: {{ .role }}
      operator: In
      values: [1]
{{- end -}}

{{/* The fields of a Job's spec that all three have. */}}
{{- define "flambeau.jobSpec" -}}
{{- with .root.Values.pipeline -}}
{{- if gt (int .activeDeadlineSeconds) 0 }}
activeDeadlineSeconds: {{ .activeDeadlineSeconds }}
{{- end }}
{{- if ge (int .ttlSecondsAfterFinished) 0 }}
ttlSecondsAfterFinished: {{ .ttlSecondsAfterFinished }}
{{- end }}
{{- end }}
# Never two of the same: a run has one coordinator, an identity one server.
podReplacementPolicy: Failed
podFailurePolicy:
  {{- include "flambeau.failures" . | nindent 2 }}
{{- end -}}
