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
