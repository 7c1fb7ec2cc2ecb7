{{- /* Arguments, where a template needs more than the chart's own: a dict of root ($), role ("router", "prefill", "decode",
"keys") and, of a worker, its values (own). */ -}}

{{- /* Of every object: the release's name where that has the chart's, else both. Object names get suffixes of up to 23
letters and may have 63, so a longer one is cut, with a digest in place of the rest. */ -}}
{{- define "baton.fullname" -}}
{{- $chart := .Values.nameOverride | default .Chart.Name }}
{{- $both := contains $chart .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $chart) }}
{{- $full := .Values.fullnameOverride | default $both }}
{{- if gt (len $full) 40 }}
{{- $full = printf "%s-%s" ($full | trunc 31 | trimSuffix "-") ($full | sha256sum | trunc 8) }}
{{- end }}
{{- $full }}
{{- end }}

{{- define "baton.keysSecret" -}}
{{ .Values.keys.secret | default (printf "%s-keys" (include "baton.fullname" .)) }}
{{- end }}

{{- define "baton.modelClaim" -}}
{{ .Values.model.claim | default (printf "%s-models" (include "baton.fullname" .)) }}
{{- end }}

{{- /* Labels that select nothing. */ -}}
{{- define "baton.extraLabels" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* With annotations and labels of the object, dicts, where it has some. */ -}}
{{- define "baton.metadata" -}}
name: {{ .name }}
namespace: {{ .root.Release.Namespace }}
labels:
  helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
  app.kubernetes.io/managed-by: {{ .root.Release.Service }}
  {{- include "baton.extraLabels" .root | nindent 2 }}
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (dict) (.annotations | default dict) .root.Values.commonAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "baton.labels" -}}
app.kubernetes.io/name: {{ include "baton.fullname" .root }}
app.kubernetes.io/component: {{ .role }}
{{- end }}

