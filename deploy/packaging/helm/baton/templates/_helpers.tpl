{{- /* Arguments, where a template needs more than the chart's own: a dict of root ($), role ("router", "prefill", "decode",
"keys") and, of a worker, its values (own). */ -}}

{{- define "baton.metadata" -}}
name: {{ .name }}
namespace: {{ .root.Release.Namespace }}
{{- end }}

{{- define "baton.labels" -}}
app.kubernetes.io/name: {{ .root.Values.name }}
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
serviceAccountName: {{ .root.Values.name }}
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
# beyond drain_timeout_s and the preStop pause
terminationGracePeriodSeconds: {{ add .root.Values.drainTimeoutSeconds 30 }}
securityContext: {{- include "baton.podSecurity" . | nindent 2 }}
{{- end }}

{{- /* What every container of a role ends with. */ -}}
{{- define "baton.container" -}}
livenessProbe:
  httpGet: {path: /health, {{ include "baton.probed" . }}}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 4
readinessProbe:
  httpGet: {path: /ready, {{ include "baton.probed" . }}}
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
{{- end }}

{{- define "baton.env" -}}
- {name: HOME, value: /tmp}
- {name: HF_HUB_OFFLINE, value: "1"}
- {name: TRITON_CACHE_DIR, value: /tmp/triton}
{{- end }}

{{- define "baton.volumes" -}}
- name: config
  configMap: {name: {{ .root.Values.name }}-config}
- name: keys
  secret:
    secretName: {{ .root.Values.keys.secret }}
    defaultMode: 0440
    # its own secret key and no other
    items:
      - {key: {{ .role }}.key, path: {{ .role }}.key}
      - {key: peers.json, path: peers.json}
- name: models
  persistentVolumeClaim: {claimName: {{ .root.Values.model.claim }}, readOnly: true}
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
{{- end }}

{{- /* Of the port of the clients: also its name. */ -}}
{{- define "baton.scheme" -}}
{{ empty .Values.router.tls.secretName | ternary "http" "https" }}
{{- end }}

{{- /* What a probe asks, within braces; a kubelet takes any certificate. */ -}}
{{- define "baton.probed" -}}
port: {{ .probed }}{{ eq .probed "https" | ternary ", scheme: HTTPS" "" }}
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
labels: {{- include "baton.labels" . | nindent 2 }}
annotations:
  # another configuration starts other pods
  checksum/config: {{ include (print .root.Template.BasePath "/config.yaml") .root | sha256sum }}
{{- end }}

{{- define "baton.disruptionBudget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {{- include "baton.metadata" (dict "root" .root "name" (printf "%s-%s" .root.Values.name .role)) | nindent 2 }}
spec:
  maxUnavailable: 1
  selector: {{- include "baton.selector" . | nindent 4 }}
{{- end }}

{{- /* Selects the workers of both kinds. */ -}}
{{- define "baton.workers" -}}
matchLabels: {app.kubernetes.io/name: {{ .Values.name }}}
matchExpressions: [{key: app.kubernetes.io/component, operator: In, values: [prefill, decode]}]
{{- end }}

{{- /* Before the rest, since pods wait for the Secret; gone when it is done. */ -}}
{{- define "baton.hook" -}}
annotations:
  helm.sh/hook: pre-install,pre-upgrade
  helm.sh/hook-weight: {{ . | quote }}
  helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end }}