{{- define "baton.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "baton.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "baton.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "baton.imageSettings" -}}
image: {{ include "baton.image" . }}
{{- with .Values.image.pullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
{{- end }}

{{- /* What every pod of a role begins with. */ -}}
{{- define "baton.pod" -}}
serviceAccountName: {{ include "baton.fullname" .root }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- with .own.nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with .own.tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- with .own.affinity }}
affinity: {{ toJson . }}
{{- end }}
{{- with .own.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .own.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
# beyond drain_timeout_s and the preStop pause
terminationGracePeriodSeconds: {{ add .root.Values.drainTimeoutSeconds 30 }}
securityContext: {{- include "baton.podSecurity" . | nindent 2 }}
{{- if .root.Values.model.download.repository }}
# until the Job has downloaded the model
initContainers:
  - name: model
    {{- include "baton.imageSettings" .root | nindent 4 }}
    command: [python, -m, baton.deploy.packaging.fetch_model]
    args: {{ toJson (concat (list "wait") (include "baton.downloads" .root | fromJsonArray)) }}
    env:
      {{- include "baton.env" . | nindent 6 }}
    resources:
      requests: {cpu: 100m, memory: 256Mi}
      limits: {memory: 512Mi}
    securityContext: {{- include "baton.containerSecurity" . | nindent 6 }}
    volumeMounts:
      - {name: models, mountPath: /models, readOnly: true}
      - {name: tmp, mountPath: /tmp}
{{- end }}
{{- end }}

{{- /* What the Job downloads, as REPOSITORY@REVISION=DIRECTORY. */ -}}
{{- define "baton.downloads" -}}
{{- $own := .Values.model.download }}
{{- $whole := list (printf "%s@%s=%s" $own.repository $own.revision .Values.model.path) }}
{{- if $own.draftRepository }}
{{- $whole = append $whole (printf "%s@%s=%s" $own.draftRepository $own.draftRevision .Values.model.draft) }}
{{- end }}
{{- toJson $whole }}
{{- end }}

{{- /* What every container of a role ends with. */ -}}
{{- define "baton.container" -}}
livenessProbe:
  httpGet: {path: /health, port: {{ .probed }}}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 4
readinessProbe:
  httpGet: {path: /ready, port: {{ .probed }}}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 2
lifecycle:
  # endpoints forget the pod before it takes nothing new; SIGTERM follows and drains
  preStop: {exec: {command: [sleep, "5"]}}
securityContext: {{- include "baton.containerSecurity" . | nindent 2 }}
volumeMounts:
  - {name: config, mountPath: /etc/baton, readOnly: true}
  - {name: keys, mountPath: /keys, readOnly: true}
  - {name: models, mountPath: /models, readOnly: true}
  - {name: tmp, mountPath: /tmp}
  {{- if and .own.tls .own.tls.secretName }}
  - {name: tls, mountPath: /tls, readOnly: true}
  {{- end }}
  {{- if and .own.apiKeys .own.apiKeys.secretName }}
  - {name: api-keys, mountPath: /api-keys, readOnly: true}
  {{- end }}
  {{- with .own.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{- define "baton.env" -}}
- {name: HOME, value: /tmp}
- {name: HF_HUB_OFFLINE, value: "1"}
- {name: TRITON_CACHE_DIR, value: /tmp/triton}
{{- end }}

{{- define "baton.volumes" -}}
- name: config
  configMap: {name: {{ include "baton.fullname" .root }}-config}
- name: keys
  secret:
    secretName: {{ include "baton.keysSecret" .root }}
    defaultMode: 0440
    # its own secret key and no other
    items:
      - {key: {{ .role }}.key, path: {{ .role }}.key}
      - {key: peers.json, path: peers.json}
- name: models
  persistentVolumeClaim: {claimName: {{ include "baton.modelClaim" .root }}, readOnly: true}
- name: tmp
  emptyDir: {sizeLimit: 2Gi}
{{- with .own.tls }}
{{- if .secretName }}
# whole folders are mounted: a file of its own (subPath) would stay what it was when the Secret is renewed
- name: tls
  secret:
    secretName: {{ .secretName }}
    defaultMode: 0440
    items:
      - {key: tls.crt, path: tls.crt}
      - {key: tls.key, path: tls.key}
{{- end }}
{{- end }}
{{- with .own.apiKeys }}
{{- if .secretName }}
- name: api-keys
  secret:
    secretName: {{ .secretName }}
    defaultMode: 0440
    items:
      - {key: api.json, path: api.json}
{{- end }}
{{- end }}
{{- with .own.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* Of the port of the clients: also its name. */ -}}
{{- define "baton.scheme" -}}
{{ empty .Values.router.tls.secretName | ternary "http" "https" }}
{{- end }}

{{- /* The router's options for the Secrets that it mounts, as a list in JSON. */ -}}
{{- define "baton.secretArgs" -}}
{{- $args := list }}
{{- with .Values.router.tls.secretName }}
{{- $args = concat $args (list "--tls-cert=/tls/tls.crt" "--tls-key=/tls/tls.key") }}
{{- end }}
{{- with .Values.router.apiKeys.secretName }}
{{- $args = append $args "--api-keys=/api-keys/api.json" }}
{{- end }}
{{- toJson $args }}
{{- end }}

{{- define "baton.selector" -}}
matchLabels: {{- include "baton.labels" . | nindent 2 }}
{{- end }}

{{- define "baton.podMetadata" -}}
labels:
  {{- include "baton.labels" . | nindent 2 }}
  {{- include "baton.extraLabels" .root | nindent 2 }}
  {{- with .own.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
annotations:
  {{- with merge (dict) .own.podAnnotations .root.Values.commonAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  # another configuration starts other pods
  checksum/config: {{ include (print .root.Template.BasePath "/config.yaml") .root | sha256sum }}
{{- end }}

{{- define "baton.disruptionBudget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {{- include "baton.metadata" (dict "root" .root "name" (printf "%s-%s" (include "baton.fullname" .root) .role)) | nindent 2 }}
spec:
  maxUnavailable: 1
  selector: {{- include "baton.selector" . | nindent 4 }}
{{- end }}

{{- /* Selects the workers of both kinds. */ -}}
{{- define "baton.workers" -}}
matchLabels: {app.kubernetes.io/name: {{ include "baton.fullname" $ }}}
matchExpressions: [{key: app.kubernetes.io/component, operator: In, values: [prefill, decode]}]
{{- end }}

{{- /* Before the rest, since pods wait for the Secret; gone when it is done. */ -}}
{{- define "baton.hook" -}}
helm.sh/hook: pre-install,pre-upgrade
helm.sh/hook-weight: {{ . | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end }}

{{- /* An autoscaler of workers by the requests of each, baton_worker_requests of its own metrics. */ -}}
{{- define "baton.workerAutoscaler" -}}
{{- $scaled := .own.autoscaling }}
{{- if not (or $scaled.queuedRequests $scaled.runningRequests) }}
{{- fail (printf "%s.autoscaling: neither queuedRequests nor runningRequests is asked for; give one, or set enabled=false" .role) }}
{{- end }}
{{- if gt (int $scaled.minReplicas) (int $scaled.maxReplicas) }}
{{- fail (printf "%s.autoscaling: minReplicas %v is more than maxReplicas %v" .role $scaled.minReplicas $scaled.maxReplicas) }}
{{- end }}
# Needs an adapter that shows Prometheus' series as custom metrics of pods. A new worker loads its weights first, so the number
# grows at once and shrinks slowly; a worker that leaves has its drain time for the requests that it holds.
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata: {{- include "baton.metadata" (dict "root" .root "name" (printf "%s-%s" (include "baton.fullname" .root) .role)) | nindent 2 }}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: {{ .kind }}, name: {{ include "baton.fullname" .root }}-{{ .role }}}
  minReplicas: {{ int $scaled.minReplicas }}
  maxReplicas: {{ int $scaled.maxReplicas }}
  metrics:
    {{- range $kind, $target := dict "queued" $scaled.queuedRequests "running" $scaled.runningRequests }}
    {{- if $target }}
    - type: Pods
      pods:
        metric:
          name: baton_worker_requests
          selector: {matchLabels: {kind: {{ $kind }}}}
        target: {type: AverageValue, averageValue: {{ int $target | quote }}}
    {{- end }}
    {{- end }}
  behavior:
    scaleUp:
      stabilizationWindowSeconds: 15
      policies: [{type: Pods, value: 2, periodSeconds: 60}]
    scaleDown:
      stabilizationWindowSeconds: 600
      policies: [{type: Pods, value: 1, periodSeconds: 180}]
{{- end }}
